"""What modules know of weights that are parts, one on each rank of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...quantizers import Quantizer
from ...recipes import Plan
from ...tensor import is_quantized
from ..autograd import Boundary, share
from ..weights import separate_names
from .dealt_parameters import matrices_of, own_value
from .marks import mark_parameter, marked
from .parallel_options import ParallelOptions, in_group, mark
from .quantized_parts import of_part, reason_against_part
from .tensor_parallel import COLUMN, ROW, Parallel, is_dtensor

__all__ = ["ParallelWeights", "SplitTogether", "first_own_part"]


class _Refusal:
    """What raises where it is asked whether it is true, and not where it is looked up.

    Others look at all attributes of a module: `inspect.getmembers`, `torch.jit`, debuggers.

    Args:
        error: that is raised.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __bool__(self) -> bool:
        raise self._error


class SplitTogether:
    """Part of modules whose weights torch's styles cannot deal out one by one."""

    @property
    def _distribute_module_applied(self) -> Any:
        """Whether torch has dealt the module out: what its `distribute_module` asks first of all.

        As a truth value it raises NotImplementedError: of weights that torch's styles replicate or
        cut the module's own operations could make nothing.
        """
        return _Refusal(
            NotImplementedError(
                f"{type(self).__name__}: its weights are split together, and torch's styles take "
                "one at a time; take hybridq.distributed.FusedParallel(sequence_parallel=...) in "
                "the plan, or make the module with tp_group="
            )
        )

    @_distribute_module_applied.setter
    def _distribute_module_applied(self, value: bool) -> None:
        self.__dict__["_distribute_module_applied"] = value


class ParallelWeights(Boundary):
    """Part of every quantized module: how its weights lie over ranks."""

    #: By part, how its weight lies over the ranks of a tensor-parallel group, where it is a part.
    parallel: Mapping[str, Parallel] = {}
    #: Whether there is any; a bool, since dynamo has no opinion of an empty mapping.
    is_parallel: bool = False
    #: Of a row parallel part whose weight is a DTensor, along which dimension of its output tokens
    #: are dealt out, where its sum is scattered by the module itself (`token_styles`).
    scatters_tokens: int | None = None
    #: Whether a column parallel part whose weight is a DTensor takes tokens that are dealt out.
    gathers_tokens: bool = False
    #: Formats of the terms of sums over ranks each of which gets its tokens, of outputs and of
    #: gradients (`hybridq.distributed.quantize_token_sums`); None: values travel.
    token_sums: tuple[str, str] | None = None
    #: Whether the gradients of parameters that every rank has whole, and of which it sees its own
    #: tokens, are summed over ranks in the backward; else they are marked for who does that.
    sums_gradients: bool = False
    #: Whether parameters are DTensors that the module itself makes local (`FusedParallel`).
    is_dealt: bool = False
    #: Of a parameter that a whole module has, the names of those that have its matrices.
    matrices: Mapping[str, tuple[str, ...]] = {}
    #: How initial values of parts are drawn.
    drawing: ParallelOptions = ParallelOptions()

    def _take_parallel(self, options: ParallelOptions, parts: Mapping[str, Any]) -> None:
        """Take the constructor's choice, before the weights are made.

        Args:
            options: what the constructor was told.
            parts: by part, its mode, and the rows or columns that each rank has.
        """
        owner = type(self).__name__
        made = {part: options.parallel(owner, *own) for part, own in parts.items()}
        found = {part: one for part, one in made.items() if one is not None}
        if found:  # an nn.Module that is not made yet takes nothing but this
            self.__dict__["parallel"], self.__dict__["is_parallel"] = found, True
            self.__dict__["drawing"] = options._replace(tp_group=None)

    def become_part(self, parallel: Mapping[str, Parallel | None]) -> None:
        """Take how the weights lie over ranks, after each rank's have become its parts.

        Args:
            parallel: by part; None: every rank has it whole, of one rank.
        """
        found = {part: one for part, one in parallel.items() if one is not None}
        if found:
            self.parallel, self.is_parallel, self.sums_gradients = found, True, True
            self._mark_parallel()

    def become_dealt(self) -> None:
        """Take that the parameters are DTensors, after each rank's have become its parts."""
        self.is_dealt = True
        module: Any = self
        parts: Mapping[str, str] = module.weight_parts
        module.weight_parts = {
            one: part for name, part in parts.items() for one in matrices_of(self, name)
        }

    def local_parameter(self, name: str) -> Any:
        """Return a parameter as products take it: of one that is dealt out, this rank's part.

        Args:
            name: of the parameter, as a whole module has it.
        """
        return own_value(self, name) if self.is_dealt else getattr(self, name)  # type: ignore[arg-type]

    @property
    def whole_parts(self) -> dict[str, str]:
        """The part of the module that each weight is of, by the names that a whole module has."""
        module: Any = self
        of = {one: name for name, several in self.matrices.items() for one in several}
        return {of.get(name, name): part for name, part in module.weight_parts.items()}

    def whole_parameter(self, name: str) -> torch.Tensor:
        """Return the values of a parameter as a whole module has it, without a gradient.

        Where ranks have parts of it, every rank must ask.

        Args:
            name: as a whole module has it; planes are decoded.
        """
        found: list[Any] = [getattr(self, one).detach() for one in matrices_of(self, name)]
        module: Any = self
        parallel = self.parallel.get(module.weight_parts.get(name, name))
        if any(is_dtensor(one) for one in found):
            found = [one.full_tensor() if is_dtensor(one) else one for one in found]
        elif parallel is not None:
            dim = 0 if parallel.mode == COLUMN else 1
            rows = list(separate_names(module).get(name, {}).values()) if dim == 0 else []
            own = found[0].dequantize() if is_quantized(found[0]) else found[0]
            apart = own.split(rows) if rows else [own]
            world = len(parallel.sizes)
            found = [
                parallel.whole(one, dim, (one.shape[0],) * world if rows else ()) for one in apart
            ]
        values = [one.dequantize() if is_quantized(one) else one for one in found]
        return values[0] if len(values) == 1 else torch.cat(values)

    def whole_inputs(self, part: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that a whole part multiplies, of what this rank's part does.

        Row parallel: every rank has some of the features; column parallel with
        `sequence_parallel`: some of the tokens. Then every rank must ask.

        Args:
            part: of the module.
            rows: `[..., features]`.
        """
        return self._whole_features(part, rows, ROW)

    def whole_outputs(self, part: str, rows: torch.Tensor) -> torch.Tensor:
        """Return what a whole part makes, of what this rank's part does; see `whole_inputs`.

        Args:
            part: of the module.
            rows: `[..., features]`; column parallel: some of them; row parallel with
                `sequence_parallel`: some of the tokens.
        """
        return self._whole_features(part, rows, COLUMN)

    def _whole_features(self, part: str, rows: torch.Tensor, mode: str) -> torch.Tensor:
        parallel = self.parallel.get(part)
        if parallel is None:
            return rows
        if parallel.mode == mode:
            return parallel.whole(rows, -1)
        if not parallel.sequence_parallel:
            return rows
        return parallel.whole(rows, 0, (rows.shape[0],) * len(parallel.sizes))

    def stepped(self, part: str) -> torch.Tensor | None:
        """Return the first parameter that a part has a weight in, where they are dealt out.

        Args:
            part: of the module.
        """
        if not self.is_dealt:
            return None
        module: Any = self
        found = (name for name, one in module.weight_parts.items() if one == part)
        made: torch.Tensor = getattr(self, next(found))
        return made

    def of_all_tokens(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """Return a parameter that every rank has whole, for a product of this rank's tokens.

        Its gradient is then that of all tokens, where the module sums gradients.

        Args:
            parameter: a norm's, the bias of a row parallel part, or None.
        """
        if parameter is None or not self.sums_gradients:
            return parameter
        first = next(iter(self.parallel.values()))
        return share(parameter, first.group) if first.sequence_parallel else parameter

    @property
    def _distribute_module_applied(self) -> Any:
        """Whether torch has dealt the module out: what its `distribute_module` asks first of all.

        As a truth value it raises NotImplementedError where a weight is quantized: torch would send
        the memory of a tensor that has none of its own, and the process would crash.
        """
        module: Any = self
        for name, parameter in module._parameters.items():
            if is_quantized(parameter):
                error = module._error(
                    NotImplementedError,
                    f"{name} is quantized, and torch's styles send values, got a "
                    f"{type(parameter).__name__}; take hybridq.distributed.ColwiseParallel or "
                    "RowwiseParallel, which cut planes, or quantize after parallelize_module",
                )
                return _Refusal(error)
        return bool(self.__dict__.get("_distribute_module_applied", False))

    @_distribute_module_applied.setter
    def _distribute_module_applied(self, value: bool) -> None:
        self.__dict__["_distribute_module_applied"] = value

    def part_quantizer(
        self, part: str, plan: Plan, quantizer: Quantizer
    ) -> tuple[Quantizer, str | None]:
        """Return what quantizes the weight of a part, and why it must not be; None: it may be.

        Args:
            part: of the module.
            plan: under which it computes.
            quantizer: of the weight's slot.
        """
        parallel = self.parallel.get(part) if self.is_parallel else None
        if parallel is None:
            return quantizer, None
        reason = reason_against_part(parallel, plan, quantizer)
        return (quantizer if reason else of_part(quantizer, parallel.group)), reason

    def _boundary_quantizer(self, recipe: Any, tensor_type: str) -> Any:
        module: Any = self
        if self.is_parallel:
            raise module._error(
                NotImplementedError,
                "fp8_output and fp8_grad take modules that a rank has whole, since outputs and "
                "gradients of parts are summed over ranks, got a tensor-parallel one",
            )
        return super()._boundary_quantizer(recipe, tensor_type)

    def _mark_parallel(self) -> None:
        """Mark parameters that are parts, and those whose gradients are of a part of the tokens."""
        if not self.is_parallel:
            return
        module: Any = self
        first = next(iter(self.parallel.values()))
        for name, _ in module.named_parameters(recurse=False):
            prefix = name.removesuffix("weight").removesuffix("bias")
            part = module.weight_parts.get(f"{prefix}weight")
            one = None if part is None else self.parallel.get(part)
            dim = None
            if one is not None and (name.endswith("weight") or one.mode == COLUMN):
                dim = 0 if one.mode == COLUMN else 1
            if dim is not None or not self.sums_gradients:
                mark(module, name, one or first, dim)

    def mark_weights(self, row_parallel: bool = False) -> None:
        """Mark the weights as parts for Megatron's norms of gradients, those that are not yet.

        Args:
            row_parallel: whether a weight of the only part is columns of the whole, and not rows;
                of an MLP the second one is.
        """
        module: Any = self
        for name, part in module.weight_parts.items():
            if name not in marked(module, "tensor_model_parallel"):
                own = {"partition_dim": int(row_parallel or part == "fc2"), "partition_stride": 1}
                mark_parameter(module, name, tensor_model_parallel=True, **own)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take the group of the ranks that have the other parts of the module's weights.

        Args:
            tp_group: a process group of `tp_size` ranks, or its name; None changes nothing.

        Raises:
            ValueError: it has another number of ranks.

        Source: Transformer Engine's name and meaning.
        """
        if tp_group is not None:
            owner = type(self).__name__
            self.parallel = {
                part: in_group(owner, one, tp_group) for part, one in self.parallel.items()
            }


def first_own_part(model: nn.Module) -> str | None:
    """Return the name of the first module that was made for one rank of several; None: none was.

    Its parameters are plain, and nobody can tell by them that they are parts (`tp_group=`,
    `tp_size=`); those that `parallelize_module` dealt out are DTensors.

    Args:
        model: any.
    """
    for name, module in model.named_modules():
        parallel = getattr(module, "parallel", None) if not getattr(module, "is_dealt", 1) else None
        if parallel and any(len(one.sizes) > 1 for one in parallel.values()):
            return name or type(module).__name__
    return None

"""What modules know of weights that are parts, one on each rank of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...quantizers import Quantizer
from ...recipes import Plan
from ...tensor import is_quantized
from ..autograd import Boundary
from .parallel_options import ParallelOptions, in_group, mark
from .quantized_parts import of_part, reason_against_part
from .tensor_parallel import COLUMN, Parallel

__all__ = ["ParallelWeights"]


class ParallelWeights(Boundary):
    """Part of every quantized module: how its weights lie over ranks."""

    #: By part, how its weight lies over the ranks of a tensor-parallel group, where it is a part.
    parallel: Mapping[str, Parallel] = MappingProxyType({})
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

    @property
    def _distribute_module_applied(self) -> bool:
        """Whether torch has dealt the module out: what its `distribute_module` asks first of all.

        Raises:
            NotImplementedError: a weight is quantized: torch would send the memory of a tensor that
                has none of its own, and the process would crash.
        """
        module: Any = self
        for name, parameter in module._parameters.items():
            if is_quantized(parameter):
                raise module._error(
                    NotImplementedError,
                    f"{name} is quantized, and torch's styles send values, got a "
                    f"{type(parameter).__name__}; take hybridq.distributed.ColwiseParallel or "
                    "RowwiseParallel, which cut planes, or quantize after parallelize_module",
                )
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
        for name, parameter in module.named_parameters(recurse=False):
            prefix = name.removesuffix("weight").removesuffix("bias")
            part = module.weight_parts.get(f"{prefix}weight")
            one = None if part is None else self.parallel.get(part)
            if one is None:
                mark(parameter, first, None)
            elif name.endswith("weight"):
                mark(parameter, one, 0 if one.mode == COLUMN else 1)
            else:
                mark(parameter, one, 0 if one.mode == COLUMN else None)

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

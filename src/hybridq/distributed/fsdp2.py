"""FSDP2: parameters of high precision that are gathered as planes.

`prepare_fsdp2(model)` makes the weights of hybridq's modules `GatheredWeight`s; then plain
`torch.distributed.fsdp.fully_shard` shards them as ever. They stay parameters of their own dtype
for the optimizer; what travels in an all-gather are the planes of the recipe, each rank having
encoded its own rows (see `shards`). A forward gathers rowwise planes, a backward columnwise ones.

The unsharded parameter that a module finds as its weight is a QuantizedTensor. Weights that are
quantized already (`quantized_model_init`) become `QuantizedWeight`s, whose shards stay quantized.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._log import log_once
from .._torch_private import out_of_graphs
from .._torch_ranks import is_fsdp2_shard
from ..nn import Linear, QuantizedModule
from ..nn.weights import replaced
from ..recipes import SlotPlan
from ..tensor import is_quantized
from .agreement import Prepared, expected_stack_recipe, read_arrived
from .attachment import Attachment, is_prepared, local_of
from .encoding import MeshPart, ShardWork, encode_shards
from .parameters import GatheredParameter, QuantizedShard, QuantizedStackShard, StackedParameter
from .tensors import GatheredWeight, QuantizedWeight

__all__ = ["Weight", "gathered_weights", "prepare_fsdp2", "wire_nbytes"]


class Weight(NamedTuple):
    """A weight that can travel as planes.

    Attributes:
        module, part: a module that owns it, and which of the module's parts it is.
        path: its qualified name.
        parameter: itself.
        owners: all modules that use it, with its name in them.
    """

    module: QuantizedModule
    part: str
    path: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]

    def slots(self) -> SlotPlan | tuple[SlotPlan | None, ...] | None:
        """Return how it is quantized under the recipe in force; of several matrices, each."""
        if self.parameter.dim() == 3:
            count = local_of(self.parameter).shape[0]
            return expected_stack_recipe(self.module, self.part, count).slots
        plan = self.module.plan_now(self.part)
        return None if plan is None else plan.weight


_PREPARED: Final = (GatheredWeight, QuantizedWeight)
_NOT_QUANTIZED: Final = (
    "make the module outside of quantized_model_init, or leave prepare_fsdp2 and fully_shard out"
)


def prepare_fsdp2(model: nn.Module) -> nn.Module:
    """Let the weights of hybridq's modules in `model` travel as planes; return `model`.

    Called before `fully_shard`, and after `parallelize_module`, if both are used: then a
    parameter stays a DTensor of the tensor-parallel mesh, and its planes, which travel among the
    data-parallel ranks, are parts of the planes of the whole weight.

    Parameters keep their values, dtype and names; what an optimizer updates, and what a state_dict
    holds, stay tensors of high precision. A parameter that is a QuantizedTensor stays quantized in
    its shards; in a state_dict it is decoded.

    Args:
        model: any module.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: a weight is sharded by `fully_shard` already, or dealt out over several
            dimensions of a mesh, or a module was made for one rank of a group that it does not
            know yet (`tp_size=`).
        NotImplementedError: a quantized weight is rounded stochastically, or belongs to a module of
            another library; or tensor parallelism split a weight that is quantized, or one of
            neither a `hybridq.Linear` nor a module that `FusedParallel` dealt out.

    A weight that another kind of module uses as well (tied to an embedding) is left as it is, and
    so is one that is kept as `[in, out]` (GPT-2's `Conv1D`), and matrices that `FusedParallel` has
    parted and that are quantized together: FSDP2 gathers their values.

    Example:
        >>> import torch, hybridq
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)))
        >>> type(hybridq.distributed.prepare_fsdp2(model)[0].weight).__name__
        'GatheredWeight'
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"prepare_fsdp2: model must be an nn.Module, got {type(given).__name__}")
    found = gathered_weights(model, takes_parts=True)
    _tell_of_values(model)
    _check_quantized(model, {id(weight.parameter) for weight in found})
    prepared = Prepared(model)
    for module, part, path, parameter, owners in found:
        if is_prepared(getattr(*owners[0])):
            continue  # tied, and done
        if is_quantized(parameter):
            tensor: Any = _held(parameter, (owners[0][0], part, path), prepared)
        else:
            local, place = local_of(parameter.data), (module, part, path, prepared)
            if parameter.dim() == 3:
                about: GatheredParameter = StackedParameter(
                    *place, local.shape[0], module.holds_transposed
                )
            else:
                about = GatheredParameter(*place, _mesh_part(module, part, path, parameter))
            tensor = GatheredWeight(local, about)
        attachment = Attachment(tensor._about)
        whole = _like(parameter.data, tensor) if _is_dtensor(parameter) else tensor
        made = nn.Parameter(whole, parameter.requires_grad)
        replaced(parameter, "prepare_fsdp2", "fully_shard")
        owner: Any
        for owner, name in owners:
            owner._parameters[name] = made
            owner.keep_prepared(name, attachment)
    for owner in {owner for *_, owners in found for owner, _ in owners}:
        owner.register_state_dict_post_hook(_plain_state)
    _hook.install()
    return model


def _mesh_part(module: Any, part: str, path: str, weight: torch.Tensor) -> MeshPart | None:
    """Return which part of a larger weight a weight is; None: it is whole."""
    if _is_dtensor(weight):
        return MeshPart.of(weight, path)
    return MeshPart.of_own(weight, module.parallel.get(part))


def _is_dtensor(tensor: Any) -> bool:
    return getattr(tensor, "device_mesh", None) is not None


def _like(given: Any, local: torch.Tensor) -> Any:
    """Return a DTensor that lies as a given one does, and has another local tensor."""
    from torch.distributed.tensor import DTensor  # not every build of torch has it

    mesh, placements = given.device_mesh, given.placements
    how: dict[str, Any] = {"shape": given.shape, "stride": given.stride(), "run_check": False}
    return DTensor.from_local(local, mesh, placements, **how)


def gathered_weights(model: nn.Module, *, takes_parts: bool = False) -> list[Weight]:
    """Return the weights of hybridq's modules in `model` that can travel as planes.

    Args:
        model: any module; those that `prepare_fsdp2` has prepared already are left out, and so are
            matrices that are kept as `[in, out]`.
        takes_parts: also those that tensor parallelism split.

    Raises:
        RuntimeError: a weight is a DTensor already, and not one that is taken.
        NotImplementedError: a weight cannot be taken as it is.
    """
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append((module, name))
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        for name, part in module.initial_weights():
            whole = f"{path}.{name}".lstrip(".")  # of the model itself its name alone
            weight: Any = module._parameters.get(name)
            if weight is None or is_prepared(weight.data):
                continue
            if name not in _names_of(module, weight):
                continue  # what no GEMM has is gathered as it is held: as values
            if name in _joined_names(module):
                continue  # one of several matrices that are quantized together
            if weight.dim() not in (2, 3) or (weight.dim() == 3 and not weight.numel()):
                continue
            if module.holds_transposed and weight.dim() == 2:
                continue  # shards of its rows are columns of what is quantized
            if takes_parts and _is_dtensor(weight):
                _check_part(module, whole, weight)
            elif takes_parts and not is_quantized(weight) and _lacks_group(module, part):
                raise RuntimeError(
                    f"prepare_fsdp2: {whole} is one rank's part (tp_size=), and amaxes are "
                    "those of all ranks; call set_tensor_parallel_group of its module first"
                )
            elif takes_parts and _reduces_over_parts(module, part, weight):
                raise NotImplementedError(
                    f"prepare_fsdp2: {whole} is one rank's quantized part (tp_group=), and "
                    "its amax is that of all parts, which writes to shards do not reduce; "
                    f"{_NOT_QUANTIZED}"
                )
            elif type(weight.data) is not torch.Tensor and not is_quantized(weight):
                raise RuntimeError(
                    f"prepare_fsdp2: {whole} must be a plain parameter, or one that "
                    f"parallelize_module split, got {type(weight.data).__name__}; call "
                    "prepare_fsdp2 before fully_shard"
                )
            if is_quantized(weight) and weight.dim() == 3 and weight.tensor_storage.count is None:
                raise NotImplementedError(
                    f"prepare_fsdp2: {whole} {list(weight.shape)} must have planes of each "
                    "matrix to stay quantized in shards, got those of one matrix; make it by "
                    "Quantizer.quantize_stack, or its module inside quantized_model_init"
                )
            owners = users[id(weight)]
            if all(name in _names_of(owner, weight) for owner, name in owners):
                found.append(Weight(module, part, whole, weight, owners))
    return found


def _names_of(module: Any, weight: torch.Tensor) -> Iterable[str]:
    """Return the names under which a module has weights that travel as planes, if `weight` may.

    One that is quantized does from every module that may hold it so, such as an embedding.
    """
    if is_quantized(weight) and isinstance(module, QuantizedModule):
        return dict(module.initial_weights())
    return getattr(module, "weight_parts", ())


def _check_part(module: QuantizedModule, name: str, weight: Any) -> None:
    """Raise unless a weight that is dealt out over ranks can travel as planes."""
    if is_fsdp2_shard(weight):
        raise RuntimeError(
            f"prepare_fsdp2: {name} must not be sharded yet, and fully_shard has sharded it; call "
            "prepare_fsdp2 after parallelize_module and before fully_shard"
        )
    if is_quantized(local_of(weight)):
        raise NotImplementedError(
            f"prepare_fsdp2: {name} is quantized and split by parallelize_module, and shards of "
            f"such parts cannot be written; {_NOT_QUANTIZED}"
        )
    if weight.dim() == 3 and all(p.is_shard(0) for p in weight.placements):
        return  # whole matrices, each on one rank
    if not (isinstance(module, Linear) or module.is_dealt):
        raise NotImplementedError(
            f"prepare_fsdp2: {name} must be a weight in high precision of a hybridq.Linear, or "
            "of a module that FusedParallel dealt out, to travel as planes, got a weight of a "
            f"{type(module).__name__}; leave prepare_fsdp2 out: fully_shard alone gathers values"
        )
    MeshPart.of(weight, name)


def _lacks_group(module: QuantizedModule, part: str) -> bool:
    """Return whether a module was made for one rank of several, and knows not which ranks."""
    parallel = module.parallel.get(part)
    return parallel is not None and len(parallel.sizes) > 1 and not parallel.group


def _reduces_over_parts(module: QuantizedModule, part: str, weight: Any) -> bool:
    """Return whether a quantized part of a weight has an amax that is that of all parts."""
    parallel = module.parallel.get(part)
    if parallel is None or len(parallel.sizes) < 2 or not is_quantized(weight):
        return False
    return getattr(weight.own_quantizer, "amax_group", None) is not None


def _joined_names(module: QuantizedModule) -> set[str]:
    """Return the names of a module's matrices that are quantized as one."""
    return {name for names in module.matrices.values() for name in names}


def _tell_of_values(model: nn.Module) -> None:
    """Log which weights are gathered as values."""
    found: dict[str, list[str]] = {"transposed": [], "joined": []}
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        joined = _joined_names(module)
        for name in module.weight_parts:
            if name in joined:
                found["joined"].append(f"{path}.{name}".lstrip("."))
            elif module.holds_transposed and getattr(module._parameters.get(name), "ndim", 0) == 2:
                found["transposed"].append(f"{path}.{name}".lstrip("."))
    because = {
        "transposed": "that are kept as [in, out], whose shards are columns of what is quantized",
        "joined": "that FusedParallel has parted and that are quantized together",
    }
    for kind, names in found.items():
        if names:
            log_once(
                f"fsdp2.{kind}:{names}",
                f"fsdp2: values are gathered, and no planes, of {len(names)} weights "
                f"{because[kind]}: {names[0]}, ...",
            )


def _check_quantized(model: nn.Module, taken: set[int]) -> None:
    """Raise where a quantized parameter would be quantized anew by its shards."""
    for path, parameter in model.named_parameters():
        if is_quantized(parameter) and id(parameter) not in taken:
            raise NotImplementedError(
                f"prepare_fsdp2: {path} {list(parameter.shape)} is quantized, and only weights of "
                "linear modules and embeddings, which no other kind of module uses, stay so in "
                "shards; make its module under quantized_model_init(enabled=False)"
            )


def _held(parameter: Any, place: tuple[Any, str, str], prepared: Prepared) -> QuantizedWeight:
    """Return a quantized parameter as one that FSDP2 may shard."""
    quantizer = parameter.quantizer_for_write("prepare_fsdp2")
    storage = parameter.tensor_storage
    about: Any
    if storage.count is None:
        about = QuantizedShard(*place, storage, quantizer, prepared)
    else:
        is_transposed = place[0].holds_transposed
        if is_transposed:  # planes are those of what is multiplied
            storage, quantizer = parameter.detach().mT.tensor_storage, quantizer.mirrored()
        about = QuantizedStackShard(*place, storage, quantizer, prepared, is_transposed)
    held = about.whole(storage)
    if parameter.initial_value is not None:
        held.initial = parameter.initial_value.get()
        about.keeps_initial = True
    return QuantizedWeight(held, about, parameter.shape, parameter.dtype, parameter.device)


def _plain_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put plain tensors into a state_dict: those that the parameters hold, no copies."""
    for name in getattr(module, "prepared_weights", ()):
        tensor = state.get(prefix + name)
        local = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(local, _PREPARED):
            continue
        values = local.high if isinstance(local, GatheredWeight) else local.dequantize()
        state[prefix + name] = values if local is tensor else _like(tensor, values)


def _abouts(parameters: Iterable[torch.Tensor]) -> list[GatheredParameter]:
    """Return what prepared weights among `parameters` know, each once, in the order of making."""
    locals_ = (getattr(parameter, "_local_tensor", parameter) for parameter in parameters)
    found = {one._about for one in locals_ if isinstance(one, _PREPARED)}
    return sorted(found, key=lambda about: about.serial)


class _Hook:
    """After every step of an optimizer: the maxima of its shards, by one reduction per group."""

    def __init__(self) -> None:
        self._is_installed = False

    def install(self) -> None:
        """Register with torch's optimizers; once per process."""
        if not self._is_installed:
            self._is_installed = True
            register_optimizer_step_post_hook(self._run)

    @out_of_graphs  # of a compiled step: it reads what ranks have sent
    @torch.no_grad()
    def _run(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        read_arrived()
        # Only what this optimizer holds: all ranks agree about that. A model that is not used any
        # more may be collected on one rank, and be there still on another.
        by_group: dict[int, tuple[Any, list[ShardWork]]] = {}
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for about in _abouts(p for p in parameters if p.requires_grad):
            # Of all of them, since ranks know of their own rows only whether they were written.
            about.known.forget()
            work = about.work_ahead()
            if work is not None:
                group = about.last_call().group
                by_group.setdefault(id(group), (group, []))[1].append(work)
        for group, works in by_group.values():
            encode_shards(works, group, only_maxima=True)


_hook = _Hook()


def wire_nbytes(model: nn.Module) -> int:
    """Return how many bytes each rank has got so far in all-gathers of weights, its own included.

    Padding of uneven shards and reductions of maxima do not count.

    Args:
        model: that `prepare_fsdp2` prepared.
    """
    return sum(about.nbytes for about in _abouts(model.parameters()))

"""Masters: the high-precision values that an optimizer updates in the place of a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from .._torch_ranks import local_shape_and_offset
from ..quantizers import draw_seed
from ..tensor import matrix_shape

__all__ = [
    "MASTER",
    "gradient",
    "gradient_part",
    "has_master",
    "initial_master",
    "is_low",
    "is_updated_itself",
    "joined",
    "local",
    "place",
    "separated",
    "sharded_like",
    "store",
    "take_written",
    "write_parameters",
    "zero_main_grads",
]

#: Key of the master in an optimizer's state, as in Transformer Engine's FusedAdam.
MASTER: Final = "master_param"
_SHORT: Final = (torch.bfloat16, torch.float16)


def local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, which shares its memory; others as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def gradient_part(gradient: Any, parameter: Any) -> torch.Tensor:
    """Return this rank's part of a gradient, dealt out as the parameter is.

    Autograd gives it as it comes: terms of a sum on each rank (weights of norms and biases that
    ranks have whole, where each has tokens of its own), or whole (tables of embeddings).

    Args:
        gradient: plain, or a DTensor of any placements; other ones than the parameter's are
            communicated, in which all ranks of the mesh take part.
        parameter: that it belongs to.
    """
    wanted = getattr(parameter, "placements", None)
    if wanted is not None and getattr(gradient, "placements", wanted) != wanted:
        gradient = gradient.redistribute(placements=wanted)
    made: torch.Tensor = local(gradient)
    return made


def gradient(parameter: Any, where: str, is_decoupled: bool = False) -> torch.Tensor | None:
    """Return the gradient of a parameter, this rank's part: in `main_grad` or in `grad`, or None.

    Args:
        parameter, where, is_decoupled: as `gradient_terms` takes them.
    """
    terms = gradient_terms(parameter, where, is_decoupled)
    if not terms:
        return None
    made = gradient_part(terms[0], parameter)
    return made if len(terms) == 1 else made + gradient_part(terms[1], parameter)


def gradient_terms(parameter: Any, where: str, is_decoupled: bool = False) -> tuple[Any, ...]:
    """Return what a parameter's gradient is the sum of, as it is held; nothing without a gradient.

    A module with `fuse_wgrad_accumulation` adds to `main_grad`. Autograd is then given nothing, or
    zeros for hooks, to which the gradients of other uses of the parameter are added.

    Args:
        parameter: plain or quantized, sharded or not.
        where: the optimizer, for errors.
        is_decoupled: it is in `decoupled_grad` and nowhere else, in any precision.

    Raises:
        RuntimeError: it has another shape than the parameter; or there is another gradient in
            `grad`, and no `grad_added_to_main_grad` says that both are parts of one.
    """
    if is_decoupled:
        apart = getattr(parameter, "decoupled_grad", None)
        if apart is not None and tuple(apart.shape) != tuple(parameter.shape):
            raise RuntimeError(
                f"{where}: decoupled_grad must have the shape of its parameter, "
                f"{tuple(parameter.shape)}, got {tuple(apart.shape)}"
            )
        return () if apart is None else (apart,)
    main, grad = getattr(parameter, "main_grad", None), parameter.grad
    if main is None or not parameter.requires_grad:
        return () if grad is None else (grad,)
    if tuple(main.shape) not in (tuple(parameter.shape), tuple(local(parameter).shape)):
        raise RuntimeError(
            f"{where}: main_grad must have the shape of its parameter, {tuple(parameter.shape)}, "
            f"got {tuple(main.shape)}"
        )
    if grad is None or grad is main:  # as Megatron's optimizers name it for others
        return (main,)
    if not getattr(parameter, "grad_added_to_main_grad", False):
        raise RuntimeError(
            f"{where}: a parameter has a gradient in main_grad and another in grad, shape "
            f"{tuple(parameter.shape)}; add one to the other, and set grad (or main_grad) to None"
        )
    return main, grad


def is_low(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is written through a quantizer: a QuantizedTensor, or a shard."""
    # Of the class: of a parameter inside a graph, dynamo knows no attribute of the object.
    return getattr(type(tensor), "quantize_", None) is not None


def is_updated_itself(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is precise enough to be its own master: FP32 and FP64."""
    own = local(parameter)
    return not is_low(own) and own.dtype not in _SHORT


def has_master(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether an optimizer's state holds a master of `parameter`.

    A plain parameter that has the master's dtype is it.

    Args:
        parameter: plain or quantized, sharded or not.
        dtype: of masters.
    """
    own = local(parameter)
    return not is_updated_itself(own) and (is_low(own) or own.dtype != dtype)


def initial_master(
    parameter: torch.Tensor, dtype: torch.dtype, *, frees: bool = True
) -> torch.Tensor:
    """Return the master of a parameter that has none yet, sharded like it.

    It is what the parameter was quantized from, if that was kept, else what it decodes to.

    Args:
        parameter: plain or quantized, sharded or not.
        dtype: of the master.
        frees: whether what was kept is freed.
    """
    own: Any = local(parameter)
    values = None
    if is_low(own):
        kept = own.initial_value
        values = None if kept is None else kept.get()
        if values is None:
            values = own.detach().dequantize(dtype=torch.float32)
        if kept is not None and frees:
            kept.clear()
    else:
        values = own.detach()
    made = values.to(own.device, dtype, copy=True).reshape(own.shape)
    return sharded_like(made, parameter)


def take_written(own: torch.Tensor, master: torch.Tensor) -> None:
    """Take what others wrote into a short parameter into its master, which keeps the rest.

    Args:
        own: bfloat16 or float16, this rank's part of the parameter.
        master: this rank's part; where it rounds to the parameter's values it stays.
    """
    if master.dtype == torch.int16:
        return  # of the parameter's own bits
    values = own.detach()
    changed = master.to(values.dtype) != values
    master.copy_(torch.where(changed, values.to(master.dtype), master))


def sharded_like(values: torch.Tensor, parameter: Any, width: int = 0) -> torch.Tensor:
    """Return this rank's part of a tensor as one that is sharded like a parameter.

    Args:
        values: this rank's part.
        parameter: sharded or not.
        width: of the last dimension of the whole, which no rank cuts; 0: the parameter's.
    """
    if local(parameter) is parameter:
        return values
    from torch.distributed.tensor import DTensor  # not every build of torch has it

    shape, stride = parameter.shape, parameter.stride()
    if width:
        shape = torch.Size((*shape[:-1], width))
        stride = torch.empty(shape, dtype=values.dtype, device="meta").stride()
    made: torch.Tensor = DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )
    return made


def place(parameter: Any) -> tuple[int, int]:
    """Return where this rank's part begins in the matrix of the whole parameter."""
    if local(parameter) is parameter or parameter.dim() == 0:
        return 0, 0
    _, offset = local_shape_and_offset(parameter)
    row = 0
    for size, start in zip(parameter.shape[:-1], offset[:-1], strict=True):
        row = row * size + start
    return row, offset[-1]


def store(values: torch.Tensor, target: torch.Tensor, parameter: torch.Tensor) -> None:
    """Write FP32 `values` to `target`, in one pass; a short one is rounded stochastically.

    Args:
        values: float32, this rank's part.
        target: this rank's part of a master, or of `parameter` itself.
        parameter: whose values they are; says which rows this rank has, and so which random bits.
    """
    if target.dtype == torch.float32:
        target.copy_(values)
        return
    row0, col0 = place(parameter)
    rounded = torch.ops.hybridq.round_stochastic(
        values.reshape(matrix_shape(values.shape)),
        draw_seed(values.device),
        target.dtype,
        row0=row0,
        col0=col0,
    )
    target.copy_(rounded.reshape(values.shape))


def joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return FP32 values of which a BF16 parameter holds the upper bits, int16 the rest.

    Args:
        parameter: bfloat16.
        remainder: int16 of the same shape: the values' bits less the parameter's. Beside a zero it
            is no negative one, unless others have written that zero since.
    """
    upper = parameter.detach().view(torch.int16).to(torch.int32) << 16
    rest = remainder.to(torch.int32)
    rest = torch.where((upper << 1) == 0, rest.clamp(min=0), rest)
    return (upper + rest).view(torch.float32)


def separated(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP32 values rounded to BF16, ties away from zero, and what is missing, as int16.

    Args:
        values: float32; of a NaN only that it is one comes back.
    """
    values = torch.where(values.isnan(), torch.nan, values)
    bits = values.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    remainder = (bits - (upper << 16)).to(torch.int16)
    return upper.to(torch.int16).view(torch.bfloat16), remainder


def write_parameters(given: Iterable[tuple[Any, torch.Tensor, dict[str, Any]]]) -> None:
    """Write parameters once, after their values were updated.

    Args:
        given: parameters; their FP32 values, this rank's parts; their states, with masters.
    """
    together: list[tuple[Any, torch.Tensor]] = []
    for parameter, values, state in given:
        own = local(parameter)
        if is_updated_itself(own):
            continue
        master = local(state[MASTER]) if MASTER in state else own
        if master.dtype == torch.int16:
            upper, rest = separated(values)
            own.copy_(upper)
            master.copy_(rest)
            continue
        if master is not values:
            store(values, master, parameter)
        if getattr(type(own), "quantize_together", None) is not None:
            together.append((own, master))
        elif is_low(own):
            own.quantize_(master)
        elif master is not own:
            own.copy_(master)
    if together:  # shards: one reduction for all of them
        together[0][0].quantize_together(together)


def zero_main_grads(groups: Iterable[dict[str, Any]]) -> None:
    """Set gradients in `main_grad` to zero; the tensors belong to whoever made them.

    Args:
        groups: of an optimizer.
    """
    for parameter in (one for group in groups for one in group["params"]):
        main = getattr(parameter, "main_grad", None)
        if main is None:
            continue
        with torch.no_grad():
            main.zero_()
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = False

"""Transformer Engine's fusible operations: modules one by one, and `Sequential`, which fuses them.

Fused are a norm or an activation, and a Quantize behind it, with the linear operation that follows;
whether fused or not, the bits are the same. A Bias behind a BasicLinear is added to the rounded
product, as if each stood alone; `Linear` adds it before the product is rounded.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/ops`.
"""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from .. import nn
from .activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from .exchanges import AllGather, AllReduce, ReduceScatter
from .extra_state import WithoutExtraState
from .glu import ScaledClampedQGeGLU, ScaledSReLU, ScaledSwiGLU
from .grouped import Regroups
from .meta_device import GetsMemory, give_memory
from .reading import Readings
from .refused import refusing
from .signatures import constructor, forward, only_defaults, with_arguments

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
]

_ACTIVATIONS: Final = "hybridq.nn.ActivationFunction has the activations that there are"
_OWN: Final = "fusions are those of hybridq.nn.FusedSequential; derive from torch.nn.Module"
#: Names of Transformer Engine that are not here, and why.
_REFUSED: Final = {
    **dict.fromkeys(("BasicOperation", "FusedOperation"), _OWN),
    **dict.fromkeys(("register_forward_fusion", "register_backward_fusion"), _OWN),
    **dict.fromkeys(("SiTUGLU", "ScaledSiTUGLU", "ScaledTanhSReLU"), _ACTIVATIONS),
    "AdaptiveLayerNorm": "a norm with weights of each sequence has no fused step here",
}


__getattr__ = refusing(__name__, "te.ops", _REFUSED)


def _prepare(given: dict[str, Any]) -> None:
    """Give the arguments of operations the names that the modules have for them."""
    given["init_method"] = partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))  # zero biases
    group = given.pop("tensor_parallel_group", None)
    given["parallel_mode"] = given.pop("tensor_parallel_mode", None)
    given["fuse_wgrad_accumulation"] = given.pop("accumulate_into_main_grad")
    tracker = given.pop("rng_state_tracker_function", None)
    if group is not None:
        given |= {"tp_group": group, "tp_size": dist.get_world_size(group)}
        given["get_rng_state_tracker"] = tracker
    elif given["parallel_mode"] is None:
        given["sequence_parallel"] = False


_LINEAR: Final = (
    "device=None, dtype=None, tensor_parallel_mode=None, tensor_parallel_group=None, "
    "sequence_parallel=False, rng_state_tracker_function=None, accumulate_into_main_grad=False, "
    "userbuffers_options=None, delay_wgrad_compute=False, name=None"
)


@with_arguments
class Linear(Readings, nn.Linear):
    """`hybridq.Linear`; what it has no like of raises, by the argument's name.

    Example:
        >>> import torch, hybridq.te as te
        >>> from hybridq.te import ops
        >>> mlp = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 128), ops.SwiGLU(),
        ...                      ops.Linear(64, 64, bias=False))
        >>> with te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()):
        ...     y = mlp(torch.ones(3, 64))
        >>> y.shape
        torch.Size([3, 64])
    """

    takes_steps = True
    __init__ = constructor(nn.Linear, f"in_features, out_features, bias=True, {_LINEAR}", _prepare)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Of Transformer Engine; a bias has nothing in its extra state.
        state_dict.pop(f"{prefix}basic_ops.1._extra_state", None)
        for key in ("basic_ops.0.weight", "basic_ops.0._extra_state", "basic_ops.1.bias"):
            if prefix + key in state_dict:
                state_dict[prefix + key.rpartition(".")[2]] = state_dict.pop(prefix + key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _without_bias(given: dict[str, Any]) -> None:
    _prepare(given)
    given["bias"] = False


@with_arguments
class BasicLinear(Readings, nn.Linear):
    """`hybridq.Linear` without a bias; what it has no like of raises, by the argument's name."""

    takes_steps = True
    __init__ = constructor(nn.Linear, f"in_features, out_features, {_LINEAR}", _without_bias)


def _prepare_groups(given: dict[str, Any]) -> None:
    _prepare(given)
    del given["parallel_mode"], given["sequence_parallel"]
    given["num_gemms"] = given.pop("num_groups")


@with_arguments
class GroupedLinear(Regroups, Readings, nn.GroupedLinear):
    """`hybridq.GroupedLinear`; in a Sequential the sizes of its groups are an extra input."""

    num_extra_inputs = 1
    __init__ = constructor(
        nn.GroupedLinear,
        "num_groups, in_features, out_features, bias=True, device=None, dtype=None, "
        "rng_state_tracker_function=None, accumulate_into_main_grad=False, "
        "single_grouped_weight=False, single_grouped_bias=False, delay_wgrad_compute=False, "
        "scale_bias=False, name=None",
        _prepare_groups,
    )

    forward = forward(nn.GroupedLinear, "inp, split_sizes", {"split_sizes": "m_splits"})


class Bias(torch.nn.Module):
    """Adds a bias.

    Args:
        size: of the last dimension.
        device, dtype: of the parameter.
        tensor_parallel, tensor_parallel_group: False and None.

    Raises:
        NotImplementedError: another value.
    """

    def __init__(
        self,
        size: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        given = {"tensor_parallel": tensor_parallel, "tensor_parallel_group": tensor_parallel_group}
        table = {"tensor_parallel": False, "tensor_parallel_group": None}
        only_defaults("te.ops.Bias", given, table, ", since hybridq has nothing like it")
        self.bias = torch.nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the bias to zero; on the meta device it gets memory first."""
        give_memory(self)
        torch.nn.init.zeros_(self.bias)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return `inp + bias`, in the dtype of `inp`.

        Args:
            inp: `[..., size]`.
        """
        return inp + self.bias.to(inp.dtype)


_NORM: Final = (
    "normalized_shape, *, eps=1e-5, device=None, dtype=None, zero_centered_gamma=False, sm_margin=0"
)


@with_arguments
class LayerNorm(GetsMemory, WithoutExtraState, nn.LayerNormStep):
    """`hybridq.nn.LayerNormStep`."""

    as_step = nn.LayerNormStep.as_step
    __init__ = constructor(nn.LayerNormStep, _NORM)


@with_arguments
class RMSNorm(GetsMemory, WithoutExtraState, nn.RMSNormStep):
    """`hybridq.nn.RMSNormStep`."""

    as_step = nn.RMSNormStep.as_step
    __init__ = constructor(nn.RMSNormStep, _NORM)


class L2Normalization(torch.nn.Module):
    """`x / sqrt(sum(x^2) + eps)` of the last dimension.

    Args:
        eps: added to the sum.
        seq_length, micro_batch_size: have no effect: nothing is warmed up.

    Raises:
        TypeError: `eps` is no number.
        ValueError: it is negative, or not finite.
    """

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(eps, bool | str) or not hasattr(eps, "__float__"):
            raise TypeError(f"te.ops.L2Normalization: eps must be a number, got {eps!r}")
        if not 0.0 <= eps < math.inf:
            raise ValueError(
                f"te.ops.L2Normalization: eps must be finite and at least 0, got {eps}"
            )
        self.eps = eps

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the norm of `inp`, in its dtype; FP32 between.

        Args:
            inp: `[..., features]`.
        """
        wide = inp.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(inp.dtype)


class Quantize(nn.Quantize):
    """`hybridq.nn.Quantize`.

    Args:
        forward, backward: as there.
    """

    as_quantize = True

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__(forward, backward)


class ConstantScale(torch.nn.Module):
    """Multiplies with a number.

    Args:
        scale: the number.

    Raises:
        ValueError: it is not finite.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        if not math.isfinite(scale):
            raise ValueError(f"te.ops.ConstantScale: scale must be finite, got {scale}")
        self.scale = scale

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return `inp * scale`.

        Args:
            inp: any tensor.
        """
        return inp * self.scale


class Reshape(torch.nn.Module):
    """Gives another shape.

    Args:
        shape: of the result.
    """

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return `inp` in the shape.

        Args:
            inp: of as many values.
        """
        return inp.reshape(self.shape)


class Identity(torch.nn.Identity):
    """`torch.nn.Identity`."""


class Dropout(torch.nn.Dropout):
    """`torch.nn.Dropout`.

    Args:
        p: probability.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)


class AddExtraInput(torch.nn.Module):
    """Adds an extra input of the Sequential.

    Args:
        in_place: without effect: the sum is a new tensor.
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()

    def forward(self, inp: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        """Return the sum.

        Args:
            inp, extra: of one shape.
        """
        return inp + extra


class MakeExtraOutput(torch.nn.Module):
    """Lets the Sequential return what passes, too.

    Args:
        in_place: without effect.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()

    def forward(self, inp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `inp` twice.

        Args:
            inp: any tensor.
        """
        return inp, inp


class Sequential(WithoutExtraState, nn.FusedSequential):
    """Operations one after the other, two and three of them fused where that changes no bit.

    Args:
        args: operations, other modules, or one ordered dict of them.
    """

    def forward(self, input: torch.Tensor, *extra_inputs: Any) -> Any:
        """Return what the operations make of `input`; with extra outputs a tuple of it and them.

        Args:
            input: of the first operation.
            extra_inputs: what operations take beside, in their order.

        Raises:
            ValueError: they are more or fewer than the operations take.
        """
        modules: list[Any] = list(self._modules.values())
        wanted = sum(getattr(one, "num_extra_inputs", 0) for one in modules)
        if len(extra_inputs) != wanted:
            raise ValueError(
                f"te.ops.Sequential: operations take {wanted} extra inputs, got {len(extra_inputs)}"
            )
        given, extra = list(extra_inputs), []
        waiting: list[Any] = []
        for one in modules:
            if hasattr(one, "num_extra_inputs"):
                input = one(self.run(waiting, input), given.pop(0))
                waiting = []
            elif hasattr(one, "num_extra_outputs"):
                input, more = one(self.run(waiting, input))
                extra.append(more)
                waiting = []
            else:
                waiting.append(one)
        input = self.run(waiting, input)
        return (input, *extra) if extra else input


class FusibleOperation(torch.nn.Module, metaclass=ABCMeta):
    """What the operations of this module are instances of; no class can be derived from it.

    Raises:
        NotImplementedError: one is.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise NotImplementedError(f"te.ops.FusibleOperation must not be derived from: {_OWN}")


for _name in set(__all__) - {"FusibleOperation", "Sequential"}:
    FusibleOperation.register(globals()[_name])

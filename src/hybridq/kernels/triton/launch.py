"""The one module that imports Triton: runs what `plan` has decided. Imported on first use."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from ..inputs import is_current, made, stream_of
from .block import block_kernel
from .dense import decode_kernel, dense_kernel, reduce_kernel
from .direct import Direct, is_launchable, kind_of
from .grouped import grouped_kernel
from .grouped_block import grouped_block_kernel
from .plan_parts import Launch, Tiled

__all__ = ["KERNELS", "arguments", "direct", "is_watched", "names", "options", "run"]

KERNELS: Final[dict[str, Any]] = {
    "block": block_kernel,
    "decode": decode_kernel,
    "dense": dense_kernel,
    "grouped": grouped_kernel,
    "grouped_block": grouped_block_kernel,
    "reduce": reduce_kernel,
}
#: Versions of Triton whose launchers are known: from the first to before the second.
_KNOWN: Final = ((3, 6), (3, 10))
#: By what `_key` says of a launch, the kernel that Triton compiled for it.
_compiled: Final[dict[Any, Any]] = {}
#: More than models have; sizes that are constants of a kernel could make any number.
_MOST: Final = 4096


def arguments(launch: Launch) -> dict[str, Any]:
    """Return a kernel's arguments as Triton takes them."""
    return {
        name: _described(given) if isinstance(given, Tiled) else given
        for name, given in launch.arguments.items()
    }


def _described(given: Tiled) -> TensorDescriptor:
    tensor = given.tensor
    # Rows that are only one have any stride.
    strides = [tensor.shape[1], 1]
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(given.block))


def options(launch: Launch) -> dict[str, Any]:
    """Return what Triton takes beside the arguments.

    No contraction of a product and a sum into one operation: docs/reference/numerics.md rounds
    each.
    """
    return {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": False,
    }


@lru_cache(maxsize=1)
def _knows_launchers() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return _KNOWN[0] <= version < _KNOWN[1] and torch.version.hip is None


def is_watched() -> bool:
    """Return whether somebody has asked Triton to be told of launches, as a profiler does."""
    runtime = knobs.runtime
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hooks is not None and getattr(hooks, "calls", True):
            return True
    return False


def _is_direct(device: torch.device) -> bool:
    """Return whether launches on a device may go past Triton's Python."""
    return device.type == "cuda" and _knows_launchers() and is_current(device) and not is_watched()


@lru_cache(maxsize=len(KERNELS))
def names(kernel: str) -> tuple[tuple[str, ...], int]:
    """Return the names of a kernel's arguments in their order, and how many are no constants.

    Args:
        kernel: its name.
    """
    own = KERNELS[kernel]
    constants = {own.arg_names[at] for at in own.constexprs}
    order = tuple(own.arg_names)
    count = len(order) - len(constants)
    if constants.intersection(order[:count]):
        raise ValueError(f"{kernel}: constants must come behind all other arguments")
    return order, count


def _address(given: Any) -> Any:
    """Return an argument as the launcher of a compiled kernel takes it."""
    if isinstance(given, torch.Tensor):
        return made(given)
    return _described(given) if isinstance(given, Tiled) else given


def _launch(launch: Launch, device: torch.device, is_direct: bool) -> Any:
    """Launch a kernel on the current device, and return what Triton has compiled."""
    function = KERNELS[launch.kernel]
    if not is_direct or function.pre_run_hooks:
        return function[launch.grid](**arguments(launch), **options(launch))
    order, count = names(launch.kernel)
    # By name, since the order is that of a plan.
    given = [*map(launch.arguments.__getitem__, order)]
    kinds = [kind_of(one) for one in given[:count]]
    key = (launch.kernel, device.index, launch.num_warps, launch.num_stages, *kinds, *given[count:])
    kernel = _compiled.get(key)
    if kernel is None:
        kernel = function[launch.grid](**arguments(launch), **options(launch))
        if is_launchable(kernel) and len(_compiled) < _MOST:
            _compiled[key] = kernel
        return kernel
    values = [one if type(one) is int else _address(one) for one in given[:count]]
    Direct(kernel, launch.grid)(values + given[count:], stream_of(device))
    return kernel


def run(launches: tuple[Launch, ...], device: torch.device) -> tuple[Any, ...]:
    """Launch kernels one after the other on torch's current stream of `device`.

    Returns:
        The kernels that Triton compiled, of each launch.
    """
    is_direct = _is_direct(device)
    guard: Any = contextlib.nullcontext()
    if device.type == "cuda" and not is_current(device):
        guard = torch.cuda.device(device)
    with guard:
        return tuple([_launch(launch, device, is_direct) for launch in launches])


def direct(
    launches: tuple[Launch, ...], kernels: tuple[Any, ...], device: torch.device
) -> tuple[Direct, ...]:
    """Return what launches these kernels again, or nothing: only Triton can.

    Args:
        launches: that have just run.
        kernels: what `run` returned.
        device: of the tensors.
    """
    functions = [KERNELS[launch.kernel] for launch in launches]
    if not _is_direct(device) or any(one.pre_run_hooks for one in functions):
        return ()
    if not all(is_launchable(kernel) for kernel in kernels):
        return ()
    return tuple(
        [Direct(kernel, launch.grid) for kernel, launch in zip(kernels, launches, strict=True)]
    )

"""Where and when the gradients of a module's weights are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..weights import GradientQueue, Into, watch_optimizers
from .marks import mark_parameter
from .written_options import Check, WrittenOptions, said, switch

__all__ = ["WeightGradients"]


def _name(module: Any, name: str, value: Any) -> str:
    """Take a new name: recipes are asked again, and `convert` fills in no other."""
    if not isinstance(value, str):
        got = type(value).__name__
        raise TypeError(said(module, f"name must be a string, got {got}"))
    own = module.__dict__
    own["_name_is_given"] = False
    module.set_name(value)
    own["_name_is_given"] = True
    return value


def _delays(module: Any, name: str, value: Any) -> bool:
    """Return a new `delay_wgrad_compute`, and have the weights' marks say it."""
    delays = switch(module, name, value)
    if delays or module.delay_wgrad_compute:
        for weight in module.weight_parts:
            mark_parameter(module, weight, skip_backward_post_hook=delays)
    return delays


class WeightGradients(WrittenOptions):
    """Base of modules whose weights' gradients may go to `main_grad`, and may be put off."""

    # Class attributes, so that a module whose __class__ `convert` changed has them too.
    #: Whether gradients of weights are added to their `main_grad` and not made.
    fuse_wgrad_accumulation: bool = False
    #: Whether those of a forward with `is_first_microbatch=True` are written over what is there.
    first_overwrites: bool = False
    #: Whether they wait for `backward_dw`.
    delay_wgrad_compute: bool = False
    #: Whether the input is saved for them, and not its columnwise plane.
    save_original_input: bool = False
    weight_parts: Mapping[str, str]
    _written_options: ClassVar[Mapping[str, Check]] = {
        "fuse_wgrad_accumulation": switch,
        "delay_wgrad_compute": _delays,
        "save_original_input": switch,
        "return_bias": switch,
        "return_layernorm_output": switch,
        "name": _name,
    }
    _late: GradientQueue | None = None
    _late_hooks: tuple[Callable[[], Any], ...] = ()

    def _error(self, kind: type[Exception], text: str) -> Exception:
        raise NotImplementedError(f"{type(self).__name__}._error: must be overridden")

    def _take_accumulation(self, fuse_wgrad_accumulation: bool, delay: bool = False) -> None:
        """Take the constructor's choices; attributes of its own only where they are made."""
        if fuse_wgrad_accumulation:
            watch_optimizers()
            self.fuse_wgrad_accumulation = True
        if delay:
            self.delay_wgrad_compute = True

    def backward_dw(self) -> None:
        """Make the weights' gradients that the oldest backward put off; without any do nothing.

        With `delay_wgrad_compute` a backward makes the gradients of input, norm and biases only.
        Those of weights are then added to `grad`, or to `main_grad`, with the bits that they would
        have had.

        Raises:
            RuntimeError: a weight of the forward is no parameter of the module any more (FSDP2).
        """
        if self._late is None or not len(self._late):
            return
        self._late.run(list(self.parameters(recurse=False)))
        for hook in self._late_hooks:
            hook()

    def need_backward_dw(self) -> bool:
        """Return whether a backward has put off gradients that `backward_dw` would make."""
        return self._late is not None and len(self._late) > 0

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Have `hook()` called at the end of each `backward_dw` that made gradients.

        Weights whose hooks autograd does not call have a true `skip_backward_post_hook`.

        Args:
            hook: what autograd's hooks of the weights would do, such as to begin a reduction.
        """
        self.__dict__["_late_hooks"] = (*self._late_hooks, hook)

    def _into(self, weight: torch.Tensor, is_first: bool | None) -> Into | None:
        """Return where and when the weight's gradient is added; None: autograd is given it.

        Args:
            weight: a parameter.
            is_first: what the forward was told of its microbatch.
        """
        fused, delayed = self.fuse_wgrad_accumulation, self.delay_wgrad_compute
        if not ((fused or delayed) and weight.requires_grad and torch.is_grad_enabled()):
            return None
        self._check_reducer(weight)
        late = None
        if delayed:
            if torch.compiler.is_compiling():
                raise self._error(
                    NotImplementedError,
                    "delay_wgrad_compute keeps products of a backward in Python, which compiled "
                    "code cannot; leave it off, or the module out of torch.compile",
                )
            late = self._late
            if late is None:
                late = self.__dict__["_late"] = GradientQueue()
        if not fused:
            return Into(weight, None, late=late)
        if not torch.compiler.is_compiling():
            watch_optimizers()  # where the attribute was set on a module that was there
        into = Into.of(weight)
        if into is None:
            main_grad = getattr(weight, "main_grad", None)
            got = None if main_grad is None else tuple(getattr(main_grad, "shape", ()))
            raise self._error(
                RuntimeError,
                "fuse_wgrad_accumulation adds gradients to weight.main_grad, which must be a "
                f"tensor {tuple(weight.shape)}, float32 as a rule, got {got}",
            )
        overwrites = into.overwrites or (self.first_overwrites and bool(is_first))
        return into._replace(late=late, overwrites=overwrites)

    def _check_reducer(self, weight: torch.Tensor) -> None:
        """Raise where DistributedDataParallel would reduce a gradient that is not there."""
        ddp = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        if any(weight is parameter for parameter in ddp._module_parameters):
            what = "delay_wgrad_compute makes gradients after the backward"
            if self.fuse_wgrad_accumulation:
                what = "fuse_wgrad_accumulation adds gradients to weight.main_grad"
            raise self._error(
                RuntimeError,
                f"{what}, which DistributedDataParallel does not reduce; leave it off, or run "
                "under its no_sync() and reduce gradients before the step",
            )

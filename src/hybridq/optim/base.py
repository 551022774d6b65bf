"""What hybridq's optimizers share: gradients in `main_grad`, and states longer than parameters.

torch casts what it loads to the dtype of the parameter, which rounds masters and moments: they are
loaded in the dtypes that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from ..errors import warn_once
from .masters import (
    MASTER,
    gradient,
    gradient_part,
    gradient_terms,
    initial_master,
    is_low,
    local,
    take_written,
    write_parameters,
    zero_main_grads,
)

__all__ = ["Base"]

#: Of masters, by the names that they have in a state.
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Tensors of states that have the shape of their parameter.
_SHAPED: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", MASTER)


class Base:
    """Base, before torch's class, of an optimizer of hybridq."""

    #: Name for errors.
    _where: str = ""
    #: Gradients are in `decoupled_grad`.
    _is_decoupled: bool = False
    _saved: dict[str, Any] | None = None
    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]
    #: Versions of parameters after the last step, by identity; copies and pickles begin anew.
    _versions: dict[int, tuple[int, int]] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        In compiled code a step with quantized parameters ends the graph and runs eagerly.

        Args:
            closure: computes the loss again and returns it, or None.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient is sparse, or in two places (`hybridq.optim.AdamW`).
            PlaneError: a quantized parameter has no quantizer.
        """
        if torch.compiler.is_compiling() and self._writes_planes():
            return self._step_past_graphs(closure)
        return self._step(closure)

    def _writes_planes(self) -> bool:
        return any(is_low(local(one)) for group in self.param_groups for one in group["params"])

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            self._check()  # of all parameters, before any is updated
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def _check(self) -> None:
        """Raise where a gradient or a parameter is none that a step takes."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self._only_makes_state(parameter, group):
                    continue
                terms = gradient_terms(parameter, self._where, self._is_decoupled)
                if any(term.is_sparse for term in terms):
                    raise RuntimeError(
                        f"{self._where}: gradients must be dense, got a sparse one of a parameter "
                        f"{list(parameter.shape)}; see torch.optim.SparseAdam"
                    )
                own = local(parameter)
                if terms and is_low(own):
                    own.quantizer_for_write(self._where)

    # Quantizers end graphs, and of what lies between two graphs dynamo loses masters.
    @torch.compiler.disable(reason="a step of hybridq.optim with quantized parameters runs eagerly")
    def _step_past_graphs(self, closure: Callable[[], float] | None) -> float | None:
        return self._step(closure)

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have a gradient.

        Args:
            group: of `param_groups`.
        """
        raise NotImplementedError(f"{type(self).__name__}.step_group: must be overridden")

    def master_of(self, parameter: Any, group: dict[str, Any]) -> torch.Tensor:
        """Return the master of a parameter, this rank's part, made first where there is none.

        What others wrote into a short parameter since the last step is in it.

        Args:
            parameter: of `group`, which has one.
            group: of `param_groups`.
        """
        state = self.state[parameter]
        if MASTER not in state:
            state[MASTER] = initial_master(parameter, group["master_dtype"])
            return local(state[MASTER])
        own, master = local(parameter), local(state[MASTER])
        if self._is_written(parameter, own):
            if not is_low(own):
                take_written(own, master)
            elif own is parameter:
                warn_once(
                    "optim.written",
                    f"{type(self).__name__}: a quantized parameter {list(parameter.shape)} was "
                    "written since the last step, and this one writes it from its master, unless "
                    f"that was written too: state[parameter][{MASTER!r}]",
                )
        return master

    def _is_written(self, parameter: Any, own: torch.Tensor) -> bool:
        """Return whether others wrote a parameter since the last step of this optimizer."""
        if torch.compiler.is_compiling() or own.is_inference():
            return False
        now = _versions_of(parameter, own)
        return (self._versions or {}).get(id(parameter), now) != now

    def write(self, given: Iterable[tuple[Any, torch.Tensor, dict[str, Any]]]) -> None:
        """Write parameters once, after their values were updated.

        Args:
            given: as `write_parameters` takes it.
        """
        given = list(given)
        write_parameters(given)
        if torch.compiler.is_compiling():
            return
        if self._versions is None:
            self._versions = {}
        for parameter, _, _ in given:
            own = local(parameter)
            if not own.is_inference():
                self._versions[id(parameter)] = _versions_of(parameter, own)

    def gradient_of(
        self, parameter: Any, group: dict[str, Any], where: str, is_decoupled: bool = False
    ) -> torch.Tensor | None:
        """Return the gradient of a parameter, this rank's part, or None.

        Args:
            parameter: of `group`.
            group: of `param_groups`.
            where, is_decoupled: as `gradient` takes them.
        """
        if self._only_makes_state(parameter, group):
            return gradient_part(parameter.grad, parameter)
        return gradient(parameter, where, is_decoupled)

    def _only_makes_state(self, parameter: Any, group: dict[str, Any]) -> bool:
        """Return whether a step is the one by which torch's checkpoints learn what to load.

        `torch.distributed.checkpoint` has an optimizer without states step with a rate of zero and
        zeros in `grad`, wherever gradients are else.
        """
        grad = parameter.grad
        if grad is None or grad.is_sparse or parameter in self.state:
            return False
        if getattr(parameter, "grad_added_to_main_grad", False) or float(group["lr"]) != 0.0:
            return False
        return not bool(local(grad).any())

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Forget all gradients: set those in `main_grad` to zero, and the others as torch does.

        Args:
            set_to_none: `grad` becomes None, not zero; a `main_grad` belongs to whoever made it.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        zero_main_grads(self.param_groups)

    def take_saved(self, parameter: Any, given: dict[str, Any], group: dict[str, Any]) -> None:
        """Put the tensors of a saved state into the parameter's, in the dtypes of this optimizer.

        Args:
            parameter: that it belongs to.
            given: its saved state, not empty.
            group: of the parameter, as it is now.
        """
        raise NotImplementedError(f"{type(self).__name__}.take_saved: must be overridden")

    def state_dict(self: Any) -> dict[str, Any]:
        """Return the state, `master_dtype` by its name: torch's checkpoints gather no dtypes.

        Returns:
            As of torch's optimizers; the state's tensors are the optimizer's own.
        """
        made: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        for group in made["param_groups"]:
            group["master_dtype"] = str(group["master_dtype"]).removeprefix("torch.")
        return made

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Load a state: of this optimizer, or of torch's of the same name.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ValueError: it has other groups, or a tensor of another shape than its parameter;
                nothing is loaded then.
        """
        saved: dict[str, Any] = {}

        def last(_: Any, given: dict[str, Any]) -> None:
            # The last of the hooks: it sees what the others have made of the state.
            self._check_saved(given)
            saved.update(given)

        hook = self.register_load_state_dict_pre_hook(last)
        self._saved = saved
        try:
            super().load_state_dict(state_dict)  # type: ignore[misc]
        finally:
            self._saved = None
            hook.remove()

    def _check_saved(self, given: dict[str, Any]) -> None:
        """Raise where a saved tensor is of another parameter."""
        groups = zip(given["param_groups"], self.param_groups, strict=False)
        for saved_group, group in groups:
            pairs = zip(saved_group["params"], group["params"], strict=False)
            for number, (key, parameter) in enumerate(pairs):
                for name, value in (given["state"].get(key) or {}).items():
                    shape = tuple(getattr(value, "shape", ()))
                    shapes = (tuple(parameter.shape), tuple(local(parameter).shape))
                    if name in _SHAPED and isinstance(value, torch.Tensor) and shape not in shapes:
                        raise ValueError(
                            f"{self._where}.load_state_dict: {name} must have the shape of its "
                            f"parameter, got {shape} for parameter {number} of its group, "
                            f"{shapes[0]}; the state is of another model, or of another order"
                        )

    def take_all_saved(self) -> None:
        """Take what is being loaded, if anything is; at the end of `__setstate__`."""
        for group in self.param_groups:
            name = group["master_dtype"]
            group["master_dtype"] = _DTYPES.get(name, name)
        saved = self._saved
        if saved is None:
            return
        groups = zip(saved["param_groups"], self.param_groups, strict=True)
        for saved_group, group in groups:
            for key, parameter in zip(saved_group["params"], group["params"], strict=True):
                given = saved["state"].get(key)
                if given:
                    self.take_saved(parameter, given, group)
                    if self._versions is not None and is_low(local(parameter)):
                        # Its master came with the state: a write before this is no loss.
                        self._versions.pop(id(parameter), None)


def _versions_of(parameter: torch.Tensor, own: torch.Tensor) -> tuple[int, int]:
    """Return what is another one after a write: to a DTensor, or to this rank's part of it."""
    return (-1 if parameter.is_inference() else parameter._version), own._version

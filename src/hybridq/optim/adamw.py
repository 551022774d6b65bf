"""hybridq.optim.AdamW: torch's AdamW on masters of high precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from .._torch_private import check_graph_capture
from ..errors import must_be_one_of
from . import moments as held
from .base import Base
from .masters import (
    MASTER,
    has_master,
    initial_master,
    is_low,
    is_updated_itself,
    joined,
    local,
    separated,
    sharded_like,
    store,
)

__all__ = ["AdamW"]

_MASTERS: Final = (torch.float32, torch.bfloat16)
#: Parameters are updated together until they have so many elements: FP32 copies of gradients and
#: of short masters are made for so many at a time.
_TOGETHER: Final = 1 << 25
#: A step at which nothing is left of the correction: `beta ** _LATE` is zero.
_LATE: Final = 1e9


class _Work(NamedTuple):
    """One parameter in one step; tensors are this rank's parts.

    Attributes:
        parameter: as the optimizer was given it.
        values: FP32 (or the parameter's own, longer, dtype), updated in place.
        grad: of the same dtype.
        state: of the parameter.
    """

    parameter: torch.Tensor
    values: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]


class AdamW(Base, torch.optim.AdamW):  # type: ignore[misc]
    """`torch.optim.AdamW` whose arithmetic is FP32, for parameters of any precision.

    The state of a parameter that is a QuantizedTensor, BF16 or FP16 holds a master, and moments in
    FP32. A step updates the master by torch's own AdamW, bit for bit what it does to FP32
    parameters, and writes the parameter once: a quantized one through its quantizer
    (`update_quantized`), so that its planes are those of the master. Parameters in FP32 are updated
    as by `torch.optim.AdamW`.

    A master starts as what its parameter was quantized from, if `hybridq.quantized_model_init` kept
    that (`preserve_high_precision_init_val=True`) and nothing was written since, else as what the
    parameter holds. Of sharded parameters (DTensor), masters and moments are sharded alike.

    The gradient of a parameter with a `main_grad` (`fuse_wgrad_accumulation`) is that one, in its
    own precision, and `zero_grad` sets it to zero. While it is there a step is made of it, of zeros
    too. `torch.amp.GradScaler` and `torch.nn.utils.clip_grad_norm_` know of `grad` only.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, fused: as for
            `torch.optim.AdamW`. Weight decay is decoupled.
        master_dtype: of masters: float32; or bfloat16, which is rounded stochastically, so that
            small updates are not lost, and of which a BF16 parameter is its own. Random bits
            follow from torch's generator of the device.

        moments: of both, or a pair, of the first and of the second: `"fp32"`; `"bf16"`; `"fp16"`,
            with a power of two for each row, of the second moment's square root; or `"fp8_block"`:
            E4M3 codes in blocks of 128 along rows, 1.03 bytes for a value, of the same. They are
            computed in FP32 and rounded stochastically. Parameters of one dimension, and those
            whose rows a placement cuts, have FP32 moments instead of these two. Short ones not
            with `amsgrad`.
        store_param_remainders: of BF16 parameters the state holds no master, but the 16 bits that
            the parameter lacks of it, int16 in `master_param`: together they are the FP32 values,
            exactly. Such parameters are rounded to nearest, ties away from zero.
        use_decoupled_grad: gradients are in `parameter.decoupled_grad`, of any dtype, and nowhere
            else.
        bias_correction: moments are divided by `1 - beta ** step`; False: they are taken as they
            are, which makes the first steps small ones.
        decoupled_weight_decay: False: weight decay is a part of the gradient, as of
            `torch.optim.Adam`.

    `load_state_dict` keeps the dtypes of masters and moments, and takes states of
    `torch.optim.AdamW`; like a rate, `moments` are those of the saved groups. Loading it does not
    write parameters: load the model as well.

    Raises:
        ValueError: `master_dtype` is another dtype, `moments` another word or given with `amsgrad`,
            or a number is out of range.

    Source: ours; the arithmetic is torch's, the state's key `master_param` that of Transformer
        Engine's FusedAdam.

    Example:
        >>> import torch, hybridq
        >>> with hybridq.quantized_model_init("nvfp4", preserve_high_precision_init_val=True):
        ...     layer = hybridq.Linear(64, 32, dtype=torch.bfloat16)
        >>> optimizer = hybridq.optim.AdamW(layer.parameters(), lr=0.1)
        >>> with hybridq.autocast(recipe="nvfp4"):
        ...     layer(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["master_param"].dtype, type(layer.weight).__name__
        (torch.float32, 'NVFP4Tensor')
    """

    #: Told to those who look for optimizers that leave gradients in `main_grad` alone.
    takes_main_grad: Final = True
    _where = "AdamW"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        master_dtype: torch.dtype = torch.float32,
        moments: str | tuple[str, str] = "fp32",
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if master_dtype not in _MASTERS:
            raise ValueError(f"AdamW: master_dtype must be float32 or bfloat16, got {master_dtype}")
        if store_param_remainders and master_dtype != torch.float32:
            raise ValueError(
                "AdamW: store_param_remainders holds float32 masters exactly, got "
                f"master_dtype={master_dtype}"
            )
        self._master_dtype = master_dtype
        self._moments = moments
        self._remainders = bool(store_param_remainders)
        self._is_decoupled = bool(use_decoupled_grad)
        self._corrects, self._decays_apart = bool(bias_correction), bool(decoupled_weight_decay)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )
        self.defaults["master_dtype"] = master_dtype
        self.defaults["moments"] = moments
        self.defaults["store_param_remainders"] = self._remainders
        self.defaults["use_decoupled_grad"] = self._is_decoupled
        self.defaults["bias_correction"] = self._corrects
        self.defaults["decoupled_weight_decay"] = self._decays_apart

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; it may have a `master_dtype` and `moments` of its own.

        Args:
            param_group: as for torch's optimizers.

        Raises:
            ValueError: its `master_dtype` is neither float32 nor bfloat16, or its `moments` are
                another word, or short beside `amsgrad`.
        """
        dtype = param_group.setdefault("master_dtype", self._master_dtype)
        if dtype not in _MASTERS:
            raise ValueError(f"AdamW: master_dtype must be float32 or bfloat16, got {dtype}")
        kinds = held.kinds_of(param_group.setdefault("moments", self._moments))
        for kind in kinds:
            if kind not in held.KINDS:
                raise ValueError(f"AdamW: moments {must_be_one_of(held.KINDS, kind)}")
        if len(kinds) != len(held.MOMENTS):
            raise ValueError(f"AdamW: moments must be one word or two, got {kinds}")
        if kinds != ("fp32", "fp32") and param_group.get("amsgrad", self.defaults["amsgrad"]):
            raise ValueError(
                f"AdamW: amsgrad goes with moments in FP32, got moments={param_group['moments']!r};"
                " leave one out"
            )
        super().add_param_group(param_group)

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group, as many at once as have a bounded number of elements.

        Args:
            group: of `param_groups`.
        """
        check_graph_capture(self)
        works: list[_Work] = []
        size = 0
        for parameter in group["params"]:
            grad = self.gradient_of(parameter, group, "AdamW", self._is_decoupled)
            if grad is None:
                continue
            works.append(self._work(parameter, grad, group))
            size += parameter.numel()  # of the whole: ranks must make the same batches
            if size >= _TOGETHER:
                self._update(works, group)
                works, size = [], 0
        if works:
            self._update(works, group)

    def _work(self, parameter: Any, grad: torch.Tensor, group: dict[str, Any]) -> _Work:
        own = local(parameter)
        if grad.is_sparse:
            raise RuntimeError("AdamW: gradients must be dense, got a sparse one; see SparseAdam")
        if is_low(own):
            own.quantizer_for_write("AdamW")
        state = self.state[parameter]
        dtype = own.dtype if is_updated_itself(own) else torch.float32
        self._count_from_zero(own, state, group)
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        values = own.detach()
        if has_master(own, group["master_dtype"]):
            values = self._values(parameter, state, group)
        return _Work(parameter, values.to(dtype), grad.to(dtype), state)

    @staticmethod
    def _count_from_zero(own: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Let a state without a number of steps have one."""
        if "step" not in state:
            # On the CPU where nothing needs it elsewhere, as in torch.
            on_device = group["capturable"] or group["fused"]
            device = own.device if on_device else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)

    def _values(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """Return the master's values; made first where there is none."""
        own = local(parameter)
        remains = self._remainders and own.dtype == torch.bfloat16 and not is_low(own)
        if remains and MASTER not in state:
            zeros = torch.zeros_like(own, dtype=torch.int16)
            state[MASTER] = sharded_like(zeros, parameter)
        master = self.master_of(parameter, group)
        return joined(own, master) if master.dtype == torch.int16 else master

    def _moment(self, work: _Work, name: str) -> torch.Tensor:
        """Return a moment in the dtype of the arithmetic; zeros before the first step."""
        if name in work.state or f"{name}_codes" in work.state:
            return held.read(work.state, name, work.parameter)
        return torch.zeros_like(work.values)

    def _update(self, works: list[_Work], group: dict[str, Any]) -> None:
        """Do one step of AdamW to some parameters of a group."""

        def of_all(name: str) -> list[torch.Tensor]:
            return [local(work.state[name]) for work in works]

        first, second = ([self._moment(work, name) for work in works] for name in held.MOMENTS)
        beta1, beta2 = group["betas"]
        steps = of_all("step")
        found_inf = getattr(self, "found_inf", None)
        if not self._corrects:
            for step in steps:
                step += 1 if found_inf is None else 1 - found_inf.reshape(())
            steps = [torch.full_like(step, _LATE) for step in steps]
        run = adamw if self._decays_apart else adam
        run(
            [work.values for work in works],
            [work.grad for work in works],
            first,
            second,
            of_all("max_exp_avg_sq") if group["amsgrad"] else [],
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
            has_complex=any(work.values.is_complex() for work in works),
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for work, *both in zip(works, first, second, strict=True):
            kinds = held.kinds_of(group["moments"])
            for name, kind, moment in zip(held.MOMENTS, kinds, both, strict=True):
                own = held.held_as(work.parameter, kind)
                held.write(work.state, name, moment, work.parameter, own)
        self.write([(work.parameter, work.values, work.state) for work in works])

    # ---- state

    @torch.no_grad()
    def initialize_state(self, param: torch.Tensor) -> None:
        """Make the state that a parameter has before its first step, in the place of any other.

        What a quantized parameter was made from (`get_high_precision_init_val`) is not freed, as
        it is by a first step.

        Args:
            param: of this optimizer.

        Raises:
            ValueError: it is none.
        """
        group = self._group_of(param)
        own, state = local(param), self.state[param]
        state.clear()
        self._count_from_zero(own, state, group)
        dtype = own.dtype if is_updated_itself(own) else torch.float32
        for name, kind in zip(held.MOMENTS, held.kinds_of(group["moments"]), strict=True):
            zeros = torch.zeros(own.shape, dtype=dtype, device=own.device)
            held.write(state, name, zeros, param, held.held_as(param, kind))
        if is_low(own):
            state[MASTER] = initial_master(param, group["master_dtype"], frees=False)
        elif has_master(own, group["master_dtype"]):
            self._values(param, state, group)

    def _group_of(self, param: torch.Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(one is param for one in group["params"]):
                return group
        raise ValueError(
            f"AdamW: param must be one of the optimizer's own, got another one {list(param.shape)}"
        )

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """Return a moment or the master of a parameter in FP32, however it is held.

        Args:
            param: that has been updated, or loaded.
            state_name: `"exp_avg"`, `"exp_avg_sq"` or `"master_param"`.

        Raises:
            ValueError: there is no such state.
        """
        state = self._state_of(param, state_name)
        if state_name != MASTER:
            made = held.read(state, state_name, param).to(torch.float32, copy=True)
        else:
            master = local(state[MASTER])
            is_rest = master.dtype == torch.int16
            values = joined(local(param), master) if is_rest else master
            made = values.to(torch.float32, copy=True)
        return sharded_like(made, param)

    def get_scaled_state(
        self, param: torch.Tensor, state_name: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a moment or the master as the state holds it, and the scales of its rows or None.

        Args:
            param, state_name: as for `get_unscaled_state`.

        Raises:
            ValueError: there is no such state.
        """
        state = self._state_of(param, state_name)
        if state_name in state:
            return state[state_name], None
        return state[f"{state_name}_codes"], state[f"{state_name}_scale"]

    @torch.no_grad()
    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Hold FP32 values as a moment or the master of a parameter.

        A parameter that holds a part of its master (`store_param_remainders`) is written, too.

        Args:
            param, state_name: as for `get_unscaled_state`.
            unscaled_state: float32, of the parameter's shape.

        Raises:
            ValueError: there is no such state, or values of another dtype or shape.
        """
        state = self._state_of(param, state_name)
        if unscaled_state.dtype != torch.float32 or unscaled_state.shape != param.shape:
            raise ValueError(
                f"AdamW: {state_name} must be set to float32 {tuple(param.shape)}, got "
                f"{unscaled_state.dtype} {tuple(unscaled_state.shape)}"
            )
        values = local(unscaled_state)
        if state_name == MASTER:
            master = local(state[MASTER])
            if master.dtype == torch.int16:
                upper, rest = separated(values)
                local(param).copy_(upper)
                master.copy_(rest)
            else:
                store(values, master, param)
            return
        group = self._group_of(param)
        kind = held.kinds_of(group["moments"])[held.MOMENTS.index(state_name)]
        held.write(state, state_name, values.clone(), param, held.held_as(param, kind))

    def _state_of(self, param: torch.Tensor, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self.state.get(param, {})
        if name not in (*held.MOMENTS, MASTER):
            raise ValueError(f"AdamW: state {must_be_one_of((*held.MOMENTS, MASTER), name)}")
        if name not in state and f"{name}_codes" not in state:
            raise ValueError(
                f"AdamW: {name} must be of a parameter that has been updated and has one, got "
                f"states {sorted(state)}"
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._master_dtype = self.defaults["master_dtype"]
        self._moments = self.defaults.setdefault("moments", "fp32")
        self._remainders = self.defaults.setdefault("store_param_remainders", False)
        self._is_decoupled = self.defaults.setdefault("use_decoupled_grad", False)
        self._corrects = self.defaults.setdefault("bias_correction", True)
        self._decays_apart = self.defaults.setdefault("decoupled_weight_decay", True)
        for group in self.param_groups:
            group.setdefault("master_dtype", self._master_dtype)
            group.setdefault("moments", self._moments)
        self.take_all_saved()

    def take_saved(self, parameter: Any, given: dict[str, Any], group: dict[str, Any]) -> None:
        """Take masters and moments as they were saved.

        Args:
            parameter, given, group: as the base says.
        """
        kinds = [held.held_as(parameter, kind) for kind in held.kinds_of(group["moments"])]
        held.take(self.state[parameter], given, parameter, kinds)
        if is_updated_itself(parameter):
            return
        for name in (MASTER, "max_exp_avg_sq"):
            if name in given:
                dtype = group["master_dtype"] if name == MASTER else torch.float32
                if name == MASTER:
                    dtype = self._master_held(parameter, given[name].dtype, dtype)
                self.state[parameter][name] = given[name].to(parameter.device, dtype)

    def _master_held(self, parameter: Any, saved: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a master that is loaded."""
        own = local(parameter)
        remains = self._remainders and own.dtype == torch.bfloat16 and not is_low(own)
        if remains is not (saved == torch.int16):
            raise ValueError(
                "AdamW: remainders of masters are loaded into an optimizer with "
                "store_param_remainders=True, and masters into one without, got "
                f"{saved} and store_param_remainders={self._remainders}"
            )
        return torch.int16 if remains else dtype

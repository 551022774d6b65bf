"""LoRA and DoRA of PEFT on weights that are quantized.

PEFT's own layers work on hybridq's modules: a base computes under the recipe, its adapters in high
precision. The layers here know more of a quantized base: a merge rounds once, a merge that is taken
back gives the bits that were there, and DoRA's norms never decode a whole weight. `get_peft_model`
takes them for hybridq's modules once this module is imported; `hybridq.convert` imports it where
PEFT has been.

Source: E. Hu et al., LoRA (2021); S. Liu et al., DoRA (2024); PEFT's classes and names.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from importlib.metadata import version
from inspect import signature
from typing import Any, Final

import torch
from torch import nn

from ..errors import must_be_one_of
from ..nn import Embedding, ForeignLinear, Linear, QuantizedModule
from ..tensor import is_quantized
from . import require
from .peft_merging import RoundsOnce, check_factors
from .peft_products import tell_of_own_products

require("peft")

from peft import PeftModel  # noqa: E402
from peft.tuners.lora import LoraConfig, dora, layer, model, variants  # noqa: E402
from peft.tuners.mixed import MixedModel  # noqa: E402
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer  # noqa: E402
from peft.utils.other import ModulesToSaveWrapper  # noqa: E402

__all__ = ["LoraEmbedding", "LoraLinear", "LoraParameter", "adopt", "merge_losses", "set_merging"]

_ROUNDINGS: Final = ("nearest", "stochastic")
#: Modules with one matrix, of which PEFT's linear layer can be the adapter.
_LINEARS: Final = (Linear, ForeignLinear)
#: Values of a weight that DoRA decodes at once.
_PIECE: Final = 1 << 20


class _DoraNorms(dora.DoraLinearLayer):
    """DoRA's magnitudes of a weight that may be quantized, which is decoded in pieces."""

    def norms(
        self, weight: Any, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Return the norm of each row of `weight + scaling * lora_B @ lora_A`, FP32 `[out]`.

        Args:
            weight: quantized `[out, in]`, or `[in, out]` where the layer holds it so.
            lora_A: `[r, in]`.
            lora_B: `[out, r]`.
            scaling: of the adapter.
        """
        rows, cols = weight.shape
        step = max(128, _PIECE // max(cols, 1) // 128 * 128)
        out = cols if self.fan_in_fan_out else rows
        squares = torch.zeros(out, dtype=torch.float32, device=weight.device)
        with torch.no_grad():
            a = lora_A.to(weight.device, torch.float32)
            b = lora_B.to(weight.device, torch.float32)
            for start in range(0, rows, step):
                piece = slice(start, min(start + step, rows))
                values = weight.dequantize_rows(piece, dtype=torch.float32)
                if self.fan_in_fan_out:  # [in, out]
                    values = values.addmm(a.t()[piece], b.t(), alpha=scaling)
                    squares += values.square().sum(0)
                else:
                    values = values.addmm(b[piece], a, alpha=scaling)
                    squares[piece] = values.square().sum(1)
        return squares.sqrt()

    @dora.cache_decorator("weight-norm")
    def _cached_norms(self, *args: Any, adapter_name: str | None = None) -> torch.Tensor:
        return self.norms(*args)

    def update_layer(
        self, *, base_layer: Any, lora_A: Any, lora_B: Any, scaling: float, **options: Any
    ) -> None:
        """Set the magnitudes to the norms as they are now; without values if adapters have none."""
        weight = base_layer.weight
        if not is_quantized(weight):
            given = {"lora_A": lora_A, "lora_B": lora_B, "scaling": scaling}
            super().update_layer(base_layer=base_layer, **given, **options)
            return
        if lora_A.is_meta:  # low_cpu_mem_usage: what a file has takes this one's place
            norms = torch.empty(lora_B.shape[0], dtype=torch.float32, device="meta")
        else:
            norms = self.norms(weight, lora_A, lora_B, scaling).to(lora_A.device)
        self.weight = nn.Parameter(norms, requires_grad=True)

    def forward(
        self,
        x: torch.Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: torch.Tensor | None = None,
        adapter_name: str = "default",
    ) -> torch.Tensor:
        """Return what DoRA adds to the base's result; no gradient goes through the norms."""
        given = (base_layer.weight, lora_A.weight, lora_B.weight, scaling)
        if not is_quantized(base_layer.weight):
            made: torch.Tensor = super().forward(
                x,
                lora_A=lora_A,
                lora_B=lora_B,
                scaling=scaling,
                base_layer=base_layer,
                base_result=base_result,
                adapter_name=adapter_name,
            )
            return made
        norms = self._cached_norms(*given, adapter_name=adapter_name)
        factor = (self.weight / norms.to(self.weight.device)).view(1, -1)
        if base_result is None:  # of the input after dropout: under the recipe, like the base's own
            base_result = base_layer(x.to(base_layer.weight.dtype))
        if base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        return (factor - 1) * base_result + factor * lora_B(lora_A(x)) * scaling


class _Dora(variants.DoraLinearVariant):
    """DoRA with `_DoraNorms`."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        """Make the magnitudes of an adapter, as PEFT does."""
        base = module.get_base_layer()
        if not is_quantized(base.weight):
            variants.DoraLinearVariant.init(module, adapter_name, **kwargs)
            module.lora_magnitude_vector[adapter_name].__class__ = _DoraNorms
            return
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        made = _DoraNorms(fan_in_fan_out=module.fan_in_fan_out)
        made.update_layer(
            base_layer=base,
            lora_A=module.lora_A[adapter_name].weight,
            lora_B=module.lora_B[adapter_name].weight,
            scaling=module.scaling[adapter_name],
        )
        module.lora_magnitude_vector[adapter_name] = made


class LoraLinear(RoundsOnce, layer.Linear):
    """PEFT's LoRA layer of a linear module of hybridq, whose weight may be quantized.

    The base computes under the recipe of `hybridq.autocast`, its adapters in their own precision.
    Merges round once, and can be taken back to the bit.

    Args:
        base_layer, adapter_name, config, r, lora_alpha: as PEFT's layers take them.

    Source: PEFT's `lora.Linear`; the rounding is ours.
    """

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """PEFT's variants, with a DoRA of quantized weights."""
        return {**super().lora_variants, ("use_dora",): _Dora}

    def delta(self, name: str) -> torch.Tensor:
        """Return what an adapter adds to the weight, FP32, in the weight's own layout.

        Args:
            name: of the adapter.
        """
        a, b = self.lora_A[name].weight.float(), self.lora_B[name].weight.float()
        made = b @ a * self.scaling[name]
        return made.t() if self.fan_in_fan_out else made


class LoraEmbedding(RoundsOnce, layer.Embedding):
    """PEFT's LoRA layer of a `hybridq.nn.Embedding`, whose table may be quantized.

    Args:
        base_layer, adapter_name, config, r, lora_alpha: as PEFT's layers take them.

    Source: PEFT's `lora.Embedding`; the rounding is ours.
    """


class LoraParameter(RoundsOnce, layer.ParamWrapper):
    """PEFT's LoRA layer of a parameter of a module of hybridq, such as the weights of experts.

    Args:
        base_layer, adapter_name, parameter_name, config, r, lora_alpha: as PEFT's layers take them.

    Source: PEFT's `lora.ParamWrapper`; the rounding is ours.
    """

    def merged_weight(self) -> Any:
        """Return the parameter."""
        return self.get_param()


# PEFT knows a layer that may be wrapped again, for another parameter, by the name of its class.
LoraParameter.__name__ = layer.ParamWrapper.__name__


def set_merging(model: nn.Module, *, rounding: str = "nearest", keep: bool = True) -> nn.Module:
    """Say how merges into quantized weights round, and whether they can be taken back.

    Args:
        model: with layers that PEFT has adapted.
        rounding: `"nearest"`, or `"stochastic"`: a merged value becomes one of its two neighbours
            with the probability that keeps its expectation, by torch's generator of the device.
        keep: the planes before a merge are kept until it is taken back: so many bytes more as the
            base has. False: `unmerge` raises, and adapters can be merged in one call only.

    Returns:
        The model.

    Raises:
        ValueError: `rounding` is another, or `model` has no such layer.
        TypeError: `keep` is no bool.

    Example:
        >>> import torch, hybridq
        >>> from peft import LoraConfig, get_peft_model
        >>> from hybridq.integrations.peft import set_merging
        >>> with hybridq.quantized_model_init("nvfp4", frozen=True):
        ...     base = torch.nn.Sequential(hybridq.Linear(64, 64))
        >>> model = get_peft_model(base, LoraConfig(target_modules=["0"], r=4))
        >>> model = set_merging(model, rounding="stochastic")
    """
    if rounding not in _ROUNDINGS:
        raise ValueError(f"set_merging: rounding {must_be_one_of(_ROUNDINGS, rounding)}")
    if not isinstance(keep, bool):
        raise TypeError(f"set_merging: keep must be a bool, got {type(keep).__name__}")
    layers = [one for one in adopt(model).modules() if isinstance(one, RoundsOnce)]
    if not layers:
        raise ValueError(
            "set_merging: model must have LoRA layers of hybridq modules, got none; see "
            "peft.get_peft_model"
        )
    for one in layers:
        one.merge_rounding, one.keeps_unmerged = rounding, keep
    return model


def merge_losses(model: nn.Module) -> dict[str, float]:
    """Return what rounding changed in each weight that adapters were merged into, by its name.

    Args:
        model: after a merge, unloaded or not.

    Returns:
        The norm of the change as a part of the norm of the update: 0 is nothing, and from about 1
        on the update is lost in the noise.
    """
    found = {name: one.__dict__.get("merge_loss") for name, one in model.named_modules()}
    return {name: loss for name, loss in found.items() if loss is not None}


def adopt(model: nn.Module) -> nn.Module:
    """Let PEFT's own LoRA layers of hybridq's modules be `LoraLinear`, in place; return the model.

    For models that PEFT adapted before `hybridq.convert`, which calls it. Copies that are trained
    as a whole (`modules_to_save`) become plain again.

    Args:
        model: any module.
    """
    for one in model.modules():
        if isinstance(one, ModulesToSaveWrapper):
            _decode(one.modules_to_save.modules())
        _adopt_layer(one)
    return model


def _adopt_layer(one: Any) -> bool:
    """Let one layer of PEFT's own be ours; return whether it was one of a module of hybridq."""
    if type(one) is layer.Embedding and isinstance(one.get_base_layer(), Embedding):
        one.__class__, one.fan_in_fan_out = LoraEmbedding, True  # a table is [in, out]
        return True
    if type(one) is layer.ParamWrapper and isinstance(one.get_base_layer(), QuantizedModule):
        one.__class__ = LoraParameter
        return True
    if type(one) is not layer.Linear or not isinstance(one.get_base_layer(), _LINEARS):
        return False
    one.__class__ = LoraLinear
    for name, variant in one.lora_variant.items():
        if type(variant) is variants.DoraLinearVariant:
            one.lora_variant[name] = _Dora()
            one.lora_magnitude_vector[name].__class__ = _DoraNorms
    return True


def after_convert(model: nn.Module) -> None:
    """Adopt the layers of a model that was converted, and name its bases as without adapters.

    A recipe that reads names sees the same ones, whether PEFT or `convert` came first.

    Args:
        model: any module.
    """
    wrapped = isinstance(model, PeftModel)
    for name, one in adopt(model).named_modules():
        if isinstance(one, QuantizedModule):
            own = name.removeprefix("base_model.model.") if wrapped else name
            one.set_name(".".join(part for part in own.split(".") if part != "base_layer"))
    tell_of_own_products(model)


def _adapted(target: Any, adapter_name: str, *, config: Any, **options: Any) -> Any:
    """Return the adapter layer of a `hybridq.Linear`: what PEFT calls for a custom module."""
    if options.get("parameter_name") is not None:  # a parameter is targeted, not the module
        return layer.dispatch_default(target, adapter_name, config=config, **options)
    if config.fan_in_fan_out:
        raise ValueError(
            "LoraConfig: fan_in_fan_out must be False, since the weight of a hybridq.Linear is "
            "[out, in], got True"
        )
    return LoraLinear(target, adapter_name, config=config, **options)


def _register() -> None:
    """Have PEFT ask `_adapted` for modules of hybridq, and keep trained copies plain."""
    missing = [
        name
        for owner, name in (
            (model.LoraModel, "_create_new_module"),
            (layer.Linear, "lora_variants"),
            (LoraConfig, "_register_custom_module"),
            (BaseTuner, "_unload_and_optionally_merge"),
            (BaseTuner, "merge_adapter"),
            (BaseTuner, "inject_adapter"),
        )
        if not hasattr(owner, name)
    ]
    if missing:
        raise ImportError(
            f"hybridq.integrations.peft: PEFT must have {', '.join(missing)}, got version "
            f"{version('peft')}, which has not; use another version"
        )
    create = model.LoraModel._create_new_module

    @wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: Any, **options: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        own = lora_config._custom_modules or {}
        if isinstance(base, Linear) and not any(isinstance(base, one) for one in own):
            lora_config._register_custom_module({Linear: _adapted})
        made = create(lora_config, adapter_name, target, **options)
        if _adopt_layer(made):  # a linear map or a table that PEFT knows by its own class
            for magnitudes in made.lora_magnitude_vector.values():
                if isinstance(magnitudes, _DoraNorms):
                    magnitudes.update_layer(
                        base_layer=made.get_base_layer(),
                        lora_A=made.lora_A[adapter_name].weight,
                        lora_B=made.lora_B[adapter_name].weight,
                        scaling=made.scaling[adapter_name],
                    )
        return made

    model.LoraModel._create_new_module = staticmethod(create_new_module)
    update = ModulesToSaveWrapper.update

    @wraps(update)
    def update_plain(self: Any, adapter_name: str, *args: Any, **options: Any) -> None:
        update(self, adapter_name, *args, **options)
        if adapter_name in self.modules_to_save:
            _decode(self.modules_to_save[adapter_name].modules())

    ModulesToSaveWrapper.update = update_plain
    inject = BaseTuner.inject_adapter

    @wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, *args: Any, **options: Any) -> None:
        inject(self, model, *args, **options)
        tell_of_own_products(model)

    BaseTuner.inject_adapter = inject_adapter
    if hasattr(BaseTunerLayer, "get_base_weight"):
        BaseTunerLayer.get_base_weight = _decoded(BaseTunerLayer.get_base_weight)
    for owner in (BaseTuner, MixedModel):
        for name in ("merge_adapter", "_unload_and_optionally_merge"):
            if name in vars(owner):
                setattr(owner, name, _checked(vars(owner)[name]))


def _checked(method: Any) -> Any:
    """Return a method of PEFT's that merges adapters of any kind, but first asks whether it can."""

    @wraps(method)
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        if signature(method).bind(self, *args, **kwargs).arguments.get("merge", True):
            check_factors(self.model)
        return method(self, *args, **kwargs)

    return merge


def _decoded(method: Any) -> Any:
    """Return PEFT's way to a base's weight, with the values of a quantized one.

    What takes it adds to it in place, SHiRA in each forward: a quantized weight would round that.
    """

    @wraps(method)
    def get_base_weight(self: Any) -> Any:
        weight = method(self)
        if not is_quantized(weight):
            return weight
        with torch.no_grad():
            values: torch.Tensor = weight.dequantize().detach()
        return values

    return get_base_weight


def _decode(modules: Iterable[nn.Module]) -> None:
    """Let the parameters of modules that are trained as a whole be plain."""
    for one in modules:
        for name, parameter in one._parameters.items():
            if parameter is not None and is_quantized(parameter):
                plain = parameter.detach().dequantize()
                one._parameters[name] = nn.Parameter(plain, parameter.requires_grad)


_register()

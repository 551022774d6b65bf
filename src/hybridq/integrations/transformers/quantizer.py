"""The quantizer that transformers asks while it loads and saves a model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightRenaming, apply_renamings
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ...errors import CheckpointError, warn
from ...layouts import check_inputs_are_plain
from ...nn.weights.pretrained import keep_planes
from ...ptq.model_config import FILE_ENTRY, METHOD, REFUSAL
from ...ptq.record import METADATA_KEY, Record, read_records, records_text
from ...tensor import QuantizedTensor, is_quantized
from .config import HybridQConfig
from .held import Held, held_of_record
from .planes import (
    LoadsPlanes,
    SavesPlanes,
    beside_planes,
    buffers_of,
    conversions,
    record_of,
    targets,
)
from .tensor_parallel import after_convert, check_weights_stay_plain

__all__ = ["HybridQQuantizer"]


@register_quantizer(METHOD)
class HybridQQuantizer(HfQuantizer):
    """Quantizes the weights of a model as they are read, and saves and loads their planes.

    transformers makes one for each `from_pretrained` with a HybridQConfig, given or in the
    folder's `config.json`, and the model holds it as `hf_quantizer`. The model is converted
    while it is on the meta device; which of its parameters are quantized then, and how, is what the
    tensors are quantized by as they come.

    Args:
        quantization_config: what is asked for.
        kwargs: transformers' own: `pre_quantized`, whether the folder holds planes.
    """

    quantization_config: HybridQConfig

    def __init__(self, quantization_config: HybridQConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._quantized: dict[str, QuantizedTensor] = {}
        self._held: list[Held] = []
        self._hook: RemovableHandle | None = None
        self._is_part = False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise where a device map asks for what is not there.

        Raises:
            ValueError: weights are to be offloaded to the disk.
        """
        places = device_map.values() if isinstance(device_map, dict) else (device_map,)
        if "disk" in map(str, places):
            raise ValueError(
                "from_pretrained: weights of hybridq cannot be offloaded to the disk, got a "
                "device_map with 'disk'; leave it out, or give max_memory= more of the others"
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """Return the configuration without the entry that keeps it from loading without hybridq.

        It is the one call in which transformers shows it before it looks for the weights' file.

        Args:
            config: of the model.
        """
        if getattr(config, FILE_ENTRY, None) == REFUSAL:
            delattr(config, FILE_ENTRY)
        return super().update_attn_implementation(config)

    # ---- loading

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        records, names = _read_all(checkpoint_files or ())
        check_inputs_are_plain(names)
        self._held = [held_of_record(one) for one in records.values()]
        if self._held:
            self.pre_quantized = True  # by `hybridq.convert_checkpoint`, whoever made config.json
        self._convert(model)

    def _convert(self, model: Any) -> None:
        """Convert a model on the meta device, and keep which parameters are quantized."""
        if self.quantization_config.weights == "quantized" or self._held:
            check_weights_stay_plain(model)
        unused = () if self.pre_quantized else self.quantization_config.names_no_module(model)
        if unused:
            warn(
                f"from_pretrained: modules_to_not_convert names no module of {type(model).__name__}"
                f" by {', '.join(map(repr, unused))}",
            )
        given: set[str] = set()
        if self._held:
            known = get_model_conversion_mapping(model)
            given = targets(conversions(known, model, self._held, False))
        self.quantization_config.convert(model, given)
        self._quantized = {name: one for name, one in model.named_parameters() if is_quantized(one)}
        for name, one in self._quantized.items():
            quantizer = one.own_quantizer
            if quantizer.is_stochastic or quantizer.amax_group is not None:
                raise ValueError(
                    "from_pretrained: a weight is a function of its file, so that it is neither "
                    "rounded stochastically nor with an amax of several processes, got "
                    f'{quantizer.text} of {name}; take another recipe, or weights="high_precision"'
                )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a tensor is quantized as it is read.

        Args:
            model: that is loaded.
            param_name: of the parameter.
            kwargs: transformers' own.
        """
        return param_name in self._quantized and not self.pre_quantized

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes per element that a parameter will take.

        Args:
            model: that is loaded.
            param_name: of the parameter.
            param: the parameter, on the meta device.
        """
        return param.nbytes / max(param.numel(), 1)

    def get_quantize_ops(self) -> ConversionOps:
        """Return what quantizes a tensor on its way to the model."""
        return _Quantize(self._quantized, not self.quantization_config.frozen)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return the model's weight conversions with those of planes.

        Args:
            weight_conversions: the model's own.
            model: that is loaded.
        """
        return conversions(weight_conversions, model, self._held)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        after_convert(model)
        if self.quantization_config.weights == "quantized":
            keep_planes(model, True)
            own = copy.copy(self)
            own._is_part = True
            for part in _parts(model):  # is saved as the whole is
                keep_planes(part, True)
                part.hf_quantizer, part.config.quantization_config = own, self.quantization_config
                part._weight_conversions = model._weight_conversions
            self._hook = model.register_load_state_dict_pre_hook(LoadsPlanes())
        if not self.pre_quantized:
            self._quantize_missing(model)

    def _quantize_missing(self, model: nn.Module) -> None:
        """Quantize what the files did not have, so that it was initialized."""
        users = Counter(id(one) for m in model.modules() for one in m.parameters(recurse=False))
        for name, like in self._quantized.items():
            value = model.get_parameter(name)
            if not is_quantized(value) and users[id(value)] == 1:  # a tied one is another's
                is_trained = not self.quantization_config.frozen
                made = nn.Parameter(_quantized_like(like, value.detach()), is_trained)
                _set(model, name, made)

    # ---- saving

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Return the buffers of planes in place of quantized parameters, and what decodes them.

        Args:
            model: to be saved.
        """
        if self.quantization_config.weights != "quantized":
            return None, {}
        state: dict[str, Any] = {}
        records: list[Record] = []
        first: dict[int, str] = {}
        renamings = _to_disk(model)
        _keep_beside(model)
        for name, value in model.state_dict(keep_vars=True).items():
            if not is_quantized(value):
                state[name] = value.detach() if isinstance(value, torch.Tensor) else value
            elif first.setdefault(id(value), name) == name:  # a tied one is its source's
                record = record_of(name, value)
                state.update(buffers_of(record, value))
                on_disk = apply_renamings(name, renamings)
                records.append(Record(on_disk, record.quantizer, record.shape, record.dtype))
        return state, {METADATA_KEY: records_text(records)} if records else {}

    # ---- what a model with it can do

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` writes planes, bit for bit."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether models may be trained: they may."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the quantized weights themselves may be trained: they may."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether models may be compiled: they may."""
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        if self._is_part:
            raise ValueError(
                "dequantize: it must be called of the whole model, whose configuration says how "
                f"weights are held, got a {type(model).__name__} inside of it"
            )
        if isinstance(dtype, str):  # what save_pretrained makes of config.dtype
            dtype = getattr(torch, dtype)
        made: dict[int, nn.Parameter] = {}
        for name, value in list(model.named_parameters(remove_duplicate=False)):
            if is_quantized(value):
                if id(value) not in made:
                    plain = value.detach().dequantize().to(dtype)
                    made[id(value)] = nn.Parameter(plain, value.requires_grad)
                _set(model, name, made[id(value)])
        keep_planes(model, False)
        for part in _parts(model):
            keep_planes(part, False)
            self.remove_quantization_config(part)
        if self._hook is not None:
            self._hook.remove()
        return model


class _Quantize(ConversionOps):
    """Quantizes a tensor that has been read.

    Args:
        quantized: the parameters on the meta device, by name.
        are_trained: whether quantized parameters need a gradient.
    """

    def __init__(self, quantized: dict[str, QuantizedTensor], are_trained: bool) -> None:
        self.quantized = quantized
        self.are_trained = are_trained

    def __deepcopy__(self, memo: Any) -> _Quantize:
        return self

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        """Return parameters by name, and plain what is not quantized."""
        made: dict[str, torch.Tensor] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            like = self.quantized.get(name)
            made[name] = value
            if like is not None:
                made[name] = nn.Parameter(_quantized_like(like, value), self.are_trained)
        return made


def _quantized_like(like: QuantizedTensor, value: torch.Tensor) -> QuantizedTensor:
    """Return a value quantized as a parameter on the meta device is.

    Args:
        like: the parameter.
        value: of its shape; in the dtype that it is quantized in.
    """
    made = torch.empty_like(like, dtype=value.dtype, device=value.device)
    return made.quantize_(value)  # type: ignore[attr-defined]


def _read_all(files: Iterable[str]) -> tuple[dict[str, Record], list[str]]:
    """Return the records of quantized weights in some files, by name, and the tensors' names."""
    found: dict[str, Record] = {}
    names: list[str] = []
    for file in files:
        if file.endswith(".safetensors"):
            with opened_file(file) as opened:
                found |= read_records(opened.metadata() or {}, Path(file))
                names += opened.keys()
    return found, names


def _parts(model: nn.Module) -> list[Any]:
    """Return the models inside of a model whose configuration says how weights are held."""
    found: list[Any] = [one for one in model.modules() if isinstance(one, PreTrainedModel)]
    return [one for one in found if one is not model and hasattr(one.config, "quantization_config")]


def opened_file(file: str) -> Any:
    """Return an open safetensors file, a context that closes it.

    Args:
        file: its path.

    Raises:
        CheckpointError: it is no whole safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(
            f"from_pretrained: {file} is no whole safetensors file ({error}); fetch it again"
        ) from error


def _to_disk(model: Any) -> list[Any]:
    """Return what renames a model's parameters when they are saved."""
    known = reversed(getattr(model, "_weight_conversions", None) or ())
    made = [one.reverse_transform() for one in known if isinstance(one, WeightRenaming)]
    return [one for one in made if isinstance(one, WeightRenaming)]


def _keep_beside(model: Any) -> None:
    """Let plain weights whose converter would put them together with planes keep their names."""
    known = getattr(model, "_weight_conversions", None) or ()
    state = model.state_dict(keep_vars=True)
    of_planes = {name for name, value in state.items() if is_quantized(value)}
    for one in known:
        if isinstance(one, SavesPlanes):
            one.plain = frozenset(beside_planes(known, of_planes, state))


def _set(model: nn.Module, name: str, value: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._parameters[last] = value

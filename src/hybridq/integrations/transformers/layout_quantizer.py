"""The quantizer that reads what other programs quantized, by the table of layouts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import register_quantizer

from ...calibration import Calibration
from ...converters import conversion
from ...converters.exclusions import REASONS
from ...errors import CheckpointError
from ...layouts import (
    ENTRIES,
    HYBRIDQ,
    TORCHAO,
    Layout,
    Said,
    ScalarPart,
    StoredWeight,
    TensorInfo,
    check_inputs_are_plain,
    check_is_no_other,
    current_names,
    detect,
    get,
    kv_cache_of,
    names,
    said_of,
    without_entries,
)
from ...ptq.header import TORCH_DTYPES
from ...ptq.model_config import METHOD
from .config import HybridQConfig
from .file_scales import calibration_of
from .held import held_of_layout, is_transposed
from .layout_config import METHODS, LayoutConfig
from .planes import conversions, targets
from .quantizer import HybridQQuantizer, opened_file

__all__ = ["LayoutQuantizer", "load"]

_HF_QUANT_CONFIG: Final = "hf_quant_config.json"
#: What a file quantizes is converted, whatever hybridq itself would leave as it is.
_ALSO: Final = tuple(reason for reason in REASONS if reason != "embeddings")


class LayoutQuantizer(HybridQQuantizer):
    """Loads weights that another program quantized, with the very codes and scales of its files.

    Args:
        quantization_config: a LayoutConfig; when the model has been made, a HybridQConfig that says
            the same of it.
        kwargs: transformers' own.

    Attributes:
        calibration: the amaxes that scales of inputs (`"input"`) and of KV caches (`"k"`, `"v"`) in
            the files stand for, by names of the model; `hybridq.quantize_model` takes it.
    """

    def __init__(self, quantization_config: LayoutConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.asked = quantization_config
        self.calibration = Calibration({}, {}, {})

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        files = [file for file in checkpoint_files or () if file.endswith(".safetensors")]
        if checkpoint_files and not files:
            raise CheckpointError(
                "from_pretrained: files must be safetensors, got "
                f"{Path(checkpoint_files[0]).name}; save the model as such first, by "
                "save_pretrained with the program that wrote it"
            )
        entries, scales, said = _read_headers(files)
        metadata = said.metadata
        if current_names(entries, metadata):
            raise CheckpointError(
                "from_pretrained: names of tensors must be those of torchao 0.15 or later, got "
                f"{next(iter(current_names(entries, metadata)))!r}; export the folder first "
                "(hybridq.export, layout='compressed-tensors'), or read it by "
                "hybridq.load_checkpoint"
            )
        check_inputs_are_plain(entries, self._config)
        layout = self._layout(files, entries, metadata)
        check_is_no_other(entries, metadata)
        found = layout.find(entries, said)
        if not found:
            raise ValueError(
                f"from_pretrained: a folder of {layout.name} must have quantized weights, got none "
                f"in {len(entries)} tensors; leave its quantization_config out"
            )
        self.pre_quantized = True
        self._held = [held_of_layout(stored) for stored in found.values()]
        known = conversions(get_model_conversion_mapping(model), model, self._held, False)
        _check_places(model, known, entries)
        self.quantization_config = self._as_ours(model, targets(known), found)
        self.calibration = _calibration(layout, self._kv_cache(files), found, scales, known)
        read = (*scales, *filter(layout.is_mark, entries))
        ignored = {rf"(^|\.){name.rpartition('.')[2]}$" for name in read}
        # Scales are read above, marks say nothing more, and no parameter has such a name.
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *ignored,
        }
        self._convert(model)
        if layout is TORCHAO:
            _check_stacks(model, known)

    def _kv_cache(self, files: list[str]) -> str:
        """Return what the folder says that KV caches are held in: `"fp8"` where it says nothing."""
        return kv_cache_of(self._config, _beside(files))

    @property
    def _config(self) -> dict[str, Any] | None:
        """What the folder's `config.json` says of quantization, as such a file."""
        return None if self.asked.said is None else {"quantization_config": self.asked.said}

    def _layout(
        self, files: list[str], entries: Mapping[str, TensorInfo], metadata: Mapping[str, str]
    ) -> Layout:
        """Return the layout that is asked for, or that the folder has."""
        if self.asked.layout is not None:
            return get(self.asked.layout)
        beside = _beside(files)
        layout = detect(self._config, entries, beside, metadata)
        if layout is None or layout is HYBRIDQ:
            raise ValueError(
                "from_pretrained: the folder must hold weights that another program quantized, got "
                f"{'none' if layout is None else 'planes of hybridq, which need no LayoutConfig'}"
            )
        return layout

    def _as_ours(
        self, model: Any, quantized: set[str], found: Mapping[str, StoredWeight]
    ) -> HybridQConfig:
        """Return the configuration of a model whose parameters of these names are quantized."""
        kept = []
        for name in conversion(model, also=_ALSO, least_width=0).converted:
            module = model.get_submodule(name)
            own = {f"{name}.{one}" for one, _ in module.named_parameters(recurse=False)}
            if not own & quantized:
                kept.append(name)
        return HybridQConfig(
            format=str(next(iter(found.values())).spec),
            frozen=self.asked.frozen,
            modules_to_not_convert=kept,
            also=_ALSO,
            least_width=0,
        )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_after_weight_loading(model, **kwargs)
        model.quantization_method = METHOD


def _check_places(model: Any, known: list[Any], entries: Mapping[str, TensorInfo]) -> None:
    """Raise where quantized weights go nowhere, and a parameter of their module has no others.

    Args:
        model: on the meta device.
        known: what `conversions` returned.
        entries: of the files.

    Raises:
        ValueError: such as each expert's matrices, of a model that holds them as one stack, or
            MLX's stacks.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    placed = {target: held.name for target, held in known[0].each()}
    prefix = f"{model.base_model_prefix}."
    bare = {name.removeprefix(prefix) for name in entries}
    missing = {
        name.rpartition(".")[0] + ".": name
        for name in sorted(own, reverse=True)
        if name not in placed and name.removeprefix(prefix) not in bare
    }
    for target, name in placed.items():
        module = next((one for one in missing if _is_beside(one, target)), None)
        if target not in own and module is not None:
            raise ValueError(
                f"from_pretrained: {name} is no parameter of {type(model).__name__}, which holds "
                f"{missing[module]} in its place, and the folder does not: it would be random; "
                "take the folder in a layout that has it (gpt-oss-mxfp4 for GPT-OSS's experts; of "
                "MLX's stacks, what hybridq.export makes of it in compressed-tensors), or read its "
                "weights by hybridq.load_checkpoint"
            )


def _is_beside(module: str, target: str) -> bool:
    """Return whether a weight stands in a module, or in one beside it in the same layer.

    Args:
        module: its name and a dot.
        target: name of the weight.
    """
    parent = module.removesuffix(".").rpartition(".")[0] + "."
    is_in_layer = any(part.isdigit() for part in parent.split("."))
    return target.startswith(module) or (is_in_layer and target.startswith(parent))


def _check_stacks(model: Any, known: list[Any]) -> None:
    """Raise where a stack has its scales along the outputs of a model's experts.

    Args:
        model: converted.
        known: what `conversions` returned.

    Raises:
        CheckpointError: there is one, of a model that keeps its experts as `[E, in, out]`.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    for target, held in known[0].each():
        if len(held.shape) == 3 and is_transposed(own.get(target)):
            raise CheckpointError(
                f"from_pretrained: scales of {held.name!r} must lie along the inputs of products, "
                f"got a stack [experts, in, out] of {TORCHAO.name}, with scales along its last "
                "axis; export the folder in bf16 first (hybridq.export, layout='bf16')"
            )


for _method in METHODS:
    register_quantizer(_method)(LayoutQuantizer)


def _beside(files: list[str]) -> dict[str, Any] | None:
    """Return what the `hf_quant_config.json` of a folder holds; None: it has none."""
    path = Path(files[0]).with_name(_HF_QUANT_CONFIG) if files else None
    return json.loads(path.read_bytes()) if path is not None and path.exists() else None


def _read_headers(
    files: Iterable[str],
) -> tuple[dict[str, TensorInfo], dict[str, torch.Tensor], Said]:
    """Return dtype and shape of all tensors of files, scales of activations, what files say."""
    entries: dict[str, TensorInfo] = {}
    marks: dict[str, bytes] = {}
    headers: list[dict[str, str]] = []
    scales: dict[str, torch.Tensor] = {}
    for file in files:
        with torch.device("cpu"), opened_file(file) as opened:
            headers.append(opened.metadata() or {})
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                about = opened.get_slice(name)
                dtype = TORCH_DTYPES.get(about.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"from_pretrained: {name!r} is of dtype {about.get_dtype()}, which torch "
                        "has not; no layout reads it"
                    )
                entries[name] = dtype, tuple(about.get_shape())
                if any(part.module_of(name) is not None for part in _scale_parts()):
                    scales[name] = opened.get_tensor(name)
                if any(get(one).is_mark(name) for one in names()):
                    data = opened.get_tensor(name).reshape(-1)
                    marks[name] = bytes(data.view(torch.uint8).tolist())
    return entries, scales, Said(tuple(entries), tuple(headers), marks)


@cache
def _scale_parts() -> tuple[ScalarPart, ...]:
    """Return the scales of activations of all layouts."""
    known = [get(name) for name in names()]
    inputs = [scheme.input for layout in known for scheme in layout.read_schemes]
    caches = [part for layout in known for each in layout.kv.values() for part in each]
    return tuple(dict.fromkeys(part for part in (*inputs, *caches) if part is not None))


def _calibration(
    layout: Layout,
    kv_cache: str,
    found: Mapping[str, StoredWeight],
    scales: Mapping[str, torch.Tensor],
    known: list[Any],
) -> Calibration:
    """Return the calibration of a folder's scales, by the names that the model's weights have."""
    planes = known[0]
    by_weight = {held.name: name for name, held in planes.each()}
    users = Counter(by_weight.values())

    def target_of(weight: str) -> tuple[str, bool]:
        target = by_weight.get(weight, weight)
        return target, users[target] > 1

    with torch.device("cpu"):  # around it transformers makes all tensors on the meta device
        return calibration_of(layout, kv_cache, found, scales, target_of)


def load(folder: str | Path, model_class: Any = None, **options: Any) -> Any:
    """Return the model of a folder that any program quantized, its weights as QuantizedTensors.

    transformers has quantizers of its own for most layouts; here the planes are those of the
    table `hybridq.layouts`: codes and scales are those of the files, and the model can be trained,
    saved and served as one of `HybridQConfig`.

    Args:
        folder: or the name of a model.
        model_class: with `from_pretrained`; None: the class that the folder's `config.json` names
            (`architectures`), and `AutoModelForCausalLM` where it names none.
        options: what `from_pretrained` takes; `quantization_config=LayoutConfig(...)` says which
            layout, where the folder does not.

    Raises:
        ValueError: nothing in it is quantized, or transformers has no class for it.
        CheckpointError: no layout reads it, or a file is not whole.

    Example:
        >>> from hybridq.integrations.transformers import load
        >>> load("no such folder")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        OSError: no such folder is not a local folder
    """
    from transformers import AutoConfig

    asked = options.pop("quantization_config", None) or LayoutConfig()
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder)
    kind = class_of(config) if model_class is None else model_class
    said = said_of(config.to_dict())
    if said is not None:
        config = deepcopy(config)
        _take_out(config)
        about = {"layout": asked.layout, "frozen": asked.frozen}
        config.quantization_config = {"quant_method": METHODS[0], **about, "said": said}
        asked = None
    return kind.from_pretrained(folder, config=config, quantization_config=asked, **options)


def _take_out(config: PreTrainedConfig) -> None:
    """Take what is said of quantization out of a configuration, and of those of its parts."""
    own = vars(config)
    for key in ENTRIES:
        own.pop(key, None)
    for key, part in own.items():
        if isinstance(part, PreTrainedConfig):
            _take_out(part)
        elif isinstance(part, dict):
            own[key] = without_entries(part)


def class_of(config: Any) -> Any:
    """Return the class of transformers that a configuration is for.

    Raises:
        ValueError: there is none.
    """
    import transformers

    classes = list(getattr(config, "architectures", None) or ())
    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    is_causal = has_code or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    for name in classes:
        found = None if has_code else getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if not is_causal:
        raise ValueError(
            "load: config.json must name a model of transformers under architectures, got "
            f"{classes} for {type(config).__name__}; give model_class=, which has from_pretrained"
        )
    return transformers.AutoModelForCausalLM

"""LayoutConfig: a folder that another program quantized is loaded as quantized tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...layouts import MODELOPT, get

__all__ = ["FOREIGN", "METHODS", "LayoutConfig"]

#: What `quant_method` says where a caller asks for it, and no file does.
FOREIGN: Final = "hybridq-layout"
#: All that are read so: ModelOpt's too, which transformers knows no quantizer for.
METHODS: Final = (FOREIGN, *MODELOPT.methods)


class LayoutConfig(QuantizationConfigMixin):
    """How the files of a folder hold its weights: `from_pretrained(quantization_config=)` takes it.

    The weights that are quantized there become QuantizedTensors with the file's own codes and
    scales, and their modules those of hybridq; all others stay in high precision. Afterwards
    the model is one of `HybridQConfig`, and saved as such.

    It is what a `config.json` of ModelOpt's is read as; a folder that has `hf_quant_config.json`
    alone is loaded with `quantization_config=LayoutConfig()`. For layouts that transformers itself
    reads there is `hybridq.integrations.transformers.load`.

    Args:
        layout: name of a layout, of `hybridq.layouts.names()`; None: what the folder says.
        frozen: quantized weights need no gradient.
        said: `quantization_config` of the folder's `config.json`; None: `others`.
        quant_method: what it says there.
        others: the rest of what it says.

    Raises:
        SpecError: no layout has that name.

    Example:
        >>> from hybridq.integrations.transformers import LayoutConfig
        >>> LayoutConfig(quant_method="modelopt", quant_algo="NVFP4").said["quant_algo"]
        'NVFP4'
    """

    def __init__(
        self,
        layout: str | None = None,
        *,
        frozen: bool = False,
        said: Mapping[str, Any] | None = None,
        quant_method: str = FOREIGN,
        **others: Any,
    ) -> None:
        self.quant_method = quant_method
        self.layout = None if layout is None else get(layout).name
        self.frozen = frozen
        if said is None and quant_method != FOREIGN:
            said = {"quant_method": quant_method, **others}
        self.said = None if said is None else dict(said)


for _method in METHODS:
    register_quantization_config(_method)(LayoutConfig)

"""lm-eval: a model `hybridq`, which is quantized as `hybridq.quantize_model` does it.

Importing this module registers the model with lm-eval. Its command line knows models of lm-eval's
own alone, so it is run through here:

```
python -m hybridq.integrations.lm_eval run --model hybridq \
    --model_args pretrained=FOLDER,recipe=nvfp4 --tasks arc_easy
```

Source: lm-eval 0.4.13, models/huggingface.py.
"""

from __future__ import annotations

from typing import Any

from . import require

require("lm_eval")

import torch  # noqa: E402 (after the check of the version)
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from ..calibration.caches import cache_argument  # noqa: E402
from ..serving import quantize_model  # noqa: E402
from .transformers import HybridQCache  # noqa: E402

__all__ = ["HybridQLM"]


@register_model("hybridq")
class HybridQLM(HFLM):
    """lm-eval's model of transformers, quantized: `--model hybridq --model_args recipe=...`.

    Args:
        pretrained: a folder, a name, or a model, as lm-eval's `hf` takes it. A model is quantized
            in place.
        recipe: as `hybridq.quantize_model` takes it.
        calibration: path of a calibration's file, for static scales; None: scales are dynamic.
        activations: `"quantized"` or `"high_precision"`.
        kv_cache: format of keys and values in generation (`HybridQCache`); None: as they are.
        options: lm-eval's own: `tokenizer`, `batch_size`, `dtype`, `device`, ...

    Raises:
        TypeError, ValueError, CheckpointError: as `hybridq.quantize_model`.
    """

    def __init__(
        self,
        pretrained: Any,
        recipe: str,
        calibration: str | None = None,
        activations: str = "quantized",
        kv_cache: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(pretrained, **options)
        quantize_model(self.model, recipe, calibration, activations=activations)
        self._kv_cache = kv_cache
        if kv_cache is not None:
            HybridQCache(self.model, kv_cache)  # raises where there is no such cache

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._kv_cache is not None:
            name = cache_argument(self.model) or "past_key_values"
            kwargs[name] = HybridQCache(self.model, self._kv_cache)
        made: torch.Tensor = super()._model_generate(*args, **kwargs)
        return made


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

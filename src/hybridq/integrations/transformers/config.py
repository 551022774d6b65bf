"""HybridQConfig: how the weights of a transformers model are held, as `config.json` can say it."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

from torch import nn
from transformers.quantizers.auto import register_quantization_config
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...converters import LEAST_WIDTH, conversion, convert
from ...errors import must_be_one_of, names_in, suggestion
from ...formats import PlaneSpec
from ...nn import quantized_model_init
from ...nn.weights.quantized_init import weights_given_later
from ...ptq.model_config import CONFIG_VERSION, METHOD
from ...quantizers import IdentityQuantizer, Quantizer
from ...recipes import CustomRecipe, QuantizerRole, Recipe
from ...recipes.as_text import recipe_of, text_of

__all__ = ["VERSION", "HybridQConfig"]

#: Version of the fields. A reader refuses a later one.
VERSION: Final = CONFIG_VERSION
_WEIGHTS: Final = ("quantized", "high_precision")


@register_quantization_config(METHOD)
class HybridQConfig(QuantizationConfigMixin):
    """How a model's linear weights are held: `from_pretrained(quantization_config=)` takes it.

    Each weight is quantized as it is read, in the dtype that the model is loaded in, and is a
    parameter that is a QuantizedTensor from then on, as inside `hybridq.quantized_model_init`.
    Inputs stay in high precision but under `hybridq.autocast`.

    Args:
        recipe: a recipe, the name of one, or the path of a TOML file: a weight has the planes of
            its slot. It is kept as its name, or as what its TOML file would say.
        format: name of a format, or a spec string, in place of a recipe: of the rowwise plane,
            which the forward takes; a backward decodes it.
        columnwise: with `format`: of a columnwise plane for the backward.
        weights: `"quantized"`; or `"high_precision"`: modules are converted for training under the
            recipe, and their weights stay what they are.
        frozen: quantized weights are not trained, as under adapters: they hold the rowwise plane
            alone, and need no gradient.
        modules_to_not_convert: names of modules that stay as they are, as transformers takes them:
            from their start, as a pattern, or as a suffix.
        also, least_width: as `hybridq.convert` takes them: reasons that count for nothing, and the
            least number of features.
        version: of these fields.
        quant_method: `"hybridq"`.

    Raises:
        ValueError: neither or both of recipe and format, one of them is unknown, no file can say
            the recipe, `weights` is none of these, or the version is a later one.
        TypeError: an argument that is not known, or one text where names are wanted; as
            `hybridq.convert`.

    Example:
        >>> from hybridq.integrations.transformers import HybridQConfig
        >>> HybridQConfig(format="nvfp4").to_dict()["quant_method"]
        'hybridq'
    """

    def __init__(
        self,
        recipe: str | Recipe | None = None,
        *,
        format: str | None = None,
        columnwise: str | None = None,
        weights: str = "quantized",
        frozen: bool = False,
        modules_to_not_convert: Iterable[str] | None = None,
        also: Iterable[str] = (),
        least_width: int = LEAST_WIDTH,
        version: int = VERSION,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(
                f"HybridQConfig: version must be {VERSION} at most, got {version!r}; a newer "
                "hybridq may read it"
            )
        if unknown:
            names = inspect.signature(HybridQConfig.__init__).parameters
            hint = suggestion(min(unknown), names)
            raise TypeError(f"HybridQConfig: takes no {', '.join(sorted(unknown))}{hint}")
        if weights not in _WEIGHTS:
            raise ValueError(f"HybridQConfig: weights {must_be_one_of(_WEIGHTS, weights)}")
        if (recipe is None) == (format is None):
            raise ValueError(
                "HybridQConfig: needs a recipe or a format and not both, got "
                f"recipe={recipe!r}, format={format!r}"
            )
        if format is None and columnwise is not None:
            raise ValueError(
                f"HybridQConfig: columnwise goes with a format, got columnwise={columnwise!r} with "
                f"recipe={recipe!r}"
            )
        if not isinstance(frozen, bool) or (frozen and weights != "quantized"):
            raise ValueError(
                "HybridQConfig: frozen must be a bool, and is of quantized weights, got "
                f"{frozen!r} with weights={weights!r}"
            )
        if format is not None and weights != "quantized":
            raise ValueError(
                "HybridQConfig: a format is that of quantized weights, got weights="
                f"{weights!r} with format={format!r}; give a recipe"
            )
        self.quant_method = METHOD
        self.version = VERSION
        self.recipe = None if recipe is None else text_of(recipe_of(recipe))
        self.format = format
        self.columnwise = columnwise
        self.weights = weights
        self.frozen = frozen
        kept = () if modules_to_not_convert is None else modules_to_not_convert
        self.modules_to_not_convert = [*names_in("HybridQConfig: modules_to_not_convert", kept)]
        conversion(nn.Identity(), also=also, least_width=least_width)  # checks both
        self.also = list(also)
        self.least_width = least_width
        if format is not None:
            _storage_recipe(format, columnwise)  # raises where there is no such format

    @property
    def weight_recipe(self) -> Recipe:
        """The recipe that says which planes weights have."""
        if self.format is not None:
            return _storage_recipe(self.format, self.columnwise)
        return recipe_of(self.recipe or "")

    def names_no_module(self, model: nn.Module) -> tuple[str, ...]:
        """Return those of `modules_to_not_convert` that name no module of a model.

        Args:
            model: any.
        """
        names = [name for name, _ in model.named_modules()]
        return tuple(
            one
            for one in self.modules_to_not_convert
            if all(should_convert_module(name, [one]) for name in names)
        )

    def convert(self, model: nn.Module, given_later: Container[str] = ()) -> None:
        """Convert a model's modules, and quantize their weights where that is asked for.

        Args:
            model: any; on the meta device its weights become empty planes there.
            given_later: names of parameters that files have planes of.
        """
        filter_fn = None
        if self.modules_to_not_convert:
            found = conversion(model, also=self.also, least_width=self.least_width)
            chosen = {
                name
                for name in found.converted
                if should_convert_module(name, self.modules_to_not_convert)
            }

            def filter_fn(module: nn.Module, name: str) -> bool:
                return name in chosen

        within: AbstractContextManager[None] = nullcontext()
        if self.weights == "quantized":
            within = quantized_model_init(self.weight_recipe, frozen=self.frozen)
        with within, weights_given_later(given_later):
            convert(model, filter_fn, also=self.also, least_width=self.least_width)


@cache
def _storage_recipe(format: str, columnwise: str | None) -> Recipe:
    """Return a recipe whose weights have these planes; nothing else is quantized."""
    col = None if columnwise is None else PlaneSpec.parse(columnwise)
    made = Quantizer(PlaneSpec.parse(format), col)
    if made.is_stochastic or made.is_identity:
        raise ValueError(
            "HybridQConfig: weights must be quantized, and not rounded stochastically, got "
            f"format={format!r}, columnwise={columnwise!r}"
        )

    def weights_only(role: QuantizerRole) -> Quantizer:
        return made if role.tensor_type == "weight" else IdentityQuantizer()

    weights_only.reads_names = False  # type: ignore[attr-defined]
    backward = "dequantized" if columnwise is None else None
    return CustomRecipe(weights_only, backward_override=backward)

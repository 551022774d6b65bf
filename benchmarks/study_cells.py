"""What the study trains: sizes of the model, and cells, each a recipe or a schedule of recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Final, NamedTuple

import hybridq
from hybridq.demo.model import ModelConfig
from hybridq.demo.train import BASELINE, TrainConfig
from hybridq.recipes import NVFP4BlockScaling, names
from hybridq.recipes.recipe import RecipeSource

__all__ = ["AXES", "BASELINE", "CELLS", "FORMATS", "SIZES", "TABLE", "Size", "source"]

#: Given the number of steps; None: nothing is quantized.
Source = Callable[[int], RecipeSource | None]


class Size(NamedTuple):
    """A model and how long it trains.

    Attributes:
        model: its sizes.
        batch: samples per step.
        steps: of the optimizer.
        about: for the reader.
    """

    model: ModelConfig
    batch: int
    steps: int
    about: str

    def config(self, seed: int) -> TrainConfig:
        """Return the training of one seed: rates, schedule and evaluation as in the demo."""
        return TrainConfig(self.model, self.batch, self.steps, eval_points=4, seed=seed)


SIZES: Final[Mapping[str, Size]] = {
    "tiny": Size(
        ModelConfig(layers=1, hidden=64, heads=2, ffn=160, sequence=32), 2, 8, "the test's"
    ),
    "0.4m": Size(
        ModelConfig(layers=2, hidden=128, heads=4, ffn=320, sequence=64),
        *(8, 100, "0.44 million parameters"),
    ),
    "3m": Size(ModelConfig(), 8, 400, "3.1 million parameters"),
    "25m": Size(
        ModelConfig(layers=8, hidden=512, heads=8, ffn=1344, sequence=256),
        *(8, 1000, "25 million parameters"),
    ),
    "moe": Size(
        ModelConfig(experts=8),
        *(8, 400, "a mixture of 8 experts, 2 per token, as much work as the 3 million"),
    ),
}

#: Of the table fprop x dgrad x wgrad, by the name of its columns.
FORMATS: Final[Mapping[str, str]] = {
    "bf16": "bf16",
    "fp8": "fp8_e4m3",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
#: The three products, in the order of a cell's name: `fprop-dgrad-wgrad`.
TABLE: Final = tuple("-".join(one) for one in product(FORMATS, repeat=3))


def _by_gemm(name: str) -> Source:
    fprop, dgrad, wgrad = (FORMATS[one] for one in name.split("-"))
    return lambda steps: hybridq.recipe(fprop=fprop, dgrad=dgrad, wgrad=wgrad)


def _named(name: str) -> Source:
    return lambda steps: hybridq.recipes.get(name)


def _nvfp4(**options: object) -> Source:
    return lambda steps: NVFP4BlockScaling(**options)  # type: ignore[arg-type]


def _last_tenth(first: str) -> Source:
    """The last tenth of the steps have their forward in BF16."""

    def made(steps: int) -> RecipeSource:
        last = hybridq.recipe(first, fprop="bf16")
        return hybridq.RecipeSchedule([(0, first), (0.9, last)], steps)

    return made


def _source_of(source: str) -> Source:
    return lambda steps: hybridq.recipe(
        fprop="nvfp4", dgrad="mxfp8", wgrad="mxfp8", columnwise_source=source
    )


_RECIPES: Final = tuple(one for one in names() if one not in (BASELINE, "high_precision"))
#: The rows of the page, by what differs.
AXES: Final[Mapping[str, Mapping[str, Source]]] = {
    "Recipes of the zoo": {name: _named(name) for name in _RECIPES},
    "NVFP4, one option at a time": {
        "nvfp4, no transform": _nvfp4(disable_rht=True),
        "nvfp4, nearest rounding": _nvfp4(disable_stochastic_rounding=True),
        "nvfp4, neither": _nvfp4(disable_rht=True, disable_stochastic_rounding=True),
        "nvfp4, 1x16 weights": _nvfp4(disable_2d_quantization=True),
        "nvfp4, 4over6 weights": _nvfp4(nvfp4_4over6="weights"),
        "nvfp4, 4over6 all, no transform": _nvfp4(nvfp4_4over6="all", disable_rht=True),
        "nvfp4, row-scaled, no transform": _nvfp4(row_scaled_activation=True, disable_rht=True),
    },
    "Forward in BF16 in the last tenth": {
        "nvfp4, then bf16 forward": _last_tenth("nvfp4"),
        "mxfp8, then bf16 forward": _last_tenth("mxfp8"),
    },
    "Source of columnwise planes (NVFP4 forward, MXFP8 backward)": {
        "decoded": _source_of("rowwise_dequantized"),
        "original": _source_of("original"),
    },
}
#: Every cell, the baseline first.
CELLS: Final[Mapping[str, Source]] = {
    BASELINE: lambda steps: None,
    **{name: one for axis in AXES.values() for name, one in axis.items()},
    **{name: _by_gemm(name) for name in TABLE if name != "bf16-bf16-bf16"},
}


def source(cell: str, steps: int) -> RecipeSource | None:
    """Return what a cell trains under; None: nothing is quantized.

    Args:
        cell: a name in `CELLS`.
        steps: of the run, of which a schedule takes a part.
    """
    return CELLS[cell](steps)

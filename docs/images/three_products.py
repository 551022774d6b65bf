"""`python docs/images/three_products.py` draws three-products.png: what a recipe gives each GEMM.

Which plane goes where is the table of the GEMMs, and the formats are the recipe's: the picture is
true of `RECIPE` as it is.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

import hybridq
from hybridq.direction import COLUMNWISE, ROWWISE
from hybridq.gemm import CONTRACT
from hybridq.recipes.gemm_words import word

RECIPE = "mxfp8_fwd_nvfp4_bwd"
PICTURE = Path(__file__).with_name("three-products.png")
COLORS = {"mxfp8": "#4c78a8", "nvfp4": "#f58518"}
SAYS = {
    "fprop": ("fprop", "y = x wᵀ", "the output"),
    "dgrad": ("dgrad", "dx = dy w", "gradient of the input"),
    "wgrad": ("wgrad", "dw = dyᵀ x", "gradient of the weight"),
}
SLOTS = {"input": "input x", "weight": "weight w", "grad_output": "gradient dy"}


def box(axes, x: float, y: float, width: float, text: str, color: str, ink: str = "white") -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, 0.5, boxstyle="round,pad=0.04", color=color, linewidth=0)
    )
    axes.text(x + width / 2, y + 0.25, text, ha="center", va="center", color=ink, fontsize=10)


def main() -> None:
    recipe = hybridq.recipes.get(RECIPE)
    figure, axes = plt.subplots(figsize=(10, 4.4), layout="constrained")
    places = {}
    for row, (slot, title) in enumerate(SLOTS.items()):
        y = 4.2 - 1.7 * row
        axes.text(0, y + 0.75, title, fontsize=11, weight="bold")
        quantizer = recipe.quantizer(hybridq.QuantizerRole("linear", slot))
        for direction, below in ((ROWWISE, 0.0), (COLUMNWISE, -0.62)):
            spec = getattr(quantizer, direction)
            kind = word(spec)
            box(axes, 0, y + below, 3.3, f"{direction} plane: {kind}", COLORS[kind.split(";")[0]])
            places[slot, direction] = (3.36, y + below + 0.25)
    for row, gemm in enumerate(CONTRACT):
        y = 4.0 - 1.7 * row
        name, formula, result = SAYS[gemm.name]
        box(axes, 6.4, y, 3.3, f"{name}   {formula}", "#e8e8e8", "black")
        axes.text(8.05, y - 0.28, result, ha="center", fontsize=9, color="#555555")
        for slot, direction, lift in (
            (gemm.a, gemm.a_direction, 0.1),
            (gemm.b, gemm.b_direction, -0.1),
        ):
            axes.annotate(
                "",
                xy=(6.33, y + 0.25 + lift),
                xytext=places[slot, direction],
                arrowprops={"arrowstyle": "-|>", "color": "#888888", "shrinkA": 0, "shrinkB": 0},
            )
    axes.set_title(f"One linear layer under the recipe {RECIPE}", fontsize=12)
    axes.set_xlim(-0.2, 9.9)
    axes.set_ylim(0.0, 5.3)
    axes.axis("off")
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()

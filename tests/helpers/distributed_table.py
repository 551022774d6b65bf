"""The table of docs/guides/fsdp2.md, from plans: `python distributed_table.py` prints it."""

from __future__ import annotations

from hybridq.distributed import DenseShape, RunPlan, Sharding, plan

RECIPES = (
    *(None, "fp8_current", "fp8_block", "mxfp8", "nvfp4", "nvfp4_1d_weight"),
    "mxfp8_fwd_nvfp4_bwd",
)
SHARDINGS = (Sharding(128), Sharding(1024), Sharding(1024, "hsdp", 64), Sharding(96))
#: Purposes of the collectives that a cell adds up.
PARTS = ("weights, forward", "weights, backward", "amaxes")


def cell(made: RunPlan) -> str:
    """Bytes per value of all weights: amaxes are those of some of them."""
    whole = next(moved.num_values for moved in made.traffic if moved.what == PARTS[0])
    found = {moved.what: moved.nbytes / whole for moved in made.traffic}
    texts = [f"{found.get(part, 0.0):.2f}" for part in PARTS]
    return " + ".join(texts if texts[-1] != "0.00" else texts[:-1])


def rows() -> list[str]:
    model = DenseShape.of(layers=1, hidden=8192).model().layers
    found = []
    for recipe in RECIPES:
        plans = [plan(model, recipe, sharding) for sharding in SHARDINGS]
        ratio = plans[0].moved_nbytes / sum(one.bf16_nbytes for one in plans[0].traffic)
        cells = [f"`{recipe or 'bf16'}`", *map(cell, plans), f"{ratio:.2f}"]
        found.append(f"| {' | '.join(cells)} |")
    return found


if __name__ == "__main__":
    print("\n".join(rows()))

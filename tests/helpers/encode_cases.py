"""What tests of encode and decode share: shapes, and every PlaneSpec of a format."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from hybridq import formats
from hybridq.formats import DEFAULT_SIGNS, Format, PlaneSpec

# Every size up to two blocks of 32, then the borders of 128-blocks and their tails.
SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from([48, 63, 64, 65, 96, 127, 128, 129, 160, 200, 257]),
    st.integers(0, 300),
)
SHAPES = st.tuples(SIZES, SIZES).filter(lambda shape: shape[0] * shape[1] <= 12_000)


def options_of(name: str) -> list[PlaneSpec]:
    """Every PlaneSpec that the format `name` allows."""
    fmt = formats.format(name)
    if fmt.is_identity:
        return [PlaneSpec(fmt)]
    records = [fmt]
    if fmt.rule == "amax":
        records += [
            replace(fmt, power_of_two=not fmt.power_of_two),
            replace(fmt, eps=0.01),
        ]
    if fmt.scale.name == "e8m0":
        records += [replace(fmt, rule=rule) for rule in ("floor", "ceil", "even")]
    specs = [PlaneSpec(record) for record in records]
    if fmt.is_tensor_scaled or fmt.block[0] == 1:
        specs += [PlaneSpec(fmt, signs=signs) for signs in (DEFAULT_SIGNS, 0, 0x0F35)]
    if fmt.rule == "two_level":
        specs.append(PlaneSpec(fmt, tensor_bound=256.0))
    if fmt.rule == "two_level" and fmt.block[0] == 1:
        specs += [PlaneSpec(fmt, signs=signs, row_scaled=True) for signs in (None, DEFAULT_SIGNS)]
    return specs + [replace(spec, stochastic=True) for spec in specs] + four_over_six_of(fmt)


def four_over_six_of(fmt: Format) -> list[PlaneSpec]:
    """NVFP4's four-over-six, which excludes stochastic rounding and the transform."""
    if fmt.rule != "two_level":
        return []
    choices = [(error, bound) for error in ("mae", "mse") for bound in (256.0, 448.0)]
    specs = [PlaneSpec(fmt, tensor_bound=bound, four_over_six=error) for error, bound in choices]
    if fmt.block[0] == 1:
        specs += [replace(spec, row_scaled=True) for spec in specs[::3]]
    return specs

"""Goldens of independent implementations as cases: the files of tests/golden/peers.

Source: the files' own `meta`, and the README beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import DEFAULT_SIGNS, element
from .adapters.ours import HybridQAdapter
from .case import Array, Case, to_spec
from .inputs import all_values
from .products import true_product

__all__ = ["peer_cases"]

_SIDES = {"row": "rowwise", "col": "columnwise"}
_SIGN_BITS = 16
_REFERENCE = HybridQAdapter("reference")


def _described(options: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Return the description of one plane from a golden's options."""
    family = options["family"]
    spec: dict[str, Any] = {"stochastic": False, "signs": None, "tensor_bound": 448.0}
    if family in ("fp8_tensor", "fp8_block"):
        block = options.get("block")
        spec |= {"element": options["element"], "block": block, "scale": "fp32", "rule": "amax"}
        spec["power_of_two"] = options["pow2"]
    elif family == "mx":
        spec |= {"element": options["element"], "block": [1, 32], "scale": "e8m0"}
        spec["rule"] = options["scale_rule"]
    else:
        spec |= {"element": "e2m1", "block": options["block"], "scale": "e4m3"}
        spec |= {"rule": "two_level", "tensor_bound": float(options.get("e4m3_max", 448))}
        if options.get("four_over_six"):
            spec["four_over_six"] = options["four_over_six"]
        if options.get("row_scaled"):
            spec["row_scaled"] = True
        if options.get("rht") and side == "col":
            spec["signs"] = _signs(options.get("rht_signs"))
    spec["codes_per_byte"] = element(spec["element"]).codes_per_byte
    return spec


def _signs(listed: list[int] | None) -> int:
    if not listed:
        return DEFAULT_SIGNS
    return sum(1 << i for i, sign in enumerate(listed[:_SIGN_BITS]) if sign < 0)


def _values(stored: Array) -> tuple[str, Array]:
    """Return the dtype and float32 values of an input: uint16 is the bits of BF16."""
    if stored.dtype != np.uint16:
        return "float32", stored.astype(np.float32)
    return "bfloat16", (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _with_signed_zeros(data: Array, x: Array) -> Array:
    """Return packed E2M1 codes with the sign that the source lost: code 0 of a negative is 8."""
    signs = np.zeros((data.shape[0], data.shape[1] * 2), dtype=bool)
    signs[:, : x.shape[1]] = np.signbit(x)
    codes = np.stack((data & 15, data >> 4), axis=-1).reshape(signs.shape)
    codes = np.where((codes == 0) & signs, 8, codes).astype(np.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _buffers(arrays: Mapping[str, Array], side: str, spec: Mapping[str, Any]) -> dict[str, Array]:
    """Return one plane's buffers as the rules have them."""
    names = ("data", "scale", "amax")
    found = {n: arrays[f"{side}_{n}"] for n in names if f"{side}_{n}" in arrays}
    if spec["scale"] == "e4m3" and spec["block"][0] > 1 and "scale" in found:
        found["scale"] = found["scale"][:: spec["block"][0]]  # they are stored once per row
    if spec["scale"] == "fp32":
        found.pop("amax", None)
    if spec["element"] == "e2m1" and "data" in found:
        own = arrays.get(f"{side}_rht")
        x = _values(arrays["x"] if own is None else own)[1]
        x = x.T if side == "col" and own is None else x
        found["data"] = _with_signed_zeros(found["data"], x)
    return found


def _plane_cases(
    name: str, options: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Iterator[Case]:
    dtype, x = _values(arrays["x"])
    for side, direction in _SIDES.items():
        spec = _described(options, side)
        want = _buffers(arrays, side, spec)
        if not want:
            continue
        case = Case(
            f"{name}/{side}/encode", "encode", spec, dtype, x.shape, direction, x, want=want
        )
        yield case
        if f"{side}_deq" in arrays:
            # The source of NVFP4 multiplies code, scale and amax in another order.
            ulp = 3 if spec["rule"] == "two_level" else 0
            yield Case(
                f"{name}/{side}/decode",
                "decode",
                spec,
                shape=x.shape,
                direction=direction,
                given=want,
                want={"values": arrays[f"{side}_deq"]},
                ulp=ulp,
            )


def _cast_cases(
    name: str, options: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Iterator[Case]:
    spec = {"element": options["element"]}
    x = all_values("bfloat16")
    codes = arrays["bf16_codes"].copy()
    counted = np.ones(x.size, dtype=bool)
    counted[arrays["bf16_nan"]] = False
    for label, dtype, values, wanted in (
        ("bf16", "bfloat16", x[counted], codes[counted]),
        ("f32", "float32", arrays["f32"], arrays["f32_codes"]),
    ):
        shape = (1, values.size)
        yield Case(f"{name}/{label}", "cast", spec, dtype, shape, x=values, want={"data": wanted})


def _table_cases(
    name: str, options: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Iterator[Case]:
    """Every BF16 amax as a block of 32 of its own."""
    amax = all_values("bfloat16")[: 1 << 15]
    x = np.zeros((amax.size, 32), dtype=np.float32)
    x[:, 5] = amax
    for key in arrays:
        prefix, _, which = key.rpartition("_")
        if prefix == "amax_byte":
            spec = _described({"family": "mx", "element": which, "scale_rule": "rceil"}, "row")
            want = {"scale": arrays[key][:, None]}
            yield Case(f"{name}/{which}", "encode", spec, "bfloat16", x.shape, x=x, want=want)


def _gemm_options(options: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Return the options of one operand of a product, as those of a plane's golden."""
    index = "ab".index(side)
    one = {key: value for key, value in options.items() if key not in "ab"}
    one |= options.get(side, {})
    for key in ("element", "block"):
        if isinstance(one.get(key), list) and isinstance(one[key][0], list | str):
            one[key] = one[key][index]
    return one


def _gemm_cases(
    name: str, options: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Iterator[Case]:
    """The operands are given as values; the reference encodes them, which other files check."""
    side = "col" if options.get("columnwise") else "row"
    planes = []
    for key in "ab":
        spec = _described(_gemm_options(options, key), side)
        dtype, x = _values(arrays[key])
        own = np.ascontiguousarray(x.T) if side == "col" else x
        asked = Case(name, "encode", spec, dtype, own.shape, x=own)
        planes.append((spec, own.shape, _REFERENCE.encode(own, asked)))
    (spec, shape, given), other = planes
    operands = [(buffers, to_spec(one), matrix[0]) for one, matrix, buffers in planes]
    _, bound = true_product(operands[0], operands[1], shape[1])
    want = {"product": arrays["truth"], "bound": bound}
    yield Case(name, "gemm", spec, shape=shape, given=given, want=want, other=other)


def _other_cases(
    name: str, options: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Iterator[Case]:
    """What the suite has no question for is listed as such, not left out."""
    yield Case(name, str(options.get("family", "unknown")), {})


_READERS = {
    **dict.fromkeys(("fp8_tensor", "fp8_block", "mx", "nvfp4"), _plane_cases),
    "cast": _cast_cases,
    "e8m0": _table_cases,
}


def peer_cases(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[Case]:
    """Return the cases of one golden of another implementation.

    Args:
        path: of the file; its stem names the cases.
        meta: its `meta`.
        arrays: all else that is in it.
    """
    options = meta["options"]
    counted = {name: a for name, a in arrays.items() if name not in meta.get("info_keys", ())}
    reader = _READERS.get(options.get("family", ""), _other_cases)
    if "truth" in counted:
        reader = _gemm_cases
    return list(reader(path.stem, options, counted))

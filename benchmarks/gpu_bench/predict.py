"""What a case can take at least on a chip, and what was expected of it before it was measured.

A floor is the time that the chip's memory or its tensor cores need for the task itself. A
prediction adds what this implementation does beside: passes over memory, instructions counted from
machine code (`sass_budgets.json`), and a rate of products that the chip's libraries are known to
reach. Neither is a measurement; each carries its formula.

Source: NVIDIA H200 datasheet (memory, dense peaks, clock). The rates of `_REACHED` are assumptions:
90% of the memory's, 85% of the issue slots, 79% of the BF16 peak, 58% and 66% of the FP8 peak; the
55% for groups are calculated from counts (docs/reference/gpu-status.md, "Groups of tokens").
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from .case import Case

__all__ = ["CHIPS", "Chip", "Prediction", "predict"]

_BUDGETS = Path(__file__).resolve().parents[1] / "sass_budgets.json"


@dataclass(frozen=True)
class Chip:
    """A chip's own rates.

    Args:
        memory: bytes per second, read and written.
        bf16, fp8: dense floating-point operations per second of its tensor cores.
        issue: instructions of single threads per second: multiprocessors, issue slots, 32, clock.
        arch: as the budgets of instructions name it.
    """

    memory: float
    bf16: float
    fp8: float
    issue: float
    arch: str


CHIPS = {"NVIDIA H200": Chip(4.8e12, 989.5e12, 1979e12, 132 * 4 * 32 * 1.98e9, "sm_90a")}

#: What of a rate is reached: memory, issue slots, products in BF16, with 1x128 scales, else FP8,
#: and of groups with 1x128 scales.
_REACHED = {
    "memory": 0.9,
    "issue": 0.85,
    "bf16": 0.79,
    "block": 0.58,
    "fp8": 0.66,
    "groups": 0.55,
}

#: Case of a cast to the kernel whose instructions are counted; both planes of one tile.
_COUNTED = {
    "mxfp8 row": "encode MXFP8, rows",
    "mxfp8 col": "encode MXFP8, columns",
    "mxfp8 both": "encode MXFP8, both",
    "fp8_1x128 row": "encode FP8 1x128, rows",
    "fp8_1x128 both": "encode FP8 1x128, both",
    "fp8_128x128 both": "encode FP8 128x128, both",
    "fp8_e4m3 row": "encode FP8 per tensor, rows",
    "fp8_e4m3 both": "encode FP8 per tensor, both",
    "fp8 by row row": "rows in one read, FP8 by row",
    "mxfp4 both": "encode MXFP4, both",
    "nvfp4 row": "encode NVFP4, rows",
    "nvfp4 col": "encode NVFP4, columns",
    "nvfp4 both": "encode NVFP4, both",
    "nvfp4 rows row": "rows in one read, NVFP4 by row",
    "nvfp4 | nvfp4 rht": "encode NVFP4, both, transformed columns",
    "nvfp4 sr | nvfp4 rht sr": "encode NVFP4, stochastic, both, transformed columns",
    "mxfp8 | nvfp4 rht": "encode MXFP8 rows, NVFP4 transformed columns",
}


@dataclass(frozen=True)
class Prediction:
    """What was expected of a case.

    Args:
        floor_us: the least time that the chip needs for the task, or None where none is stated.
        time_us: the time that was predicted, or None.
        formula: of the prediction, in words; "" without one.
    """

    floor_us: float | None = None
    time_us: float | None = None
    formula: str = ""


@lru_cache(maxsize=1)
def _instructions() -> dict[str, dict[str, float]]:
    kernels = json.loads(_BUDGETS.read_text())["kernels"]
    return {kernel["name"]: kernel["budget"] for kernel in kernels}


def _cast(case: Case, chip: Chip) -> Prediction:
    floor = case.nbytes / chip.memory
    name = case.name.removeprefix("encode ").removesuffix(", amax given")
    memory = floor / _REACHED["memory"]
    count = _instructions().get(_COUNTED.get(name, ""), {}).get(chip.arch)
    if not case.name.startswith("encode ") or count is None:
        return Prediction(1e6 * floor, 1e6 * memory, "bytes / (0.9 x memory rate)")
    elements = case.shape[0] * case.shape[1]
    # The pass for an amax, where the case has one, reads x once more and is bound by memory.
    amax = 2 * elements / chip.memory / _REACHED["memory"] if case.note == "amax included" else 0.0
    issue = count * elements / chip.issue / _REACHED["issue"]
    return Prediction(
        1e6 * floor,
        1e6 * (amax + max(memory - amax, issue)),
        f"amax pass + max(bytes / (0.9 x memory rate), {count:g} instructions x elements / "
        "(0.85 x issue rate))",
    )


def _product(case: Case, chip: Chip) -> Prediction:
    m, n, k = case.shape
    a, _, rest = case.name.partition(" x ")
    b, *words = rest.split(", ")
    if not rest:
        floor = case.flops / chip.bf16
        return Prediction(
            1e6 * floor, 1e6 * floor / _REACHED["bf16"], "2MNK / (0.79 x peak of BF16)"
        )
    sides = [(a, m * k)] + ([] if "weight kept" in words else [(b, n * k)])
    memory = _REACHED["memory"] * chip.memory
    if "auto" in words and {a, b} <= {"mxfp8", "fp8_1x128", "fp8_128x128", "fp8_e4m3"}:
        is_tensor = {a, b} == {"fp8_e4m3"}
        kind = "fp8" if is_tensor or "fp8_128x128" in (a, b) else "block"
        floor = case.flops / chip.fp8
        folds = sum(2 * size for name, size in sides if name == "mxfp8") / memory
        text = f"2MNK / ({_REACHED[kind]:g} x peak of FP8) + 2 bytes per folded code / memory"
        return Prediction(1e6 * floor, 1e6 * (floor / _REACHED[kind] + folds), text)
    floor = case.flops / chip.bf16
    decodes = sum(3 * size for name, size in sides if name != "bf16") / memory
    factors = 6 * m * n / memory if "nvfp4" in (a, b) else 0.0
    text = (
        "2MNK / (0.79 x peak of BF16) + 3 bytes per decoded code, and 6 per result where a factor "
        "is applied, / (0.9 x memory rate)"
    )
    return Prediction(1e6 * floor, 1e6 * (floor / _REACHED["bf16"] + decodes + factors), text)


def _decoded_groups(case: Case, chip: Chip, names: set[str]) -> Prediction:
    """Return what was expected of a BF16 product of groups, and of what is decoded for one."""
    groups, tokens, n, k = case.shape
    floor, is_wgrad = case.flops / chip.bf16, case.name.endswith(" wgrad")
    time, text = floor / _REACHED["bf16"], "2TNK / (0.79 x peak of BF16)"
    if names == {"bf16"}:
        return Prediction(1e6 * floor, 1e6 * time, text)
    first = case.name.split(" ")[0]
    sides = [tokens * n, tokens * k] if is_wgrad else [tokens * k, groups * n * k]
    nbytes = 3.0 * sum(sides[first == "bf16" :])
    if "nvfp4" in names:  # factors of the smaller tokens
        nbytes += 4 * (min(sides) if is_wgrad else sides[0])
    if not is_wgrad:  # zeros behind the last group
        nbytes += 4 * tokens * n
    text += (
        " + 3 bytes per decoded code, 4 per token's value where a factor is applied, 4 per result "
        "of rows, / (0.9 x memory rate)"
    )
    return Prediction(1e6 * floor, 1e6 * (time + nbytes / _REACHED["memory"] / chip.memory), text)


def _groups(case: Case, chip: Chip) -> Prediction:
    groups, tokens, n, k = case.shape
    names = set(case.name.removesuffix(" rows").removesuffix(" wgrad").split(" x "))
    if names == {"fp8_e4m3"}:  # torch's product by rows
        return Prediction(1e6 * case.flops / chip.bf16)
    if not names <= {"mxfp8", "fp8_1x128", "fp8_128x128"}:
        return _decoded_groups(case, chip, names)
    floor, is_wgrad = case.flops / chip.fp8, case.name.endswith(" wgrad")
    # Every expert has equally many tokens here: they are counted in whole tiles.
    step = 128 if is_wgrad else 256
    own = groups * -(-tokens // (groups * step)) * step
    codes = own * (n + k) if is_wgrad else tokens * k + groups * n * k
    folds = 2 * codes / (_REACHED["memory"] * chip.memory) if "mxfp8" in names else 0.0
    time = floor * own / tokens / _REACHED["groups"] + folds
    text = "2TNK / (0.55 x peak of FP8), T in whole tiles, + 2 bytes per folded code / memory"
    return Prediction(1e6 * floor, 1e6 * time, text)


def predict(case: Case, name: str | None = None) -> Prediction:
    """Return the floor and the prediction of a case.

    Args:
        case: what is measured.
        name: of the GPU, as torch gives it; None for this machine's.

    Returns:
        Nothing stated, where the chip is not in `CHIPS`.
    """
    if name is None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    chip = CHIPS.get(name)
    if chip is None:
        return Prediction()
    if case.section == "cast":
        return _cast(case, chip)
    if case.section in ("gemm", "small_m") and len(case.shape) == 3:
        return _product(case, chip)
    if case.section == "grouped" and len(case.shape) == 4:
        return _groups(case, chip)
    times = [case.nbytes / chip.memory] if case.nbytes else []
    times += [case.flops / chip.bf16] if case.flops else []
    return Prediction(1e6 * max(times)) if times else Prediction()

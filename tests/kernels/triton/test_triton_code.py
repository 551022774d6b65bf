"""The Triton GEMMs' machine code, compiled ahead of time: a performance test without a GPU.

On sm_90: tensor cores by wgmma whose left operand comes from registers, no spill, no conversion at
a quarter of the rate (F2F), no flush of subnormals, and the main loop's instructions per decoded
code held to a recorded budget.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import triton_tools
from hybridq.kernels.triton import backend as triton_backend
from triton_tools import Worker

pytestmark = pytest.mark.skipif(triton_tools.MISSING is not None, reason=str(triton_tools.MISSING))

#: (a, b) -> instructions of the main loop per code of the left operand, for 16 rows of a.
BUDGETS = {
    ("bf16", "mxfp8"): 8.2,
    ("bf16", "mxfp8_e5m2"): 8.2,
    ("bf16", "fp8_e4m3"): 6.4,
    ("bf16", "nvfp4"): 8.3,
    ("bf16", "mxfp4"): 6.7,
    ("bf16", "mxfp6_e2m3"): 8.2,
    ("bf16", "fp8_128x128"): 8.2,
    ("mxfp8", "mxfp8"): 11.0,
    ("nvfp4", "nvfp4"): 11.0,
    ("bf16", "e4m3/128x128/fp32/amax/float8_block"): 10.2,
    ("bf16", "e4m3/1x4096/fp32/amax/float8_block"): 6.4,
}
#: kind of grouped GEMM, a, b
GROUPED = [
    ("few", "bf16", "mxfp8"),
    ("few", "mxfp8", "nvfp4"),
    ("rows", "mxfp8", "mxfp8"),
    ("rows", "bf16", "nvfp4"),
    ("rows", "nvfp4", "bf16"),
    ("k", "mxfp8", "mxfp8"),
    ("k", "nvfp4", "bf16"),
    ("k", "mxfp4", "nvfp4"),
]


#: The same, of FP32 operands.
WIDE = [
    ("few", "fp32", "nvfp4"),
    ("rows", "fp16", "fp16"),
    ("rows", "mxfp8", "fp32"),
    ("k", "fp32", "fp32"),
    ("k", "fp32", "mxfp8"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Iterator[object]:
    """Compiles a launch in a process of its own, with an empty cache."""
    folder = tmp_path_factory.mktemp("triton")
    worker = Worker(TRITON_CACHE_DIR=str(folder), TRITON_INTERPRET="0", OMP_NUM_THREADS="1")

    def call(function: str, *args: object, capability: int = 90) -> triton_tools.Compiled:
        return worker("triton_launches", function, Path(folder), capability, *args)

    yield call
    worker.close()


#: Bytes that Triton before 3.9 keeps in memory in kernels of sm_89 and sm_100; later ones none.
SPILLED = 0 if triton_tools.MISSING or triton_backend._triton_version() >= (3, 9) else 48


def hold(code: triton_tools.Compiled, is_hopper: bool = True) -> None:
    """What every kernel must keep."""
    assert code.spilled <= (0 if is_hopper else SPILLED)
    assert code.counts["F2F"] == 0
    assert not re.search(r"\.ftz", code.ptx)
    assert code.counts["LDGSTS"] > 0  # operands are loaded ahead
    if is_hopper:
        operands = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\{)?", code.ptx)
        assert operands
        assert all(operands), "the left operand does not come from registers"


@pytest.mark.more
def test_small_m_on_hopper(compiled) -> None:
    code = compiled("dense", "bf16", "mxfp8", 16)
    hold(code)
    assert code.loop_size / code.codes <= BUDGETS["bf16", "mxfp8"]


@pytest.mark.slow
@pytest.mark.parametrize("pair", BUDGETS, ids="-".join)
def test_loops_keep_their_budget(compiled, pair: tuple[str, str]) -> None:
    code = compiled("dense", *pair, 16)
    hold(code)
    print(pair, code.loop_size / code.codes, code.registers)
    assert code.loop_size / code.codes <= BUDGETS[pair]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("mxfp8", "bf16"), ("mxfp4", "nvfp4")], ids="-".join)
def test_large_tiles_on_hopper(compiled, pair: tuple[str, str]) -> None:
    hold(compiled("dense", *pair, 4096))


@pytest.mark.slow
@pytest.mark.parametrize("case", GROUPED, ids="-".join)
def test_grouped_on_hopper(compiled, case: tuple[str, str, str]) -> None:
    code = compiled("grouped", *case)
    hold(code)
    print(case, code.registers)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("case", WIDE, ids="-".join)
def test_groups_of_fp32_operands(compiled, case: tuple[str, str, str], capability: int) -> None:
    """No tensor core cuts an operand short: every product of a tile is one of FP32."""
    if capability == 100 and triton_backend._triton_version() < triton_backend._EXACT:
        pytest.skip("the backend refuses them: test_fp32_operands_wait_for_a_triton_that_is_exact")
    code = compiled("grouped", *case, capability=capability)
    print(case, code.registers)
    assert code.spilled == 0
    assert not re.search(r"\.ftz|tf32|mma", code.ptx)
    products = code.counts["FFMA"] + 2 * code.counts["FFMA2"]
    assert products >= 64 * (16 if case[0] == "few" else 64) * 32 // 128  # of a thread
    assert code.counts["LDGSTS"] > 0  # operands are loaded ahead


@pytest.mark.slow
@pytest.mark.parametrize("is_square", [False, True])
def test_block_scaled_on_hopper(compiled, is_square: bool) -> None:
    code = compiled("block", is_square)
    assert code.spilled == 0
    assert code.counts["QGMMA"] == 4  # 128 codes by 32
    assert code.counts["LDGSTS"] > 0


#: (capability, kind, tokens) -> instructions of the loop over K, a step of 128 of a tile.
FP8_GROUPS = {
    (90, "rows", 16384): 310,
    (90, "k", 16384): 490,
    (100, "rows", 16384): 220,
    (100, "k", 16384): 216,
    (120, "rows", 16384): 210,
    (120, "k", 16384): 206,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FP8_GROUPS, ids=str)
def test_fp8_groups(compiled, case: tuple[int, str, int]) -> None:
    """Codes go to FP8 tensor cores as they are, by TMA, while earlier steps are multiplied."""
    code = compiled("grouped_block", *case[1:], capability=case[0])
    inner = Counter(line.split()[0].split(".")[0] for line in code.loop)
    print(case, code.loop_size, code.registers, code.spilled)
    assert not re.search(r"\.ftz", code.ptx)
    assert inner["F2F"] == inner["LDG"] == 0
    waves = 2 if case[:2] == (90, "k") else 1
    assert inner["UTMALDG"] == 2 + 2 * waves  # two waves share b and its scales
    name, count = {90: ("QGMMA", 4 * waves), 100: ("UTCQMMA", 4), 120: ("QMMA", 32)}[case[0]]
    assert inner[name] == count
    if triton_backend._triton_version() >= (3, 9):
        assert code.spilled <= 16
        assert inner["LDL"] == inner["STL"] == 0
        assert code.loop_size <= FP8_GROUPS[case]
    else:  # 3.6: addresses of shared memory are computed in vector registers
        assert code.spilled <= 160
        assert code.loop_size <= 1.8 * FP8_GROUPS[case]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_chips(compiled, capability: int) -> None:
    for case in (("dense", "bf16", "mxfp8", 16), ("dense", "bf16", "nvfp4", 16)):
        hold(compiled(*case, capability=capability), is_hopper=False)
    for case in GROUPED[1::3]:
        hold(compiled("grouped", *case, capability=capability), is_hopper=False)
    if capability > 80:
        for is_square in (False, True):
            assert compiled("block", is_square, capability=capability).spilled <= SPILLED


@pytest.mark.slow
def test_the_sum_of_shares_compiles(compiled) -> None:
    code = compiled("reduce")
    assert code.spilled == 0


@pytest.mark.slow
def test_sizes_of_one_compile(compiled) -> None:
    compiled("ones")

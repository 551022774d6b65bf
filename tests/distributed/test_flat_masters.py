"""Masters in shards of flat buffers, quantized as the whole: see `flat_masters_program.py`."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq.distributed import FlatCodes
from hybridq.distributed.flat.code_bytes import read_codes, write_codes
from rank_runs import needs_gloo, run

PROGRAM = "flat_masters_program.py"


@needs_gloo
@pytest.mark.parametrize(
    ("world", "what"),
    [
        (2, "matrix=some"),
        pytest.param(3, "matrix", marks=pytest.mark.more),
        pytest.param(4, "matrix", marks=pytest.mark.slow),
    ],
)
def test_planes_are_those_of_the_whole_master(world, what, tmp_path) -> None:
    run(world, tmp_path / "store", what, program=PROGRAM)


@needs_gloo
def test_specials_kinds_state_and_faults(tmp_path) -> None:
    run(2, tmp_path / "store", "specials", "kinds", "state", "faults", program=PROGRAM)


@needs_gloo
@pytest.mark.more
def test_specials_kinds_state_and_faults_on_three_ranks(tmp_path) -> None:
    run(3, tmp_path / "store", "specials", "kinds", "state", "faults", program=PROGRAM)


@needs_gloo
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.more) for n in (3, 4))])
def test_a_distributed_optimizer_is_one_process(world, tmp_path) -> None:
    recipes = ("mxfp8_fwd_nvfp4_bwd", "nvfp4", "fp8_current", "mxfp8_fwd_high_precision_bwd")
    names = [f"loop={one}" for one in recipes]
    run(world, tmp_path / "store", *names, program=PROGRAM)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_codes_in_flat_buffers(bits: int) -> None:
    """Codes written in pieces at odd places are read back, and leave their neighbours alone."""
    count = 23
    buffer = torch.randint(256, (40 * bits // 8,), dtype=torch.uint8)
    before = buffer.clone()
    kind = torch.int16 if bits == 16 else torch.uint8
    codes = torch.randint(1 << min(bits, 15), (count,), dtype=kind)
    for low, high in ((13, count), (0, 1), (6, 13), (1, 6)):
        write_codes(buffer, bits, 7 + low, codes[low:high])
    assert torch.equal(read_codes(buffer, bits, 7, count).view(kind), codes)
    for start, stop in ((0, 7), (7 + count, 40)):
        held, old = (read_codes(one, bits, start, stop - start) for one in (buffer, before))
        assert torch.equal(held, old)


def test_what_a_flat_buffer_refuses() -> None:
    weight, like = (hybridq.quantize(torch.ones(4, 8), "mxfp8") for _ in range(2))
    other = hybridq.quantize(torch.ones(4, 8), "nvfp4")
    random = hybridq.NVFP4Quantizer(with_2d_quantization=False, stochastic_rounding=True)
    for error, text, call in (
        (TypeError, "must be quantized, got Tensor", ([torch.ones(2)], [0])),
        (ValueError, "a part or a flat view", ([weight[:2]], [0])),
        (ValueError, "got 1 parameters and 2 offsets", ([weight], [0, 1])),
        (ValueError, "not negative", ([weight], [-1])),
        (ValueError, "numel must be at least 34", ([weight], [2], 33)),
        (ValueError, "must not overlap, got 0 and 1", ([weight, like], [0, 31])),
        (ValueError, "must be given once, got .* number 0 and 1", ([weight, weight], [0, 32])),
        (ValueError, "got 8 bits in parameter 0 and 4 in 1", ([weight, other], [0, 32])),
        (
            ValueError,
            "round weights to nearest",
            ([random(torch.ones(4, 8))], [0]),
        ),
    ):
        with pytest.raises(error, match=text):
            FlatCodes(*call)
    assert FlatCodes([], []).buffers == ()

"""The Triton backend without Triton: what it takes, the PTX that decodes, padded ragged planes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import hybridq
import ptx_emulator
from hybridq.formats import ELEMENTS, PlaneSpec, format, names
from hybridq.kernels import OpQuery
from hybridq.kernels.inputs.device import Chip
from hybridq.kernels.ragged import padded_layout as ragged
from hybridq.kernels.triton import TRITON, backend, block_gemm_reason, wants
from hybridq.kernels.triton.form import form_of, form_reason
from hybridq.kernels.triton.ptx import SCALE, decode_asm
from hybridq.reference import decode_codes

CODES = [e for e in ELEMENTS.values() if e.bits <= 8 and e.has_sign and e.mantissa_bits]
H200 = Chip.of("cuda", (9, 0))
FLOAT_SCALES = PlaneSpec(replace(format("fp8_1x128"), power_of_two=False))


def bf16_bits(values: torch.Tensor) -> np.ndarray:
    """BF16 bits, every NaN the same."""
    bits = values.to(torch.bfloat16).view(torch.int16).numpy().astype(np.uint32) & 0xFFFF
    return np.where(values.isnan().numpy(), 0x7FFF, bits)


def alike(bits: np.ndarray) -> np.ndarray:
    """Bits with every NaN the same."""
    return np.where((bits & 0x7FFF) > 0x7F80, 0x7FFF, bits)


@pytest.mark.parametrize("element", CODES, ids=str)
def test_ptx_decodes_every_pair_of_codes(element) -> None:
    """All 65,536 words of two codes, or all 256 bytes: both halves, specials and signs of zero."""
    width = 4 if element.codes_per_byte == 2 else 8
    words = np.arange(1 << 2 * width, dtype=np.uint32)
    got = ptx_emulator.run(decode_asm(element), r2=words)
    for register, codes in (("$0", words & (1 << width) - 1), ("$1", words >> width)):
        expected = decode_codes(torch.from_numpy(codes.astype(np.uint8)), element)
        assert np.array_equal(alike(got[register]), bf16_bits(expected))


@pytest.mark.parametrize("element", CODES, ids=str)
@pytest.mark.parametrize("scale", ["e8m0", "e4m3"])
def test_ptx_scales_round_once(element, scale: str) -> None:
    """Every code times every scale, against FP32 rounded to BF16 once."""
    values = decode_codes(torch.arange(1 << element.bits, dtype=torch.uint8), element)
    scales = decode_codes(torch.arange(256, dtype=torch.uint8), ELEMENTS[scale])
    left, right = (x.reshape(-1) for x in torch.meshgrid(values, scales, indexing="ij"))
    low, high = bf16_bits(left), bf16_bits(right)
    got = ptx_emulator.run(SCALE, r1=low | low << 16, r2=high | high << 16)["$0"]
    for half in (got & 0xFFFF, got >> 16):
        assert np.array_equal(alike(half), bf16_bits(left * right))


def test_the_emulator_rounds_as_torch_does(seed: int) -> None:
    """Random pairs of BF16, subnormal and overflowing products included."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, 1 << 16, 20000).astype(np.uint32) for _ in range(2))
    got = ptx_emulator.run(SCALE, r1=a, r2=b)["$0"] & 0xFFFF
    x, y = (torch.from_numpy((v << 16).view(np.float32).copy()).double() for v in (a, b))
    exact = x * y
    # FP64 to FP32 would round twice: compare where FP32 holds the product.
    held = (exact.float().double() == exact) | exact.isnan()
    assert held.float().mean() > 0.4
    keep = held.numpy()
    assert np.array_equal(alike(got)[keep], bf16_bits(exact.float())[keep])


@pytest.mark.parametrize("name", names())
def test_forms_exist_for_what_bf16_holds(name: str) -> None:
    spec = PlaneSpec.parse(name)
    assert (form_reason(spec) is None) == spec.format.is_bf16_exact
    assert (form_reason(spec, takes_wide=True) is None) == (name != "identity")
    if form_reason(spec, takes_wide=True) is None:
        hash(form_of(spec))
        assert form_of(spec).is_wide == (not spec.format.is_bf16_exact)


def query(**change: object) -> OpQuery:
    """A query that the backend takes, with changes."""
    fields = {
        "op": "gemm",
        "device": "cuda",
        "dtype": torch.bfloat16,
        "row": PlaneSpec.parse("bf16"),
        "col": PlaneSpec.parse("mxfp8"),
        "sizes": (4, 4096, 4096),
        "chip": H200,
    }
    return OpQuery(**(fields | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"device": "cpu"}, "NVIDIA GPUs"),
        ({"chip": None}, "capability is not known"),
        ({"chip": Chip.of("cuda", (7, 5))}, "needs compute capability 8.0"),
        ({"dtype": torch.float64}, "makes float32"),
        ({"row": PlaneSpec.parse("fp16")}, "operand a: plain operands must be bf16"),
        ({"col": None}, "two operands"),
        ({"row": PlaneSpec.parse("nvfp4;rht=d7e8")}, "transformed"),
        ({"sizes": None}, "sizes are not known"),
        ({"sizes": (65, 65, 8)}, "at most 64 rows"),
        ({"sizes": (4096, 4, 8)}, "gains nothing"),
        ({"op": "encode"}, "has no encode"),
    ],
)
def test_reasons(change: dict[str, object], reason: str, monkeypatch, chooses_anew) -> None:
    monkeypatch.setattr(backend, "_missing", lambda: None)
    assert TRITON.answer(query()).reason is None
    assert reason in str(TRITON.answer(query(**change)).reason)  # type: ignore[arg-type]


def test_what_it_wants(monkeypatch, chooses_anew) -> None:
    monkeypatch.setattr(backend, "_missing", lambda: None)
    bf16, mxfp8 = PlaneSpec.parse("bf16"), PlaneSpec.parse("mxfp8")
    assert wants((64, 4096, 8), bf16, mxfp8) is None
    assert wants((4096, 64, 8), mxfp8, bf16) is None
    # Grouped products, and a user who asks for it, are not held to that.
    assert TRITON.answer(query(op="grouped_gemm", sizes=None)).reason is None
    assert TRITON.answer(query(sizes=(4096, 4096, 8)), is_forced=True).reason is None


@pytest.mark.parametrize(
    "a,b", [("fp32", "fp32"), ("fp16", "mxfp8"), ("nvfp4", "fp32"), (FLOAT_SCALES, "bf16")], ids=str
)
def test_groups_of_what_bf16_does_not_hold(a: object, b: object, monkeypatch, chooses_anew) -> None:
    """Nothing else multiplies them on a GPU without reading the offsets on the host."""
    monkeypatch.setattr(backend, "_missing", lambda: None)
    specs = [one if isinstance(one, PlaneSpec) else PlaneSpec.parse(str(one)) for one in (a, b)]
    for chip in ("sm_80", "sm_90", "sm_120"):
        for dtype in (torch.bfloat16, torch.float32):
            given = {"device": chip, "dtype": dtype, "precision": "exact"}
            found = hybridq.explain("grouped_gemm", *specs, **given)
            assert found.chosen == "triton", str(found)
            assert "FP32 product" in str(found)
        assert hybridq.explain("gemm", *specs, device=chip, rows=16).chosen == "torch"


def test_many_tokens_round_what_bf16_does_not_hold_once(monkeypatch, chooses_anew) -> None:
    """Unless that is what was asked not to be done, or both operands are such."""
    monkeypatch.setattr(backend, "_missing", lambda: None)
    one, bf16 = FLOAT_SCALES, PlaneSpec.parse("bf16")
    for a, b, side in ((one, bf16, "a"), (bf16, one, "b")):
        found = hybridq.explain("grouped_gemm", a, b, device="sm_90")
        assert found.chosen == "torch" and f"operand {side} is rounded once" in str(found)
    for a, b in ((one, one), (PlaneSpec.parse("nvfp4"), one), (PlaneSpec.parse("fp8_e4m3"), one)):
        found = hybridq.explain("grouped_gemm", a, b, device="sm_100")
        assert "rounded once" not in str(found)


def test_a_machine_without_triton_says_so(monkeypatch, chooses_anew) -> None:
    monkeypatch.setattr(backend, "_missing", lambda: "the package triton is not installed")
    assert TRITON.answer(query()).reason == "the package triton is not installed"


def test_block_gemm_reasons(monkeypatch, chooses_anew) -> None:
    monkeypatch.setattr(backend, "_missing", lambda: None)
    assert block_gemm_reason(("e4m3", "e5m2"), H200) is None
    assert "8.9" in str(block_gemm_reason(("e4m3", "e4m3"), Chip.of("cuda", (8, 0))))
    assert "operand b" in str(block_gemm_reason(("e4m3", "e2m1"), H200))
    assert block_gemm_reason(("e4m3", "e4m3"), H200, is_grouped=True) is None
    ada = Chip.of("cuda", (8, 9))
    assert block_gemm_reason(("e4m3", "e4m3"), ada) is None
    assert "9.0" in str(block_gemm_reason(("e4m3", "e4m3"), ada, is_grouped=True))


def test_importing_the_backend_imports_no_triton() -> None:
    code = "import sys, hybridq.kernels.triton; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_quantized_contraction_over_tokens_must_be_padded() -> None:
    from hybridq.kernels.choice.arguments import GroupedArgs, GroupedOperand

    spec = PlaneSpec.parse("mxfp8")
    buffers = [torch.zeros(b.shape, dtype=b.dtype) for b in spec.buffers(4, 40)]
    side = GroupedOperand(buffers, spec, 4, 40)
    args = GroupedArgs(torch.tensor([40]).int(), 40, None, None, None, torch.float32)
    with pytest.raises(ValueError, match="must be padded, got e4m3"):
        TRITON.ops["grouped_gemm"](side, side, args)


@pytest.mark.parametrize("sizes", [(3,), (0, 0), (128, 0, 129), (1, 1, 1, 1), (127, 256, 5)])
@pytest.mark.parametrize("rest", [0, 7])
def test_padded_tokens(sizes: tuple[int, ...], rest: int) -> None:
    tokens = sum(sizes) + rest
    x = torch.randn(tokens, 3)
    x[::2, 1] = -0.0
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    padded = ragged.padded_offsets(ends, tokens)
    out = ragged.pad_tokens(x, ends)
    assert out.shape == (ragged.capacity(tokens, len(sizes)), 3)
    expected = torch.zeros_like(out)
    begin = place = 0
    for group, size in enumerate(sizes):
        assert padded[group] == place
        expected[place : place + size] = x[begin : begin + size]
        begin, place = begin + size, place + max(-(-size // 128), 1) * 128
    assert padded[-1] == place <= out.shape[0]
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))  # signs of zero too


def test_ends_beyond_the_tokens_count_as_their_number() -> None:
    padded = ragged.padded_offsets(torch.tensor([5, 400], dtype=torch.int32), 10)
    assert padded.tolist() == [0, 128, 256]


@pytest.mark.parametrize("ends", [[-5, 3], [300, 0, 300], [7, 2, 9], [-1, -2, -3]])
def test_wrong_ends_count_as_the_nearest_right_ones(ends: list[int]) -> None:
    x = torch.randn(300, 2)
    wrong = torch.tensor(ends, dtype=torch.int32)
    right = torch.tensor([max(0, *ends[: i + 1]) for i in range(len(ends))], dtype=torch.int32)
    assert torch.equal(ragged.padded_offsets(wrong, 300), ragged.padded_offsets(right, 300))
    assert torch.equal(ragged.pad_tokens(x, wrong), ragged.pad_tokens(x, right))


def test_any_split_fits_the_capacity() -> None:
    """The worst ones: one token in each of some groups, the rest in one, the others empty."""
    for tokens in (0, 1, 127, 128, 129, 255, 256, 300):
        for groups in (1, 2, 5):
            for full in range(min(tokens, groups) + 1):
                sizes = [1] * full + [0] * (groups - full)
                if full:
                    sizes[0] += tokens - full
                ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
                last = int(ragged.padded_offsets(ends, tokens)[-1])
                assert last <= ragged.capacity(tokens, groups)
            bare = ragged.padded_offsets(torch.zeros(groups, dtype=torch.int32), tokens, 0)
            assert not bare.any()


@pytest.mark.parametrize("a, b", [("fp32", "nvfp4"), ("fp16", "fp16"), ("mxfp8", "fp32")])
def test_fp32_operands_wait_for_a_triton_that_is_exact(monkeypatch, a: str, b: str) -> None:
    """Triton 3.6 makes TF32 of them on sm_100 (`test_triton_code` compiles them)."""

    def reason(chip: Chip, first: str, second: str) -> str | None:
        specs = (PlaneSpec.parse(first), PlaneSpec.parse(second))
        return backend._supports(OpQuery("grouped_gemm", "cuda", torch.float32, *specs, chip=chip))

    b200 = Chip.of("cuda", (10, 0))
    monkeypatch.setattr(backend, "_missing", lambda: None)
    monkeypatch.setattr(backend, "_triton_version", lambda: (3, 6))
    assert reason(b200, a, b) == (
        "FP32 operands would be cut to TF32 on sm_100 before Triton 3.9, got 3.6"
    )
    for other in (H200, Chip.of("cuda", (12, 0)), Chip.of("cuda", (8, 0))):
        assert reason(other, a, b) is None
    assert reason(b200, "bf16", "mxfp8") is None
    monkeypatch.setattr(backend, "_triton_version", lambda: (3, 10))
    assert reason(b200, a, b) is None

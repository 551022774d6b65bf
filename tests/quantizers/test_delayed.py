"""Delayed scaling: the update, what a request says, Float8Quantizer, and the operators."""

from __future__ import annotations

import copy
import enum
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridq
from hybridq.errors import PlaneError, SpecError
from hybridq.formats import PlaneSpec
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.quantizers import DelayedScalingRequest, Float8Quantizer, next_scale
from oracle.delayed import DelayedPlace
from places import PEERS

FMAX = {"e4m3": 448.0, "e5m2": 57344.0}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def codes(x: torch.Tensor, scale: torch.Tensor, element: str) -> torch.Tensor:
    """FP8 codes of x under a scale, by torch's own cast; finite x."""
    fmax = FMAX[element]
    return (x.float() * scale).clamp(-fmax, fmax).to(FLOAT8[element]).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN being any other."""
    return torch.equal(torch.nan_to_num(a, nan=-7.0), torch.nan_to_num(b, nan=-7.0))


# --- the update


def test_golden_of_the_peer() -> None:
    """Of rows with a NaN the rule differs: it is kept, and so the old scale stays."""
    with np.load(PEERS / "delayed_update.npz") as file:
        golden = {key: file[key] for key in file.files}
    dropped = 0
    for i, history in enumerate(torch.from_numpy(golden["history"])):
        numerator = torch.tensor(golden["fmax"][i] * 2.0 ** -float(golden["margin"][i]))
        old = torch.tensor(golden["old_scale"][i])
        rolled, scale = next_scale(history, old, numerator, bool(golden["most_recent"][i]))
        assert same(rolled, torch.from_numpy(golden["new_history"][i]))
        amax = history[0] if golden["most_recent"][i] else history.max()
        if amax.isnan():
            dropped += 1
            assert torch.equal(scale, old)
        else:
            assert scale.item() == golden["new_scale"][i]
    assert 0 < dropped < 9


@given(
    amaxes=st.lists(
        st.one_of(
            st.floats(0, 3.4028234663852886e38, width=32),
            st.sampled_from([0.0, 1e-45, float("inf"), float("nan"), 2.0**127]),
        ),
        min_size=1,
        max_size=12,
    ),
    length=st.integers(1, 5),
    margin=st.integers(-4, 4),
    recent=st.booleans(),
    element=st.sampled_from(list(FMAX)),
)
def test_updates_of_any_length_against_the_oracle(amaxes, length, margin, recent, element) -> None:
    request = DelayedScalingRequest(margin=margin, amax_history_len=length)
    place = DelayedPlace(FMAX[element], length, margin, recent)
    history, scale = torch.zeros(length), torch.ones(())
    numerator = torch.tensor(request.numerator(FMAX[element]))
    for amax in amaxes:
        place.see(np.array([amax], dtype=np.float32))
        place.update()
        history[0] = amax
        history, scale = next_scale(history, scale, numerator, recent)
        assert scale.item() == place.scale
        assert history[0] == 0.0 and history.shape == (length,)


def test_places_are_updated_together_as_one_by_one() -> None:
    history = torch.rand(7, 4) * 100
    history[3, 1] = float("inf")
    scale, numerator = torch.rand(7), torch.full((7,), 448.0)
    rolled, new = next_scale(history, scale, numerator)
    for i in range(7):
        one = next_scale(history[i], scale[i], numerator[i])
        assert torch.equal(rolled[i], one[0]) and torch.equal(new[i], one[1])
    assert torch.equal(new[3], scale[3])


# --- requests


class _Format(enum.Enum):
    E4M3 = 1
    HYBRID = 2


def test_requests_are_values() -> None:
    one = DelayedScalingRequest(_Format.HYBRID, 2, 16, "most_recent", False, "dp,0")
    assert one == DelayedScalingRequest("hybrid", 2, 16, "most_recent", False, "dp,0")
    assert DelayedScalingRequest.parse(one.text) == one and hash(one) == hash(copy.copy(one))
    assert [one.element(g) for g in (False, True)] == ["e4m3", "e5m2"]
    assert DelayedScalingRequest("E4M3").element(True) == "e4m3"
    plain = DelayedScalingRequest()
    assert DelayedScalingRequest.parse(plain.text) == plain
    assert (plain.margin, plain.amax_history_len, plain.amax_compute_algo) == (0, 1024, "max")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fp8_format": "E5M2"}, "fp8_format must be one of"),
        ({"margin": 0.5}, "margin must be an integer"),
        ({"margin": 101}, "from -100 to 100, got 101"),
        ({"amax_history_len": 0}, "from 1 to"),
        ({"amax_history_len": True}, "got True"),
        ({"amax_compute_algo": "mean"}, "max, most_recent, got 'mean'"),
        ({"reduce_amax": 1}, "reduce_amax must be a bool"),
        ({"amax_reduction_group": "a|b"}, "group's name"),
    ],
)
def test_requests_say_what_is_wrong(options, text) -> None:
    with pytest.raises(SpecError, match="DelayedScalingRequest: ") as error:
        DelayedScalingRequest(**options)
    assert text in str(error.value)
    if "amax_reduction_group" not in options:
        with pytest.raises(ValueError, match=next(iter(options))):
            hybridq.recipes.DelayedScaling(**options)


def test_quantizers_of_either_direction() -> None:
    request = DelayedScalingRequest(margin=1)
    mxfp8 = hybridq.MXFP8Quantizer()
    for row, col in ((request, mxfp8), (mxfp8, request), (request, request)):
        made = hybridq.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col)
        assert made.is_delayed and hybridq.Quantizer.parse(made.text) == made
        assert pickle.loads(pickle.dumps(made)) == made
        mirrored = made.mirrored()
        assert (mirrored.rowwise_delay, mirrored.columnwise_delay) == (
            made.columnwise_delay,
            made.rowwise_delay,
        )
        for is_gradient, element in ((False, "e4m3"), (True, "e5m2")):
            own = made.resolved(is_gradient)
            for spec, delay in (
                (own.rowwise, own.rowwise_delay),
                (own.columnwise, own.columnwise_delay),
            ):
                name = element if delay else "e4m3"
                assert spec.format.element.name == name
        plain = made.undelayed()
        assert not plain.is_delayed and plain(torch.ones(4, 32)).rowwise is not None
        for call, argument in (
            (made, torch.ones(4, 32)),
            (made.encode, torch.ones(4, 32)),
            (made.make_empty, (4, 32)),
        ):
            with pytest.raises(PlaneError, match="Float8Quantizer"):
                call(argument)
    assert mxfp8.resolved(True) is mxfp8 and mxfp8.undelayed() is mxfp8


def test_delays_that_do_not_fit() -> None:
    mx, request = PlaneSpec.parse("mxfp8"), DelayedScalingRequest()
    fp8 = PlaneSpec.parse("fp8")
    with pytest.raises(SpecError, match="one scale for the tensor"):
        hybridq.Quantizer(mx, mx, rowwise_delay=request)
    with pytest.raises(SpecError, match="amax_group must be None"):
        hybridq.Quantizer(fp8, fp8, amax_group="g", rowwise_delay=request)
    with pytest.raises(SpecError, match="a delay is a DelayedScalingRequest, got str"):
        hybridq.Quantizer(fp8, fp8, rowwise_delay="max")
    with pytest.raises(TypeError, match="must be a Quantizer, got str"):
        hybridq.HybridQuantizer(rowwise_quantizer="fp8", columnwise_quantizer=request)


# --- Float8Quantizer


@pytest.mark.parametrize("element", FMAX)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [3.7, 1e-3, 3.4028234663852886e38, 1.4e-36])
def test_the_given_scale_is_used_and_amax_raised(backend, dtype, element, scale) -> None:
    x = torch.randn(37, 70).to(dtype)
    own, amax = torch.tensor([scale]), torch.full((1,), 0.25)
    made = Float8Quantizer(own, amax, element)(x)
    want = codes(x, own, element)
    assert torch.equal(made.rowwise.buffers["data"], want)
    assert torch.equal(made.columnwise.buffers["data"], want.t())
    for plane in (made.rowwise, made.columnwise):
        assert plane.buffers["scale"].item() == (1.0 / own).item()
    assert amax.item() == x.abs().max().item()
    Float8Quantizer(own, amax, element)(x / 64)
    assert amax.item() == x.abs().max().item()  # raised, never lowered
    assert isinstance(made, hybridq.Float8Tensor) and made.dtype == dtype


def test_corner_cases_of_amax(backend) -> None:
    inf, nan = float("inf"), float("nan")
    for dtype in DTYPES:
        for last, want in ((0.0, 2.0), (-3.0, 3.0), (inf, inf), (-inf, inf), (nan, nan)):
            x = torch.tensor([[1.0, -2.0, last]], dtype=dtype)
            for view in (x, x.t(), x.expand(5, 3)[::2], x.flip(1)):
                amax = torch.full((1,), -1.0)
                made = Float8Quantizer(torch.ones(1), amax, "e4m3")(view)
                assert same(amax, torch.tensor([want]))
                got = made.dequantize()
                if want == inf:  # saturated under a scale that was fixed before
                    assert got.abs().max() == 448.0
                else:  # a NaN stays one, and leaves the others alone
                    assert same(got, view)
        amax = torch.full((1,), -1.0)
        Float8Quantizer(torch.ones(1), amax)(torch.empty(0, 5, dtype=dtype))
        assert amax.item() == -1.0  # nothing was seen


@pytest.mark.parametrize("usage", [(True, False), (False, True)])
def test_one_direction(usage) -> None:
    x, amax = torch.randn(6, 40), torch.zeros(1)
    q = Float8Quantizer(torch.full((1,), 9.0), amax, rowwise=usage[0], columnwise=usage[1])
    made = q(x)
    assert (made.rowwise is not None, made.columnwise is not None) == usage
    assert amax.item() == x.abs().max().item()
    other = q.with_usage(rowwise=True, columnwise=True)
    assert other.amax is amax and q.get_usages() == {"rowwise": usage[0], "columnwise": usage[1]}
    assert torch.equal(other(x).dequantize(), made.dequantize())


def test_writing_calibrating_and_gradients() -> None:
    x = torch.randn(3, 4, 40)
    amax = torch.zeros(1)
    q = Float8Quantizer(torch.full((1,), 60.0), amax, "e4m3")
    q.calibrate(x)
    assert amax.item() == x.abs().max().item()
    target = q(x)
    version = target._version
    q.quantize(x * 2, out=target)
    assert torch.equal(target.dequantize(), q(x * 2).dequantize()) and target._version > version
    assert amax.item() == 2 * x.abs().max().item()
    leaf = x.clone().requires_grad_()
    q(leaf, dtype=torch.bfloat16).float().mul(3.0).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, 3.0))
    assert torch.equal(q(q(x)).dequantize(), q(x).dequantize())
    with pytest.raises(PlaneError, match="the quantizer makes"):
        Float8Quantizer(torch.ones(1), amax, "e5m2").quantize(x, out=target)
    with pytest.raises(PlaneError, match="a part or a flat view"):
        q.quantize(x[0], out=target[0])
    with pytest.raises(ValueError, match="target's shape"):
        q.quantize(x[0], out=target)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((1.0, torch.zeros(1)), TypeError, "scale must be a tensor, got float"),
        ((torch.ones(2), torch.zeros(1)), SpecError, "scale must be float32 with one value"),
        ((torch.ones(1), torch.zeros(1).half()), SpecError, "amax must be float32"),
        ((torch.ones(1), torch.zeros(1), "e2m1"), SpecError, "must be e4m3 or e5m2"),
    ],
)
def test_float8_quantizer_says_what_is_wrong(arguments, kind, text) -> None:
    with pytest.raises(kind, match=text):
        Float8Quantizer(*arguments)


def test_float8_quantizer_and_another_device() -> None:
    q = Float8Quantizer(torch.ones(1), torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match="on one device, got cpu, cpu and meta"):
        q(torch.ones(2, 2))


def test_float8_quantizer_compiled() -> None:
    x, scale = torch.randn(5, 40), torch.full((1,), 50.0)
    eager, compiled = torch.zeros(1), torch.zeros(1)

    def run(x, amax):
        return Float8Quantizer(scale, amax, "e4m3")(x).dequantize()

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x, compiled)
    assert torch.equal(got, run(x, eager)) and torch.equal(eager, compiled)


# --- the operators


def test_operators_pass_opcheck() -> None:
    x = torch.randn(5, 40)
    fp8, mx = str(PlaneSpec.parse("fp8")), str(PlaneSpec.parse("mxfp8"))
    stat = torch.tensor([-2.0])
    for row, col in ((fp8, fp8), (fp8, ""), ("", fp8), (fp8, mx)):
        args = (x, row, col, stat if row else None, stat if col == fp8 else None)
        torch.library.opcheck(torch.ops.hybridq.encode_with_amax, args)
    torch.library.opcheck(torch.ops.hybridq.record_amax, (torch.zeros(4), 2, torch.ones(1)))
    with pytest.raises(ValueError, match="n > at, got"):
        torch.ops.hybridq.record_amax(torch.zeros(4), 4, torch.ones(1))
    with pytest.raises(ValueError, match="found must be float32"):
        torch.ops.hybridq.record_amax(torch.zeros(4), 0, torch.ones(2))
    with pytest.raises(ValueError, match="must be float32 with one value, got"):
        torch.ops.hybridq.encode_with_amax(x, fp8, "", stat.double())
    with pytest.raises(ValueError, match="must be float32 with one value, got"):
        torch.ops.hybridq.encode_with_amax(x, fp8, "", torch.ones(2))
    with pytest.raises(RuntimeError, match="has no derivative"):
        made = torch.ops.hybridq.encode_with_amax(x.requires_grad_(), fp8, "", stat)
        made[-1].sum().backward()


PAIRS = [
    ("fp8", "fp8"),
    ("fp8", ""),
    ("", "fp8"),
    ("fp8", "mxfp8"),
    ("mxfp8", "fp8"),
    ("nvfp4", "fp8"),
    ("fp8", "nvfp4"),
    ("fp8", "identity"),
    ("fp8", "fp8_e5m2"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_pass_gives_the_bits_of_two(backend, pair, dtype) -> None:
    """Buffers of `encode`, and beside them the amax that torch finds."""
    row, col = (str(PlaneSpec.parse(name).resolve(dtype)) if name else "" for name in pair)
    stats = [torch.tensor([-5.5]) if name.startswith("fp8") else None for name in pair]
    for rows, cols in ((1, 1), (130, 257), (70, 3), (0, 4), (4, 0)):
        base = torch.randn(rows, cols, dtype=dtype)
        if base.numel():
            base.view(-1)[-1] = -77.0  # in the last tile
        for x in (base, base.t().contiguous().t(), base.repeat(1, 2)[:, ::2]):
            *buffers, found = torch.ops.hybridq.encode_with_amax(x, row, col, *stats)
            want = torch.ops.hybridq.encode(x, row, col, *stats)
            assert len(buffers) == len(want) and all(map(torch.equal, buffers, want))
            assert found.item() == (x.abs().max().item() if x.numel() else -1.0)  # nothing seen


@pytest.mark.skipif(backend_cpu.core is None, reason="the compiled core is missing")
@pytest.mark.parametrize("threads", [1, 3])
def test_every_variant_and_number_of_threads(threads) -> None:
    core = backend_cpu.core
    before, count = core.variant(), torch.get_num_threads()
    fp8, x = str(PlaneSpec.parse("fp8")), torch.randn(300, 700)
    x[299, 699] = 50.0
    seen = []
    try:
        torch.set_num_threads(threads)
        for name in core.build_info()["tables"]:
            core.set_variant(name)
            seen.append(
                torch.ops.hybridq.encode_with_amax(x, fp8, fp8, *[torch.tensor([-3.0])] * 2)
            )
    finally:
        core.set_variant(before)
        torch.set_num_threads(count)
    assert seen[0][-1].item() == 50.0
    for made in seen[1:]:
        assert all(map(torch.equal, made, seen[0]))


def test_registered_algorithms_give_the_scale() -> None:
    def halved(history, scale, numerator):
        return numerator / history.amax(-1) / 2.0

    quantizers = hybridq.quantizers
    quantizers.register_scaling_algorithm("halved", halved)
    quantizers.register_scaling_algorithm("halved", halved)  # the same one again
    request = hybridq.DelayedScalingRequest(amax_compute_algo="halved")
    assert hybridq.DelayedScalingRequest.parse(request.text) == request
    history, scale = torch.tensor([[7.0, 3.5, 1.0]]), torch.ones(1)
    rolled, new = quantizers.next_scale(history, scale, torch.tensor([448.0]), algorithm="halved")
    assert rolled.tolist() == [[0.0, 1.0, 7.0]] and new.tolist() == [32.0]
    with pytest.raises(ValueError, match="registered once"):
        quantizers.register_scaling_algorithm("max", halved)
    with pytest.raises(ValueError, match="identifier, got 'a,b'"):
        quantizers.register_scaling_algorithm("a,b", halved)
    with pytest.raises(TypeError, match="must be callable, got int"):
        quantizers.register_scaling_algorithm("three", 3)

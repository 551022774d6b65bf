"""Quantizers: frozen values, Transformer Engine's constructors, groups, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch

import hybridq
from hybridq import PlaneError, Quantizer, SpecError
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec
from rank_runs import needs_gloo, run

CONSTRUCTORS = {
    "current": hybridq.Float8CurrentScalingQuantizer,
    "block": hybridq.Float8BlockQuantizer,
    "mx": hybridq.MXFP8Quantizer,
    "nv": hybridq.NVFP4Quantizer,
    "identity": hybridq.IdentityQuantizer,
}


def test_quantizers_are_values() -> None:
    for make in CONSTRUCTORS.values():
        q = make()
        assert q == make() and hash(q) == hash(make())
        assert pickle.loads(pickle.dumps(q)) == q and Quantizer.parse(q.text) == q
        with pytest.raises(FrozenInstanceError):
            q.rowwise_usage = False
        with pytest.raises(TypeError, match="with_usage"):
            q.set_usage(columnwise=False)
        assert q.with_usage(columnwise=False).get_usages() == {"rowwise": True, "columnwise": False}
        assert q.with_usage(columnwise=False).text != q.text
        for value in (q, *(spec for spec in (q.rowwise, q.columnwise) if spec is not None)):
            # The text that each keeps is no field: not shown, not compared, and made again.
            assert all(not field.name.startswith("_") for field in fields(value))
            assert "_text" not in repr(value)
            for again in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), replace(value)):
                assert again == value and hash(again) == hash(value) and again.text == value.text


def test_constructors_mean_what_the_peer_means() -> None:
    spec = PlaneSpec.parse
    q = hybridq.Float8CurrentScalingQuantizer(torch.float8_e5m2)
    assert q.rowwise == q.columnwise == spec("fp8_e5m2")
    q = hybridq.Float8CurrentScalingQuantizer(force_pow_2_scales=True, amax_epsilon=1e-4)
    assert (q.rowwise.format.power_of_two, q.rowwise.format.eps) == (True, 1e-4)
    assert hybridq.Float8BlockQuantizer("e4m3").rowwise == spec("fp8_128x128")
    assert hybridq.Float8BlockQuantizer("e5m2", block_scaling_dim=1).columnwise == spec(
        "fp8_1x128_e5m2"
    )
    assert not hybridq.Float8BlockQuantizer(force_pow_2_scales=False).rowwise.format.power_of_two
    assert hybridq.MXFP8Quantizer("e5m2", with_2d_quantization=True).rowwise == spec(
        "mxfp8_e5m2_32x32"
    )
    q = hybridq.NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    assert q.rowwise == PlaneSpec(spec("nvfp4").format, True)
    assert q.columnwise == PlaneSpec(spec("nvfp4").format, True, DEFAULT_SIGNS)
    assert hybridq.NVFP4Quantizer(with_rht=True, with_random_sign_mask=False).columnwise.signs == 0
    assert hybridq.NVFP4Quantizer(with_2d_quantization=True).rowwise == spec("nvfp4_16x16")
    assert hybridq.IdentityQuantizer(dtype=torch.bfloat16).rowwise == spec("bf16")


def test_nvfp4_options_mean_what_the_peer_means() -> None:
    fmt = PlaneSpec.parse("nvfp4").format
    make = hybridq.NVFP4Quantizer
    q = make(nvfp4_use_4over6=True)  # Transformer Engine keeps 448 unless told otherwise
    assert q.rowwise == q.columnwise == PlaneSpec(fmt, four_over_six="mae")
    q = make(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="mse")
    assert q.rowwise == PlaneSpec(fmt, tensor_bound=256.0, four_over_six="mse")
    q = make(row_scaled_nvfp4=True, with_rht=True, stochastic_rounding=True)
    assert q.rowwise == PlaneSpec(fmt, True, row_scaled=True)
    assert q.columnwise == PlaneSpec(fmt, True, DEFAULT_SIGNS, row_scaled=True)
    square = make(with_2d_quantization=True, nvfp4_use_4over6=True).rowwise
    assert square.is_derivable and square.four_over_six == "mae"
    # In Transformer Engine's order these are positional, too.
    assert make("e2m1", True, True, False, None, False, True, False, False, True) == make(
        row_scaled_nvfp4=True
    )


def test_options_of_quantize() -> None:
    x = torch.randn(6, 40)
    q = hybridq.quantizer("nvfp4", four_over_six="mse", row_scaled=True)
    fmt = PlaneSpec.parse("nvfp4").format
    assert q.rowwise == q.columnwise == PlaneSpec(fmt, False, None, 256.0, "mse", True)
    assert Quantizer.parse(q.text) == q and pickle.loads(pickle.dumps(q)) == q
    t = q(x)
    assert t.rowwise.amax.shape == (6,) and t.columnwise.amax.shape == (40,)
    assert torch.equal(t.rowwise.amax, x.abs().amax(1))
    assert torch.equal(t.columnwise.amax, x.abs().amax(0))
    rules = {
        rule: hybridq.quantize(x, "mxfp8", "identity", scale_rule=rule).rowwise.spec.format.rule
        for rule in ("rceil", "floor", "ceil", "even")
    }
    assert rules == {rule: rule for rule in rules}
    kept = hybridq.quantize(x, "nvfp4", PlaneSpec(fmt), row_scaled=True)
    assert not kept.columnwise.spec.row_scaled  # a PlaneSpec is taken as it is


def test_four_over_six_is_never_worse_than_its_six() -> None:
    """Each block has the smaller error of both candidates, so the sum of errors is smaller too."""
    x = torch.randn(64, 256)
    fmt = PlaneSpec.parse("nvfp4").format
    for bound in (256.0, 448.0):
        six = hybridq.quantize(x, PlaneSpec(fmt, tensor_bound=bound), None).dequantize() - x
        for error, norm in (("mae", 1), ("mse", 2)):
            spec = PlaneSpec(fmt, tensor_bound=bound, four_over_six=error)
            both = hybridq.quantize(x, spec, None).dequantize() - x
            assert both.norm(norm) < 0.99 * six.norm(norm)


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_hybrid_planes_are_those_of_the_uniform_tensors(source: str) -> None:
    x = torch.randn(40, 70, dtype=torch.bfloat16)
    row, col = hybridq.MXFP8Quantizer(), hybridq.NVFP4Quantizer(with_rht=True)
    q = hybridq.HybridQuantizer(
        rowwise_quantizer=row, columnwise_quantizer=col, columnwise_source=source
    )
    t = q(x)
    seen = x if source == "original" else row(x).dequantize()
    for got, want in ((t.rowwise, row(x).rowwise), (t.columnwise, col(seen).columnwise)):
        for name, buffer in want.buffers.items():
            assert torch.equal(got.buffers[name], buffer)
    # One direction alone is the same direction of the pair, also without the plane it is made of.
    lone = q.with_usage(rowwise=False)(x)
    assert lone.rowwise is None and torch.equal(lone.columnwise.data, t.columnwise.data)


def test_hybrid_of_an_identity() -> None:
    x = torch.randn(8, 40)
    q = hybridq.HybridQuantizer(
        rowwise_quantizer=hybridq.NVFP4Quantizer(),
        columnwise_quantizer=hybridq.IdentityQuantizer(),
        columnwise_source="rowwise_dequantized",
    )
    t = q(x)
    assert torch.equal(t.columnwise.dequantize(), t.rowwise.dequantize())
    q = hybridq.HybridQuantizer(
        rowwise_quantizer=hybridq.IdentityQuantizer(dtype=torch.bfloat16),
        columnwise_quantizer=hybridq.MXFP8Quantizer(),
        columnwise_source="rowwise_dequantized",
    )
    rounded = x.to(torch.bfloat16).to(torch.float32)
    want = hybridq.MXFP8Quantizer()(rounded).columnwise.data
    assert torch.equal(q(x).columnwise.data, want)


def test_stochastic_rounding_follows_torchs_generator_or_the_seed() -> None:
    x = torch.randn(32, 64)
    q = hybridq.NVFP4Quantizer(stochastic_rounding=True)
    torch.manual_seed(1)
    first = q(x)
    second = q(x)
    torch.manual_seed(1)
    again = q(x)
    assert torch.equal(first.rowwise.data, again.rowwise.data)
    assert not torch.equal(first.rowwise.data, second.rowwise.data)
    seed = torch.tensor([-5])
    assert torch.equal(q(x, seed=seed).columnwise.data, q(x, seed=seed).columnwise.data)
    state = torch.random.get_rng_state()
    hybridq.NVFP4Quantizer()(x)
    assert torch.equal(state, torch.random.get_rng_state()), "nothing stochastic draws nothing"


def test_stochastic_rounding_is_unbiased() -> None:
    """256 seeds: the mean of n draws of variance at most gap^2/4 lies within 5 sigma."""
    x = torch.linspace(-1.0, 1.0, 160).reshape(10, 16)
    q = hybridq.quantizer("nvfp4", columnwise=False, stochastic=True)
    draws = torch.stack([q(x, seed=torch.tensor([s])).dequantize() for s in range(256)]).to(
        torch.float64
    )
    scale = x.abs().amax(dim=1, keepdim=True) / 6.0 * 1.1  # E4M3 block scale, rounded
    sigma = scale * 2.0 / 2.0 / 256**0.5  # the widest gap is 2 codes' units (4 to 6)
    inside = x.abs() < scale * 5.4  # beyond it a block's maximum saturates
    assert ((draws.mean(0) - x).abs() <= 5 * sigma + scale / 256)[inside].all()


def test_quantize_function_takes_names_records_and_options() -> None:
    x = torch.randn(5, 40)
    assert hybridq.quantize(x, "mxfp8").columnwise is not None
    assert hybridq.quantize(x, "mxfp8", columnwise=False).columnwise is None
    assert hybridq.quantize(x, None, "nvfp4").rowwise is None
    fmt = hybridq.formats.format("fp8_1x128")
    t = hybridq.quantize(x, fmt, columnwise=PlaneSpec(fmt, True), seed=torch.tensor([3]))
    assert t.columnwise.spec.stochastic and not t.rowwise.spec.stochastic
    t = hybridq.quantize(x, "fp8", power_of_two=True, eps=0.5)
    assert (t.rowwise.spec.format.power_of_two, t.rowwise.spec.format.eps) == (True, 0.5)
    nested = hybridq.quantize(t, "mxfp8")
    assert torch.equal(nested.dequantize(), hybridq.quantize(t.dequantize(), "mxfp8").dequantize())


def test_out_and_make_empty() -> None:
    q = hybridq.quantizer("mxfp8", columnwise="nvfp4")
    empty = q.make_empty((6, 40), dtype=torch.bfloat16)
    assert empty.dtype == torch.bfloat16 and not empty.dequantize().any()
    x = torch.randn(6, 40)
    assert q.quantize(x, out=empty) is empty
    assert torch.equal(empty.columnwise.data, q(x).columnwise.data)
    with pytest.raises(ValueError, match="target's shape"):
        q.update_quantized(torch.randn(6, 41), empty)
    with pytest.raises(PlaneError, match="the quantizer makes"):
        hybridq.quantizer("nvfp4").update_quantized(x, empty)


BAD_TENSORS = {
    "integers": (lambda: torch.ones(2, 4, dtype=torch.int32), "dtype must be"),
    "double": (lambda: torch.ones(2, 4, dtype=torch.float64), "dtype must be"),
    "bool": (lambda: torch.ones(2, 4, dtype=torch.bool), "dtype must be"),
    "complex": (lambda: torch.ones(2, 4, dtype=torch.complex64), "dtype must be"),
    "float8": (lambda: torch.ones(2, 4).to(torch.float8_e4m3fn), "dtype must be"),
    "sparse": (lambda: torch.ones(2, 4).to_sparse(), "layout must be strided"),
    "csr": (lambda: torch.ones(2, 4).to_sparse_csr(), "layout must be strided"),
    "list": (lambda: [1.0, 2.0], "must be a torch.Tensor"),
    "none": (lambda: None, "must be a torch.Tensor"),
}


@pytest.mark.parametrize("kind", sorted(BAD_TENSORS))
def test_tensors_that_cannot_be_quantized_say_why(kind: str) -> None:
    make, message = BAD_TENSORS[kind]
    with pytest.raises(TypeError, match=message):
        hybridq.quantize(make(), "mxfp8")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128", "fp8_e4m3"])
def test_odd_memory_gives_the_bytes_of_a_contiguous_copy(name: str) -> None:
    base = torch.randn(40, 66)
    for x in (
        base.t(),
        base[:, ::2],
        base[3:, 5:],
        base[:1].expand(9, 66),
        base[:, :1].expand(40, 33),
        base.flip(0),
        torch.randn(4, 5, 6).permute(2, 0, 1),
        base.unfold(1, 8, 3),
    ):
        got, want = hybridq.quantize(x, name), hybridq.quantize(x.contiguous(), name)
        assert torch.equal(got.rowwise.data, want.rowwise.data)
        assert torch.equal(got.columnwise.data, want.columnwise.data)


def test_meta_tensors_give_meta_planes() -> None:
    t = hybridq.quantize(torch.empty(6, 40, device="meta"), "mxfp8", columnwise="nvfp4")
    assert t.device.type == "meta" and t.rowwise.scale.shape == (6, 2)
    assert t.columnwise.data.shape == (40, 3) and t.dequantize().shape == (6, 40)


def test_nan_and_inf_stay_visible() -> None:
    x = torch.randn(4, 64)
    x[1, 5], x[2, 40] = float("nan"), float("inf")
    t = hybridq.quantize(x, "mxfp8", columnwise=False).dequantize()
    assert t[1, :32].isnan().all() and t[1, 32:].isfinite().all() and t[0].isfinite().all()
    assert t[2, 40] >= 3.3e38 and hybridq.quantize(x, "nvfp4").dequantize().isnan().all()


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: hybridq.quantize(torch.ones(2, 4), "mxfp9"), "must be one of .*mxfp8.*'mxfp9'"),
        (lambda: hybridq.quantize(torch.ones(2, 4), 8), "must be a name or a Format, got int"),
        (lambda: hybridq.quantize(torch.ones(2, 4), None), "columnwise=True means as rowwise"),
        (lambda: hybridq.quantize(torch.ones(2, 4), None, None), "at least one direction"),
        (lambda: hybridq.quantize(torch.ones(2, 4), "mxfp8", eps=0.1), "belong to rule amax"),
        (lambda: hybridq.quantizer("nvfp4_16x16", hadamard=True), "a transform goes with 1xN"),
        (lambda: hybridq.quantizer("mxfp8", four_over_six="mae"), "goes with rule two_level"),
        (lambda: hybridq.quantizer("nvfp4", four_over_six="max"), "must be mae or mse"),
        (
            lambda: hybridq.quantizer("nvfp4", four_over_six="mae", stochastic=True),
            "neither with stochastic rounding nor with a transform",
        ),
        (
            lambda: hybridq.quantizer("nvfp4", four_over_six="mae", hadamard=True),
            "neither with stochastic rounding nor with a transform",
        ),
        (lambda: hybridq.quantizer("nvfp4_16x16", row_scaled=True), "1xN blocks"),
        (lambda: hybridq.quantizer("fp8", row_scaled=True), "row_scaled goes with rule two_level"),
        (lambda: hybridq.quantizer("nvfp4", scale_rule="floor"), "makes e8m0 scales, got e4m3"),
        (lambda: hybridq.quantizer("mxfp8", scale_rule="up"), "rule must be one of"),
        (lambda: hybridq.quantizer("bf16", scale_rule="floor"), "got .*floor.* and none"),
        (lambda: PlaneSpec.parse("nvfp4;4o6=mean"), "must be mae or mse"),
        (lambda: hybridq.NVFP4Quantizer(nvfp4_e4m3_max=256), "belong to nvfp4_use_4over6"),
        (lambda: hybridq.NVFP4Quantizer(nvfp4_4over6_err_mode="MSE"), "belong to nvfp4_use_4over6"),
        (lambda: hybridq.NVFP4Quantizer(nvfp4_e4m3_max=300), "must be 448 or 256"),
        (
            lambda: hybridq.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="L2"),
            "must be MAE or MSE",
        ),
        (
            lambda: hybridq.NVFP4Quantizer(nvfp4_use_4over6=True, with_rht=True),
            "neither with stochastic rounding nor with a transform",
        ),
        (
            lambda: hybridq.NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True),
            "1xN blocks",
        ),
        (
            lambda: hybridq.NVFP4Quantizer(
                row_scaled_nvfp4=True, with_amax_reduction=True, amax_reduction_group="0"
            ),
            "with_amax_reduction must be False",
        ),
        (
            lambda: Quantizer(PlaneSpec.parse("nvfp4;rows"), None, amax_group="0"),
            "not reduced over a group",
        ),
        (lambda: hybridq.MXFP8Quantizer("e2m1"), "must be e4m3 or e5m2"),
        (lambda: hybridq.MXFP8Quantizer(torch.int8), "must be one of"),
        (lambda: hybridq.Float8BlockQuantizer(block_scaling_dim=3), "must be 1 or 2"),
        (lambda: hybridq.quantizer("mxfp8", columnwise_source="x"), "columnwise_source must be"),
        (lambda: hybridq.Float8CurrentScalingQuantizer(amax_epsilon=-1.0), "eps must be finite"),
        (
            lambda: hybridq.Float8CurrentScalingQuantizer(with_amax_reduction=True),
            "needs amax_reduction_group",
        ),
    ],
)
def test_bad_options_say_why(call, message: str) -> None:
    with pytest.raises((SpecError, ValueError), match=message):
        call()


def test_hybrid_refuses_what_is_no_quantizer() -> None:
    with pytest.raises(TypeError, match="columnwise_quantizer must be a Quantizer, got str"):
        hybridq.HybridQuantizer(
            rowwise_quantizer=hybridq.MXFP8Quantizer(), columnwise_quantizer="nvfp4"
        )
    with pytest.raises(PlaneError, match="both usages are off"):
        hybridq.MXFP8Quantizer().with_usage(rowwise=False, columnwise=False)(torch.ones(2, 2))


def test_the_forced_backend_wins_or_says_why_not(chooses_anew, caplog) -> None:
    with hybridq.backend("nosuch"), pytest.raises(hybridq.BackendError, match="must be one of"):
        hybridq.quantize(torch.ones(2, 32), "mxfp8")
    odd = hybridq.Format(
        hybridq.formats.element("e4m3"), (1, 48), hybridq.formats.element("e8m0"), "rceil", "mine"
    )
    x = torch.randn(4, 96)
    if hybridq.explain("encode", PlaneSpec(odd)).chosen == "reference":
        with hybridq.backend("cpu"), pytest.raises(hybridq.BackendError, match="cannot"):
            hybridq.quantize(x, odd)
        caplog.clear()
        for _ in range(2):
            hybridq.quantize(x, odd)
        (said,) = caplog.messages
        assert "slow PyTorch reference" in said
    assert (hybridq.quantize(x, odd).dequantize() - x).abs().max() < 0.2


@needs_gloo
def test_amax_over_a_process_group(tmp_path) -> None:
    """Two ranks, one half of the rows each: the codes are those of the whole."""
    run(2, tmp_path / "store", "reduced", program="amax_program.py")


def test_a_group_without_torch_distributed_says_so() -> None:
    q = hybridq.Float8CurrentScalingQuantizer(with_amax_reduction=True, amax_reduction_group="0")
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        q(torch.ones(2, 4))


def test_update_quantized_of_a_part_or_a_flat_view_writes_the_whole() -> None:
    t = hybridq.quantize(torch.randn(8, 32), "fp8_e4m3")
    want = t.dequantize()
    want[2:4] = 100.0
    part = t[2:4]
    part.own_quantizer.update_quantized(torch.full((2, 32), 100.0), part)
    assert torch.equal(t.dequantize(), t.quantizer(want).dequantize())
    flat = t.view(-1)
    flat.own_quantizer.update_quantized(torch.ones(256), flat)
    assert (t.dequantize() == 1.0).all()


def test_an_update_that_is_refused_changes_neither_plane() -> None:
    t = hybridq.quantize(torch.randn(32, 64), "mxfp8", "nvfp4")
    before = [buffer.clone() for plane in t.tensor_storage.planes for buffer in plane.tensors]
    other = hybridq.quantizer("mxfp8", "mxfp8")  # the same rowwise plane, another columnwise one
    with pytest.raises(PlaneError, match="update_quantized: the target's columnwise plane"):
        other.update_quantized(torch.randn(32, 64), t)
    after = [buffer for plane in t.tensor_storage.planes for buffer in plane.tensors]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_wrong_kinds_of_arguments_are_named() -> None:
    q, x = hybridq.quantizer("mxfp8"), torch.zeros(2, 32)
    for call, text in (
        (lambda: q.quantize(x, out=x), "update_quantized: target must be a QuantizedTensor"),
        (lambda: q.quantize(x, dtype=torch.int32), "quantize: dtype must be float32"),
        (lambda: q.make_empty((2, 32), dtype=torch.float64), "make_empty: dtype must be float32"),
        (lambda: hybridq.NVFP4Quantizer(with_rht="no"), "NVFP4Quantizer: with_rht must be a bool"),
        (lambda: hybridq.MXFP8Quantizer(with_2d_quantization="no"), "_quantization must be a bool"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
    for shape in (5, (2, -1), (2.0, 3.0), None):
        with pytest.raises(ValueError, match="make_empty: shape must hold sizes"):
            q.make_empty(shape)
    for parse in (hybridq.PlaneSpec.parse, hybridq.Format.parse, type(q).parse):
        for wrong in (None, 5, b"mxfp8", ["mxfp8"]):
            with pytest.raises(hybridq.SpecError, match="parse: takes a text"):
                parse(wrong)


@pytest.mark.parametrize("formats", [("identity", True), ("mxfp8", "identity"), ("identity", None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_open_identity_plane_is_written_in_its_own_dtype(formats, dtype) -> None:
    t = hybridq.quantize(torch.randn(4, 64), *formats)
    t = t.to(dtype)
    specs = [plane.spec for plane in t.tensor_storage.planes]
    t.fill_(2.0)
    assert torch.equal(t.dequantize(), torch.full((4, 64), 2.0, dtype=dtype))
    t.copy_(torch.full((4, 64), 3.0, dtype=torch.bfloat16))
    for plane in t.tensor_storage.planes:
        assert torch.equal(plane.dequantize(), torch.full((4, 64), 3.0))
    assert [plane.spec for plane in t.tensor_storage.planes] == specs


@pytest.mark.parametrize(
    "make",
    [
        lambda: hybridq.quantizer("fp8_e4m3", eps=True),
        lambda: hybridq.quantizer("mxfp8", stochastic=3.5),
        lambda: hybridq.quantizer("nvfp4", row_scaled="rows"),
        lambda: PlaneSpec(hybridq.formats.format("nvfp4"), signs=3.0),
        lambda: PlaneSpec("nvfp4"),
        lambda: hybridq.MXFP8Quantizer(rowwise=-1),
        lambda: hybridq.quantizer("mxfp8").with_usage(columnwise=2),
        lambda: Quantizer(PlaneSpec.parse("fp8_e4m3"), None, amax_group=5),
    ],
)
def test_a_field_that_its_text_could_not_hold_is_refused(make) -> None:
    with pytest.raises(SpecError):
        make()


def test_equal_quantizers_have_one_text_whatever_kind_of_number_eps_is() -> None:
    made = {hybridq.quantizer("fp8_e4m3", eps=eps) for eps in (1, 1.0, np.float64(1.0))}
    assert len(made) == 1
    assert pickle.loads(pickle.dumps(made.copy().pop())) in made


@pytest.mark.parametrize(
    "text", ["nvfp4;rows", "nvfp4;rht", "mxfp8;sr", "e4m3/1x65536/fp32/amax/float8_block"]
)
def test_a_string_of_a_spec_is_that_spec(text: str) -> None:
    """As recipes take it."""
    spec = PlaneSpec.parse(text)
    x = torch.randn(48, 96)
    seed = torch.tensor(5) if spec.stochastic else None
    made, wanted = (hybridq.quantize(x, one, seed=seed) for one in (text, spec))
    for one, other in ((made.rowwise, wanted.rowwise), (made.columnwise, wanted.columnwise)):
        assert one.spec == other.spec == spec
        assert all(map(torch.equal, one.buffers.values(), other.buffers.values()))
    mixed = hybridq.quantizer("mxfp8", text, stochastic=not spec.stochastic)
    assert mixed.rowwise.stochastic != spec.stochastic and mixed.columnwise == spec
    with pytest.raises(SpecError, match="unknown option 'zz'"):
        hybridq.quantize(x, text + ";zz")
    with pytest.raises(SpecError, match="an option needs a plane described by"):
        hybridq.quantize(x, text, row_scaled=True)

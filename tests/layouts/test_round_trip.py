"""Each layout holds planes and gives them back: the same codes, the same values."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import layouts
from hybridq.errors import CheckpointError, SpecError
from hybridq.formats import PlaneSpec
from layout_cases import plane_of, same_bytes, shape_for, values


def weight_of(layout, spec, planes):
    name = "model.layers.0.mlp.up_proj.weight" if layout.holds_matrices else "mlp.experts.up_proj"
    own = shape_for(layout)
    shape = own if layout.holds_matrices else (len(planes), *own)
    return layout.stored(name, planes[0].spec, shape)


def planes_for(layout, spec):
    shape = shape_for(layout)
    return [plane_of(spec, values(shape)) for _ in range(1 if layout.holds_matrices else 3)]


def test_planes_come_back(case) -> None:
    layout, scheme, spec = case
    planes = planes_for(layout, spec)
    weight = weight_of(layout, spec, planes)
    assert weight.scheme.name == scheme
    tensors = weight.encode(planes)
    held = {name: one for name, one in tensors.items() if name not in weight.marks()}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in held.items()} == {
        one.name: (one.dtype, one.shape) for one in weight.tensors
    }, "a header planned from shapes is the header"
    again = weight.decode(tensors)
    for plane, other in zip(planes, again, strict=True):
        assert torch.equal(plane.data, other.data)
        assert plane.dequantize().count_nonzero() > 1000
        assert_decodes_alike(layout, plane, other)
    # What was read is written again byte for byte.
    for name, tensor in weight.encode(again).items():
        assert same_bytes(tensor, tensors[name]), name


def assert_decodes_alike(layout, plane, other) -> None:
    """Bit for bit; a reciprocal does not say the last bit of the factor."""
    own, new = plane.dequantize(), other.dequantize()
    if layout.name == "compressed-tensors" and plane.spec.format.rule == "two_level":
        # Two amaxes with one FP32 reciprocal are at most two ulp apart, and so are the products.
        assert torch.allclose(own, new, rtol=2.0**-21, atol=0.0)
        assert torch.equal(own == 0.0, new == 0.0)
    else:
        assert torch.equal(own, new)


def test_header_alone_says_what_a_checkpoint_holds(case) -> None:
    layout, scheme, spec = case
    planes = planes_for(layout, spec)
    weight = weight_of(layout, spec, planes)
    tensors = weight.encode(planes) | {"model.norm.weight": torch.ones(8)}
    entries = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    found = layout.find(entries)
    assert list(found) == [weight.name]
    assert found[weight.name].shape == weight.shape
    if scheme == found[weight.name].scheme.name:
        assert found[weight.name].tensors == weight.tensors
    for plane, other in zip(planes, found[weight.name].decode(tensors), strict=True):
        assert_decodes_alike(layout, plane, other)


def test_tiles_of_rows_are_written_at_their_places(case) -> None:
    """All but the second-level scale are bytes, which tiles have at the same places."""
    layout, _, spec = case
    [plane, *_] = planes = planes_for(layout, spec)
    scheme = weight_of(layout, spec, planes).scheme
    whole = scheme.as_stored(plane)
    upper, lower = plane.part(0, 0, 128), plane.part(0, 128, plane.rows)
    assert upper is not None and lower is not None
    for part in scheme.parts:
        if not part.value.is_bytes or not whole.spread(0)[part.buffer]:
            continue
        pieces = [
            part.write(scheme.as_stored(one).buffers[part.buffer], one.spec)
            for one in (upper, lower)
        ]
        expected = part.write(whole.buffers[part.buffer], whole.spec)
        assert same_bytes(torch.cat(pieces), expected)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("bound", [448, 256])
def test_second_level_scales_round_trip(layout, bound) -> None:
    """Any amax: ModelOpt's factor comes back exactly, whichever amax gives it."""
    one = layouts.get(layout)
    x = values((16, 32))
    plane = plane_of("nvfp4", x)
    spec = PlaneSpec.parse("nvfp4" if bound == 448 else "nvfp4;bound=256")
    weight = one.stored("up.weight", spec, (16, 32))
    for amax in torch.exp(torch.empty(200).uniform_(-30, 30)).float():
        own = hybridq.Plane(spec, "rowwise", 16, 32, {**plane.buffers, "amax": amax.reshape(1)})
        tensors = weight.encode([own])
        [again] = weight.decode(tensors)
        wanted = amax / torch.tensor(bound * 6.0)
        factor = again.buffers["amax"] / torch.full((1,), again.spec.tensor_bound * 6.0)
        if layout == "modelopt":
            assert torch.equal(factor, wanted.reshape(1))
        else:
            assert torch.equal(
                weight.encode([again])["up.weight_global_scale"], tensors["up.weight_global_scale"]
            )
            assert abs(factor.double() / wanted.double() - 1.0) <= 2.0**-22


def test_a_factor_that_no_amax_gives_is_named() -> None:
    one = layouts.get("modelopt")
    plane = plane_of("nvfp4", values((16, 32)))
    weight = one.stored("up.weight", plane.spec, (16, 32))
    tensors = weight.encode([plane])
    seen = 0
    for mantissa in torch.linspace(1.0, 2.0, 101)[:-1]:
        tensors["up.weight_scale_2"] = mantissa.clone()
        with pytest.warns(hybridq.HybridQWarning) as found:
            [again] = weight.decode(tensors)
            hybridq.errors.warnings.warn("end", hybridq.HybridQWarning, stacklevel=1)
        factor = again.buffers["amax"] / torch.full((1,), again.spec.tensor_bound * 6.0)
        if len(found) > 1:
            seen += 1
            assert "'up.weight_scale_2'" in str(found[0].message)
            assert abs(factor.double() / mantissa.double() - 1.0) <= 2.0**-23
        else:
            assert torch.equal(factor, mantissa.reshape(1))
    assert 0 < seen < 30


def test_zero_weights_have_a_scale_that_can_be_divided_by() -> None:
    plane = plane_of("nvfp4", torch.zeros(16, 32))
    for name, own in (
        ("modelopt", "up.weight_scale_2"),
        ("compressed-tensors", "up.weight_global_scale"),
    ):
        weight = layouts.get(name).stored("up.weight", plane.spec, (16, 32))
        tensors = weight.encode([plane])
        assert tensors[own].item() == 1.0
        assert torch.equal(weight.decode(tensors)[0].dequantize(), torch.zeros(16, 32))


def test_a_reciprocal_that_overflows_is_refused() -> None:
    plane = plane_of("nvfp4", torch.full((16, 32), 1e-37))
    weight = layouts.get("compressed-tensors").stored("up.weight", plane.spec, (16, 32))
    with pytest.raises(CheckpointError, match=r"'up.weight_global_scale': .* needs an amax of at"):
        weight.encode([plane])


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("modelopt", "nvfp4;rows", "one second-level scale per tensor, not one per row"),
        ("modelopt", "nvfp4;rht", "no reader undoes the random Hadamard transform"),
        ("compressed-tensors", "mxfp8_e5m2", "holds e4m3 with scales in e8m0"),
        ("compressed-tensors", "fp8_1x128", "fp8_block has blocks 128x128"),
        ("fine-grained-fp8", "nvfp4", "fp8_block holds e4m3 with scales in fp32"),
        ("auto-fp8", "fp8_128x128", "fp8_tensor has one scale per tensor"),
        ("quark", "mxfp8", "holds e2m1 with scales in e8m0"),
        ("gpt-oss-mxfp4", "mxfp4", "it holds stacks of experts only"),
        ("modelopt", "bf16", "holds e2m1"),
    ],
)
def test_what_cannot_be_held_has_a_reason(name, spec, reason) -> None:
    with pytest.raises(SpecError, match=f"{name} cannot hold .*{reason}"):
        layouts.get(name).stored("up.weight", PlaneSpec.parse(spec), (256, 512))


@pytest.mark.parametrize("spec", ["nvfp4", "mxfp8", "mxfp4", "fp8_128x128"])
def test_columns_that_blocks_do_not_divide_are_refused(spec) -> None:
    one = layouts.get("compressed-tensors")
    with pytest.raises(SpecError, match="need columns in multiples of"):
        one.stored("up.weight", PlaneSpec.parse(spec), (256, 264))


def test_columnwise_planes_are_hybridqs_alone() -> None:
    spec = PlaneSpec.parse("mxfp8")
    with pytest.raises(SpecError, match="modelopt holds rowwise planes"):
        layouts.get("modelopt").stored("up.weight", spec, (64, 64), "columnwise")


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(SpecError, match="did you mean 'modelopt'"):
        layouts.get("model_opt")
    with pytest.raises(SpecError, match="a scheme of modelopt must be one of nvfp4"):
        layouts.get("modelopt").scheme("nvfp5")


def test_own_layout_is_what_records_say() -> None:
    """Both planes of a tensor, under the names that `convert_checkpoint` gives them."""
    quantizer = hybridq.quantizer("mxfp8", "nvfp4")
    record = hybridq.ptq.Record("up.weight", quantizer, (64, 96), torch.bfloat16)
    one = layouts.get("hybridq")
    made = [
        (each.name, each.shape, each.dtype)
        for direction, spec in (("rowwise", record.row), ("columnwise", record.col))
        for each in one.stored("up.weight", spec, (64, 96), direction).tensors
    ]
    assert made == [(each.name, each.shape, each.dtype) for each in record.stored()]
    storage = quantizer(torch.randn(64, 96).bfloat16())
    for direction, spec in (("rowwise", record.row), ("columnwise", record.col)):
        plane = getattr(storage, direction)
        weight = one.stored("up.weight", spec, (64, 96), direction)
        [again] = weight.decode(weight.encode([plane]))
        assert torch.equal(again.dequantize(), plane.dequantize())

"""`hybridq.show`: the numbers are right for every format, and the picture can be drawn."""

from __future__ import annotations

import math
import subprocess
import sys

import matplotlib.figure
import numpy as np
import pytest
import torch

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.reference import decode_codes, unpack
from hybridq.report import measure


def view_of(x, *args, **options):
    return hybridq.show(hybridq.quantize(x, *args, **options), original=x)


def test_every_format_is_shown_with_its_error(fmt):
    x = torch.randn(37, 141)
    x[3, 5] = 0.0
    t = hybridq.quantize(x, fmt)
    view = hybridq.show(t, original=x)
    assert [v.plane.direction for v in view.planes] == ["rowwise", "columnwise"]
    for plane_view in view.planes:
        got = plane_view.plane.dequantize().double()
        relative = float((got - x.double()).norm() / x.double().norm())
        assert plane_view.error.relative == pytest.approx(relative, rel=1e-6, abs=1e-12)
        largest = float((got - x.double()).abs().max())
        assert plane_view.error.largest == pytest.approx(largest, rel=1e-6)
        expected = math.inf if relative == 0 else -20 * math.log10(relative)
        assert plane_view.error.snr_db == pytest.approx(expected, rel=1e-6)
        assert plane_view.codes.total == math.prod(plane_view.plane.matrix)
        assert str(plane_view.plane.spec) in str(view)


def test_codes_are_counted(fmt):
    x = torch.randn(9, 50)
    x[2] = 0.0
    t = hybridq.quantize(x, fmt, columnwise=None)
    plane = t.rowwise
    codes = measure.measure_codes(plane)
    values = dict(zip(codes.keys, codes.values, strict=True))
    assert len(values) == len(codes.counts) == len(set(codes.keys))
    finite = [v for v in codes.values if not math.isnan(v)]
    assert finite == sorted(finite)
    element = plane.spec.format.element
    if element.bits <= 8:
        stored = unpack(plane.data, element, 50)
        numbers = decode_codes(stored, element)
        for key, count in zip(codes.keys, codes.counts, strict=True):
            assert count == int((stored == key).sum())
    else:
        numbers = plane.data.float()
    assert codes.num_zero == int((numbers == 0).sum()) >= 50
    assert codes.num_saturated == int((numbers.abs() >= element.max).sum())
    assert codes.num_nan == 0


def test_nan_blocks_and_infinities_are_counted():
    x = torch.randn(4, 64)
    x[1, 3] = math.nan
    x[2, 40] = math.inf
    view = view_of(x, "mxfp8", columnwise=None).planes[0]
    assert view.scales.num_nan == 1 and view.scales.num_blocks == 8
    assert view.codes.num_nan == 32
    # The NaN block's 32, and the inf.
    assert view.error.num_not_finite == 33
    assert math.isfinite(view.error.relative)
    text = "\n".join(view.lines())
    assert "12.50% NaN" in text and "33 values that are not finite left out" in text
    assert "data:image/png" in view_of(x, "nvfp4")._repr_html_()


def test_without_an_original_the_planes_are_compared():
    x = torch.randn(40, 48)
    t = hybridq.quantize(x, "mxfp8", columnwise="nvfp4")
    first, second = hybridq.show(t).planes
    assert first.error is None
    row, col = first.plane.dequantize().double(), second.plane.dequantize().double()
    assert second.error.relative == pytest.approx(float((col - row).norm() / row.norm()))
    assert "against the rowwise plane" in str(hybridq.show(t))
    only = hybridq.show(hybridq.quantize(x, None, columnwise="nvfp4"))
    assert len(only.planes) == 1 and only.planes[0].error is None
    assert "nothing to compare with" in str(_texts(only.figure()))


def _texts(figure) -> list[str]:
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def test_error_by_block_is_the_blocks_own():
    x = torch.randn(4, 96)
    view = view_of(x, "nvfp4", columnwise=None).planes[0]
    got = view.plane.dequantize()
    blocks = (got - x).double().view(4, 6, 16).norm(dim=2) / x.double().view(4, 6, 16).norm(dim=2)
    assert view.error.cell == (1, 16)
    torch.testing.assert_close(view.error.cells, blocks.float())


def test_scales_are_the_planes_own():
    x = torch.randn(4, 96) * torch.logspace(-4, 4, 96)
    view = view_of(x, "mxfp8", columnwise=None).planes[0]
    exponents = view.plane.scale.to(torch.float32) - 127
    torch.testing.assert_close(view.scales.log2, exponents)
    assert math.log2(view.scales.largest) == exponents.max()


@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (0,), (1,), (), (2, 0, 5)])
def test_empty_and_small_tensors(fmt, shape):
    x = torch.ones(shape)
    view = hybridq.show(hybridq.quantize(x, fmt), original=x)
    values = x.numel()
    assert [v.codes.total for v in view.planes] == [values] * 2
    assert [v.error.relative for v in view.planes] == [0.0 if values else None] * 2
    assert str(view)


@pytest.mark.parametrize("shape", [(9, 40), (3, 0), ()])
@pytest.mark.parametrize("pair", [("mxfp8", "nvfp4"), ("fp8_e4m3", "bf16"), (None, "mxfp6_e3m2")])
def test_pictures_are_drawn(pair, shape):
    figure = view_of(torch.ones(shape), *pair).figure()
    assert isinstance(figure, matplotlib.figure.Figure)
    figure.canvas.draw()
    assert len([axis for axis in figure.axes if axis.get_title()]) == 3 * len(
        [p for p in pair if p]
    )


def test_options_are_shown():
    x = torch.randn(20, 40, dtype=torch.bfloat16)
    for text in ("nvfp4;rht=d7e8", "nvfp4;rows", "mxfp8;sr", "nvfp4;bound=256;4o6=mae"):
        view = view_of(x, PlaneSpec.parse(text), columnwise=None)
        assert view.planes[0].error.relative < 0.2
    rows = hybridq.quantize(x * torch.arange(1, 21)[:, None], PlaneSpec.parse("nvfp4;rows"), None)
    low, high = hybridq.show(rows).planes[0].scales.factor
    assert low < high


def test_bands_change_nothing(monkeypatch):
    x = torch.randn(300, 200, dtype=torch.bfloat16)
    cases = [
        hybridq.quantize(x, name) for name in ("nvfp4_16x16", "fp8_128x128", "fp8_e4m3", "bf16")
    ]
    cases.append(hybridq.quantize(x, PlaneSpec.parse("nvfp4;rows"), PlaneSpec.parse("mxfp4;sr")))
    whole = [hybridq.show(t, original=x) for t in cases]
    monkeypatch.setattr(measure, "_BAND", 1000)
    for t, before in zip(cases, whole, strict=True):
        for one, two in zip(hybridq.show(t, original=x).planes, before.planes, strict=True):
            assert one.codes == two.codes
            assert one.error.largest == two.error.largest
            assert one.error.relative == pytest.approx(two.error.relative, rel=1e-12)
            torch.testing.assert_close(one.error.cells, two.error.cells)


def test_large_maps_are_small():
    x = torch.randn(1500, 700, dtype=torch.bfloat16)
    for view in view_of(x, "nvfp4").planes:
        assert max(*view.scales.log2.shape, *view.error.cells.shape) <= measure.MAP_LIMIT
        rows, cols = view.plane.matrix
        cell = view.error.cell
        assert cell[1] % 16 == 0
        assert view.error.cells.shape == (-(-rows // cell[0]), -(-cols // cell[1]))


def test_html_has_the_picture_and_the_text_escaped():
    view = view_of(torch.randn(8, 32), "mxfp8")
    page = view._repr_html_()
    assert page.startswith("<img") and "data:image/png;base64," in page
    assert "<pre>" in page and "SNR" in page


@pytest.mark.more
def test_without_matplotlib_there_is_text_and_a_clear_error():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch, hybridq\n"
        "view = hybridq.show(hybridq.quantize(torch.ones(2, 32), 'mxfp8'))\n"
        "assert 'rowwise plane' in str(view)\n"
        "page = view._repr_html_()\n"
        "assert page.startswith('<pre>') and 'hybridq[demo]' in page, page\n"
        "try: view.figure()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == (
        "figure: matplotlib is not installed; pip install hybridq[demo]"
    ), done.stderr


def test_storages_planes_and_wrong_things():
    x = torch.randn(6, 40)
    t = hybridq.quantize(x, "mxfp8", columnwise="nvfp4")
    for shown in (t.tensor_storage, t.columnwise, t.rowwise):
        assert hybridq.show(shown, original=x).planes
    # A quantized original is what it decodes to.
    assert hybridq.show(t.rowwise, original=t).planes[0].error.relative == 0.0
    with pytest.raises(TypeError, match=r"hybridq\.quantize makes one"):
        hybridq.show(x)
    with pytest.raises(ValueError, match=r"shape \(6, 40\), got \(40, 6\)"):
        hybridq.show(t, original=x.t())


def test_a_tensor_that_requires_grad_keeps_its_graph():
    t = hybridq.quantize(torch.randn(4, 32), "mxfp8").requires_grad_()
    before = t._version
    assert hybridq.show(t, original=torch.ones(4, 32)).planes[0].error.relative > 0
    assert t._version == before and t.grad is None


def test_undefined_errors_are_said():
    x = torch.full((2, 32), math.nan)
    text = str(view_of(x, "mxfp8"))
    assert "undefined against the original" in text
    zeros = view_of(torch.zeros(2, 32), "nvfp4").planes[0]
    assert zeros.error.relative == 0.0 and zeros.error.snr_db == math.inf
    assert np.isinf(zeros.scales.log2.numpy()).all()


def test_how_much_a_fold_would_change():
    """Nothing for narrow codes; an MX plane with an outlier per group loses some."""
    x = torch.randn(200, 256)
    x[:, ::128] *= 1e3
    views = {name: hybridq.show(hybridq.quantize(x, name)).planes[0] for name in FOLDS}
    assert views["nvfp4"].num_folded is None and "fold" not in "".join(views["nvfp4"].lines())
    assert views["mxfp4"].num_folded == 0
    spec = views["mxfp8"].plane.spec
    plane = views["mxfp8"].plane
    whole = hybridq.kernels.reference_backend.reference.fold_plane(plane.tensors, spec, 200, 256)
    assert views["mxfp8"].num_folded == whole.changed.item() > 0
    assert f"fold       {whole.changed.item()} codes would change" in str(views["mxfp8"].lines())


FOLDS = ("mxfp8", "mxfp4", "nvfp4")

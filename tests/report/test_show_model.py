"""`hybridq.show` of a model, and how pictures name what they draw."""

from __future__ import annotations

import matplotlib.figure
import pytest
import torch
from torch import nn

import hybridq
from hybridq.report import Table


def error_of(plane: object, want: torch.Tensor) -> float:
    got = plane.dequantize().double()
    return float((got - want.double()).norm() / want.double().norm())


def test_a_model_is_shown_by_the_planes_of_its_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(hybridq.Linear(64, 96), hybridq.LayerNormMLP(96, 128))
    view = hybridq.show(model, recipe=hybridq.recipe(fprop="nvfp4", dgrad="mxfp8"))
    names = [one.name for one in view.weights[::2]]
    assert names == ["0.weight", "1.fc1_weight", "1.fc2_weight"]
    weight = model[0].weight.detach()
    rowwise = hybridq.quantize(weight, "nvfp4").rowwise
    again = hybridq.quantize(rowwise.dequantize(), "mxfp8", columnwise="mxfp8").columnwise
    for one, plane in zip(view.weights, (rowwise, again), strict=False):
        assert one.direction == plane.direction
        assert one.statistics.relative_error == pytest.approx(error_of(plane, weight), rel=1e-6)
    assert [one.format for one in view.weights[:2]] == ["nvfp4", "mxfp8"]
    assert "0.weight" in str(view) and "96 x 64" in str(view)
    figure = view.figure()
    assert isinstance(figure, matplotlib.figure.Figure)
    assert figure.axes[0].get_ylabel() == "relative error"
    assert "data:image/png" in view._repr_html_() and "<table>" in view._repr_html_()


def test_stacks_and_quantized_parameters_are_shown_as_one_weight_each() -> None:
    torch.manual_seed(0)
    groups = hybridq.GroupedLinear(3, 64, 32, single_grouped_weight=True)
    view = hybridq.show(groups, recipe="mxfp8")
    (row, _) = view.weights
    assert row.shape == (3, 32, 64) and row.statistics.calls == 3
    parts = [hybridq.quantize(one, "mxfp8").rowwise.dequantize() for one in groups.weight.detach()]
    want = groups.weight.detach().double()
    error = float((torch.stack(parts).double() - want).norm() / want.norm())
    assert row.statistics.relative_error == pytest.approx(error, rel=1e-6)
    with hybridq.quantized_model_init("mxfp8"):
        layer = hybridq.Linear(64, 64)
    held = hybridq.show(layer).weights
    assert all(one.is_held for one in held) and held[0].statistics.relative_error == 0.0
    assert "what it was made of is gone" in str(hybridq.show(layer))


def test_what_a_model_is_not_shown_with() -> None:
    layer = hybridq.Linear(32, 32)
    with pytest.raises(TypeError, match="original is that of a tensor"):
        hybridq.show(layer, original=torch.ones(32, 32))
    with pytest.raises(TypeError, match="a recipe is for a model"):
        hybridq.show(hybridq.quantize(torch.ones(4, 32), "mxfp8"), recipe="mxfp8")
    with pytest.raises(ValueError, match="modules of hybridq with weights"):
        hybridq.show(nn.Linear(4, 4))
    t, x = hybridq.quantize(torch.ones(4, 32), "mxfp8"), torch.ones(4, 32)
    with pytest.raises(ValueError, match=r"weights must have values, got 0\.weight on the meta"):
        hybridq.show(nn.Sequential(hybridq.Linear(32, 32, device="meta")), recipe="mxfp8")
    with pytest.raises(ValueError, match="the tensor must have values, got one on the meta"):
        hybridq.show(t.to("meta"))
    with pytest.raises(ValueError, match="the original must have values, got one on the meta"):
        hybridq.show(t, original=x.to("meta"))


def test_maps_have_rows_and_columns_of_the_matrix() -> None:
    """Rows and columns are counted in values, whatever a cell spans; a transposed plane says so."""
    x = torch.randn(100, 300)
    view = hybridq.show(hybridq.quantize(x, "mxfp8", columnwise="nvfp4"), original=x)
    figure = view.figure()
    figure.canvas.draw()
    axes = [axis for axis in figure.axes if axis.get_title()]
    for first, (rows, cols) in ((0, (100, 300)), (3, (300, 100))):
        for axis in (axes[first], axes[first + 2]):
            assert axis.get_xlim() == (0, cols) and axis.get_ylim() == (rows, 0)
            ticks = [tick for tick in axis.get_xticks() if 0 <= tick < cols]
            assert 4 < len(ticks) < 10 and all(tick == int(tick) for tick in ticks)
    assert axes[0].get_xlabel().startswith("column") and axes[3].get_xlabel().startswith("row")
    assert "drawn transposed" in axes[3].get_ylabel() and "transposed" not in axes[0].get_ylabel()
    assert "columnwise plane [300, 100], drawn transposed" in str(view)
    assert axes[3].get_title() == "scales, with their factor"


def test_codes_stand_over_their_values() -> None:
    x = torch.tensor([[-6.0, -3.0, 0.5, 0.5, 0.0, -0.0, 1.5, 6.0] * 2])
    view = hybridq.show(hybridq.quantize(x, "nvfp4"), original=x)
    axis = next(one for one in view.figure().axes if one.get_title() == "codes (e2m1)")
    drawn = {float(line[0][0]): float(line[1][1]) for line in axis.collections[0].get_segments()}
    assert set(drawn) == {s * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for s in (1.0, -1.0)}
    assert drawn[0.5] == drawn[0.0] == 0.25 and drawn[-6.0] == 0.125 and drawn[4.0] == 0.0


def test_tables_and_memory_reports_are_html_in_a_notebook() -> None:
    table = Table("A <title>", ("a",), (("1",),))
    assert "A &lt;title&gt;" in table._repr_html_() and "<td>1</td>" in table._repr_html_()
    report = hybridq.memory_report(hybridq.Linear(8, 8))
    assert "<table>" in report._repr_html_() and "parameters" in report._repr_html_()

"""Operands of quantized attention in reports and traces, against values that are computed here."""

from __future__ import annotations

import json
import math

import pytest
import torch

import hybridq
from hybridq.recipes import get, with_attention

OPERANDS = ("query", "key", "value", "attention_weights", "grad_attention", "grad_scores")
HEADS, FEATURES = 2, 16


class Attention(torch.nn.Module):
    """Attention of three inputs, none of them a product."""

    def __init__(self) -> None:
        super().__init__()
        self.core = hybridq.nn.DotProductAttention(
            HEADS, FEATURES, qkv_format="bshd", attn_mask_type="no_mask", name="core"
        )
        self.out = hybridq.Linear(HEADS * FEATURES, 8)

    def forward(self, q, k, v):
        return self.out(self.core(q, k, v)).square().mean()


def inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 12, HEADS, FEATURES, requires_grad=True) for _ in range(3)]


def relative(x: torch.Tensor, fmt: str) -> float:
    matrix = x.detach().reshape(-1, x.shape[-1])
    y = hybridq.quantize(matrix, fmt).dequantize()
    return float((y.double() - matrix.double()).norm() / matrix.double().norm())


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_current"])
def test_errors_are_those_of_the_operands(fmt: str) -> None:
    model, given = Attention(), inputs()
    recipe = with_attention(get(fmt))
    found = hybridq.report(model, tuple(given), ["nvfp4"], recipe=recipe)
    rows = {row.tensor: row for row in found.rows(in_run=True) if row.layer == "core"}
    assert tuple(rows) == OPERANDS
    assert {row.direction for row in rows.values()} == {"rowwise"}
    plain = {"mxfp8": "mxfp8", "fp8_current": "fp8"}[fmt]
    what_if = {row.tensor: row for row in found.rows(in_run=False) if row.layer == "core"}
    assert tuple(what_if) == OPERANDS
    q, k, v = (one.detach().transpose(1, 2) for one in given)
    for name, x in (("query", q), ("key", k), ("value", v)):
        assert rows[name].statistics.relative_error == pytest.approx(relative(x, plain), rel=1e-9)
        assert what_if[name].format == "nvfp4"
        expected = relative(x, "nvfp4")
        assert what_if[name].statistics.relative_error == pytest.approx(expected, rel=1e-9)
        assert rows[name].statistics.values == x.numel()
    # The weights are of decoded operands: computed again here.
    dq, dk = (
        hybridq.quantize(one.reshape(-1, FEATURES), plain).dequantize().view_as(one)
        for one in (q, k)
    )
    weights = torch.softmax(dq @ dk.transpose(-1, -2) / math.sqrt(FEATURES), -1)
    expected = relative(weights, plain)
    assert rows["attention_weights"].statistics.relative_error == pytest.approx(expected, rel=1e-5)
    for name in ("grad_attention", "grad_scores"):
        assert rows[name].gradient_to_noise == pytest.approx(
            1 / rows[name].statistics.relative_error
        )


def test_a_plain_run_has_no_operands_and_a_recomputation_has_them_once() -> None:
    model, given = Attention(), tuple(inputs())
    plain = hybridq.report(model, given, recipe="mxfp8")
    assert not [row for row in plain.slots if row.layer == "core"]
    recipe = with_attention(get("mxfp8"))
    own = model.core.forward
    model.core.forward = lambda *args: own(*args, checkpoint_core_attention=True)
    found = hybridq.report(model, given, recipe=recipe)
    rows = {row.tensor: row.statistics for row in found.slots if row.layer == "core"}
    assert tuple(sorted(rows)) == tuple(sorted(OPERANDS))
    assert {one.calls for one in rows.values()} == {1}


def test_a_bad_operand_is_named_first() -> None:
    model, given = Attention(), inputs()
    with torch.no_grad():
        given[1][1, 3, 0, 2] = math.inf
    found = hybridq.report(model, tuple(given), recipe=with_attention(get("mxfp8")), gemms=False)
    assert found.first_bad is not None
    assert (found.first_bad.layer, found.first_bad.tensor) == ("core", "key")
    row = (1 * HEADS + 0) * 12 + 3  # batch, head, place
    assert found.first_bad.position == (row, 2)


def test_what_each_operand_changes_of_the_loss() -> None:
    """Of queries, keys and values, which share a quantizer: the run with and without it."""
    model, given = hybridq.convert(Attention()), tuple(inputs())
    recipe = with_attention(get("nvfp4"))
    found = hybridq.report(model, given, recipe=recipe, switch=True)
    rows = {row.tensor: row for row in found.slots if row.layer == "core" and row.in_run}
    shared = {rows[name].loss_change for name in ("query", "key", "value")}
    assert len(shared) == 1

    def loss(quantizes: bool) -> float:
        def factory(role):
            if role.module_type == "dpa" and role.tensor_type == "qkv" and not quantizes:
                return hybridq.IdentityQuantizer()
            return recipe.quantizer(role)

        factory.fp8_dpa = True
        with torch.no_grad(), hybridq.autocast(recipe=hybridq.CustomRecipe(factory)):
            return float(model(*given))

    (change,) = shared
    assert change == pytest.approx(loss(True) - loss(False), abs=1e-7) and change != 0.0
    others = [row.loss_change for row in found.slots if row.layer == "out" and row.in_run]
    assert len(others) == 6 and all(one is not None for one in others)


def test_traces_have_planes_of_operands(tmp_path) -> None:
    model, given = Attention(), inputs()
    with (
        hybridq.trace(tmp_path / "run.jsonl", model),
        hybridq.autocast(recipe=with_attention(get("mxfp8"))),
    ):
        model(*given).backward()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    own = [line for line in lines if line.get("module") == "core"]
    assert [line["tensor"] for line in own if line["direction"] == "values"] == list(OPERANDS)
    data = [line for line in own if line["direction"] == "rowwise" and line["buffer"] == "data"]
    assert [line["tensor"] for line in data] == list(OPERANDS)
    assert data[0]["shape"] == [2 * HEADS * 12, FEATURES]

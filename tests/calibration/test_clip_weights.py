"""AWQ's clipping search: against the inputs themselves, group by group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import BlockHessian, awq, clip_matrix, clip_weights, gptq, products
from hybridq.formats import PlaneSpec
from hybridq.storage import build_storage

#: Specs, and their groups `(rows, cols)`; None: the whole matrix.
SPECS = {
    "mxfp4": (1, 32),
    "nvfp4": (1, 16),
    "nvfp4;rows": (1, 16),
    "nvfp4_16x16": (16, 16),
    "mxfp8": (1, 32),
    "fp8_128x128": (128, 128),
    "fp8_e4m3": None,
}
RECIPE = hybridq.recipe(fprop="mxfp4")


def spec_of(text: str) -> PlaneSpec:
    return PlaneSpec.parse(text)


def heavy(rows: int, cols: int) -> torch.Tensor:
    """Weights with a few large values, which clips are for."""
    return torch.distributions.StudentT(2.5).sample((rows, cols))


def searched(weight, x, spec, size):
    """The search as its authors' program does it: each group's part of the outputs, in FP64."""
    rows, cols = weight.shape
    high, wide = size or (rows, cols)
    best = weight.clone()
    largest = weight.abs().max() if spec.format.block is not None and spec.needs_amax else None
    tops = weight.abs().amax(1) if spec.row_scaled else None
    errors = {}
    for number, clip in enumerate((20 - step) / 20 for step in range(10)):
        tried = weight.clone()
        for r in range(0, rows, high):
            for c in range(0, cols, wide):
                group = weight[r : r + high, c : c + wide]
                top = group.abs().max()
                if top == (tops[r] if tops is not None else largest):
                    continue
                bound = (top.float() * clip).to(weight.dtype)
                tried[r : r + high, c : c + wide] = group.clamp(-bound, bound)
        made = build_storage(tried, spec, None).first.dequantize().double()
        for r in range(0, rows, high):
            for c in range(0, cols, wide):
                place = (slice(r, r + high), slice(c, c + wide))
                part = x[:, c : c + wide].double()
                gap = (made[place] - weight[place].double()) @ part.T
                error = float((gap**2).sum())
                if number == 0 or error < errors[r, c]:
                    errors[r, c] = error
                    best[place] = tried[place]
        if number == 0:
            plain = sum(errors.values())
    return best, sum(errors.values()), plain


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_group_takes_the_clip_with_the_least_error_of_its_outputs(text, dtype):
    torch.manual_seed(1)
    spec, size = spec_of(text), SPECS[text]
    rows, cols = (130, 150) if size == (128, 128) else (20, 72)
    weight, x = heavy(rows, cols).to(dtype), torch.randn(60, cols) * torch.randn(cols).exp()
    hessian = BlockHessian(cols, cols if size is None else size[1])
    for part in x.split(25):
        hessian.add(part)
    found = clip_matrix(weight, hessian, spec)
    want, error, plain = searched(weight, x, spec, size)
    high, wide = size or (rows, cols)
    assert found.groups == -(-rows // high) * -(-cols // wide)
    assert (found.clipped > 0) == (not torch.equal(want, weight))
    assert found.clipped > 0 or text.startswith("fp8")  # whose values are fine at any scale
    assert torch.equal(found.weight, want)
    assert found.error == pytest.approx(error, rel=1e-4)
    assert found.plain_error == pytest.approx(plain, rel=1e-4)
    assert found.error <= found.plain_error
    # What is quantized plainly afterwards is what the search has measured.
    made = build_storage(found.weight, spec, None).first.dequantize().double()
    assert float(hessian.of_rows(weight.double() - made).sum()) == pytest.approx(
        found.error, rel=1e-9
    )


def test_a_model_is_clipped_part_by_part_but_for_queries_and_keys():
    torch.manual_seed(2)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 64)
            self.o_proj = nn.Linear(64, 64)

        def forward(self, x):
            return self.o_proj(self.v_proj(x) * self.q_proj(x).sigmoid())

    model = nn.Sequential(Attention())
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(heavy(64, 64) if one.dim() == 2 else torch.zeros(64))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    x = torch.randn(100, 64)
    report = clip_weights(model, iter([x[:50], x[50:]]), RECIPE, step="input")
    assert [one.name for one in report.weights] == ["0.v_proj", "0.o_proj"]
    assert report.left == {"0.q_proj": "its name is one of those that are left"}
    assert torch.equal(model[0].q_proj.weight, before["0.q_proj.weight"])
    spec = spec_of("mxfp4")
    want, error, plain = searched(before["0.v_proj.weight"], x, spec, (1, 32))
    assert torch.equal(model[0].v_proj.weight, want)
    whole = sum(
        float(
            (x[:, c : c + 32].double() @ before["0.v_proj.weight"][:, c : c + 32].double().T)
            .square()
            .sum()
        )
        for c in (0, 32)
    )
    assert report.weights[0].error == pytest.approx(error / whole, rel=1e-4)
    assert report.weights[0].plain_error == pytest.approx(plain / whole, rel=1e-4)
    assert report.weights[0].tokens == 100
    # o's inputs come from the clipped v.
    with torch.no_grad():
        hidden = nn.functional.linear(x, want) * model[0].q_proj(x).sigmoid()
    want, _, _ = searched(before["0.o_proj.weight"], hidden, spec, (1, 32))
    assert torch.equal(model[0].o_proj.weight, want)
    assert "groups clipped" in str(report) and "left, its name" in str(report)
    again = clip_weights(model, [x], RECIPE, leave=())
    assert not again.left and len(again.weights) == 3


class Pair(nn.Module):
    """Three experts in stacks, held `[E, in, out]`."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (
            nn.Parameter(heavy(96, 48).view(3, 32, 48)),
            nn.Parameter(heavy(144, 32).view(3, 48, 32)),
        )

    def forward(self, x, top, weights):
        y = torch.zeros_like(x)
        for e in range(3):
            tokens, place = (top == e).nonzero(as_tuple=True)
            made = (x[tokens] @ self.up[e]).relu() @ self.down[e]
            y = y.index_add(0, tokens, weights[tokens, place, None] * made)
        return y


hybridq.converters.register_experts(
    Pair,
    hybridq.moe.ExpertsLayout("up", "down", has_gate=False, activation="relu", is_transposed=True),
)


def test_experts_are_clipped_by_their_own_tokens():
    torch.manual_seed(3)
    model = nn.ModuleDict({"experts": Pair()})
    model.forward = lambda *args: model["experts"](*args)
    x, top = torch.randn(80, 32), torch.randint(0, 2, (80, 1))
    before = model["experts"].up.detach().clone()
    batch = (x, top, torch.ones(80, 1))
    report = clip_weights(model, [batch], RECIPE, step="model")
    assert report.left == dict.fromkeys(("experts.up.2", "experts.down.2"), "no token reached it")
    found = {one.name: one for one in report.weights}
    for e in range(2):
        want, _, _ = searched(
            before[e].t().contiguous(), x[top[:, 0] == e], spec_of("mxfp4"), (1, 32)
        )
        assert torch.equal(model["experts"].up[e].t(), want)
        assert found[f"experts.up.{e}"].tokens == int((top == e).sum())
    assert torch.equal(model["experts"].up[2], before[2])


def test_clipping_follows_awq_and_gptq_follows_it():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, 48))
    with torch.no_grad():
        model[0].weight.copy_(heavy(48, 64))
    x = torch.randn(200, 64)
    x[:, ::9] *= 20.0
    awq(model, [x], RECIPE, in_front=True)
    (one,) = clip_weights(model, [x], RECIPE).weights
    assert one.error < one.plain_error
    (two,) = gptq(model, [x], RECIPE).weights
    assert two.error < two.plain_error


def test_what_cannot_be_clipped_is_left_and_named():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    gptq(model, [torch.randn(8, 32)], hybridq.recipes.ByName([("2", RECIPE)], "bf16"))
    report = clip_weights(model, [torch.randn(8, 32)], RECIPE)
    assert report.left == {
        "0": "its weight is another module's, too",
        "1": "its weight is another module's, too",
        "2": "its weight is quantized already",
    }
    assert not report.weights and len(products(model)) == 3


def test_wrong_arguments_are_refused():
    weight, spec = torch.ones(4, 64), spec_of("mxfp4")
    hessian = BlockHessian(64, 32)
    for text, call in (
        (
            r"clips must be above 0 and at most 1, got \(1.5,\)",
            lambda: clip_matrix(weight, hessian, spec, (1.5,)),
        ),
        (
            r"clips must be above 0 and at most 1, got \(\)",
            lambda: clip_matrix(weight, hessian, spec, ()),
        ),
        (
            "64 columns in blocks of 32, got 64 in blocks of 16",
            lambda: clip_matrix(weight, BlockHessian(64, 16), spec),
        ),
        (r"inputs must be \[tokens, 64\], got \[3, 32\]", lambda: hessian.add(torch.ones(3, 32))),
        ("must be finite", lambda: hessian.add(torch.full((3, 64), torch.inf))),
        (
            "clip_weights: the spec must be",
            lambda: clip_weights(
                nn.Sequential(nn.Linear(16, 16)),
                [torch.ones(2, 16)],
                hybridq.recipe(fprop="nvfp4;sr"),
            ),
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_matrices_held_transposed_are_clipped_and_convolutions_left():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    layer, conv = transformers.pytorch_utils.Conv1D(48, 32), nn.Conv2d(8, 16, 2, stride=2)
    with torch.no_grad():
        layer.weight.copy_(heavy(32, 48))
    before, x = layer.weight.detach().clone(), torch.randn(64, 32)
    report = clip_weights(nn.Sequential(layer), [x], RECIPE)
    want, _, _ = searched(before.t().contiguous(), x, spec_of("mxfp4"), (1, 32))
    assert torch.equal(layer.weight.t(), want) and report.weights[0].clipped > 0
    report = clip_weights(nn.Sequential(conv), [torch.randn(4, 8, 8, 8)], RECIPE)
    assert "is no matrix" in report.left["0"]


def test_leave_is_no_collection_of_letters():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(TypeError, match=r"clip_weights: leave must be a collection of texts"):
        clip_weights(model, [torch.randn(8, 64)], RECIPE, leave="q_proj")

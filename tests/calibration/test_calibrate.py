"""calibrate: amaxes against NumPy, from the inputs that a model's own operations are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hybridq
from hybridq.calibration import projection_of, watch
from hybridq.errors import HybridQWarning


class MLP(nn.Module):
    """Two products with an activation in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)

    def forward(self, x, scale=1.0):
        return self.down(input=F.silu(self.up(x * scale)))


def model(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP()


def batches(count: int = 3, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 5, 16, generator=generator) for _ in range(count)]


def in_numpy(net: MLP, data: list[torch.Tensor]) -> dict[tuple[str, str], float]:
    """The amaxes by NumPy, in FP64, from weights and batches."""
    up, bias, down = (p.detach().double().numpy() for p in net.parameters())
    x = np.concatenate([one.double().numpy().reshape(-1, 16) for one in data])
    h = x @ up.T + bias
    hidden = h / (1 + np.exp(-h))
    tensors = {
        ("up", "input"): x,
        ("up", "weight"): up,
        ("up", "output"): h,
        ("down", "input"): hidden,
        ("down", "weight"): down,
        ("down", "output"): hidden @ down.T,
    }
    return {key: np.abs(one).max() for key, one in tensors.items()}


def same(one: hybridq.Calibration, other: hybridq.Calibration) -> bool:
    mine, others = list(one.entries()), list(other.entries())
    return (
        [e[:2] for e in mine] == [e[:2] for e in others]
        and all(torch.equal(a[2], b[2]) for a, b in zip(mine, others, strict=True))
        and {n: t.tolist() for n, t in one.tokens.items()}
        == {n: t.tolist() for n, t in other.tokens.items()}
        and (one.observers, one.formats, one.batches)
        == (other.observers, other.formats, other.batches)
    )


@pytest.mark.parametrize("converted", [False, True])
def test_amaxes_are_those_of_numpy(converted: bool) -> None:
    net, data = model(), batches()
    if converted:
        hybridq.convert(net)
    found = hybridq.calibrate(net, data, slots=("input", "weight", "output"))
    for (name, slot), want in in_numpy(net, data).items():
        got = found.amax(name, slot)
        assert got.dtype == torch.float32 and got.shape == ()
        assert float(got) == pytest.approx(want, rel=1e-6), (name, slot)
    assert found.amax("up", "input") == max(one.abs().max() for one in data)
    assert {name: int(count) for name, count in found.tokens.items()} == {"up": 30, "down": 30}
    assert found.amax("down", "k") is None and found.amax("nothing", "input") is None


def test_the_ways_to_give_batches() -> None:
    net, data = model(), batches()
    want = hybridq.calibrate(net, data)
    ways = [
        [{"x": one} for one in data],
        [(one, 1.0) for one in data],
        ([one, 1.0] for one in data),
    ]
    for way in ways:
        assert same(hybridq.calibrate(net, way), want)
    looped = hybridq.calibrate(net, lambda inside: [inside(one) for one in data])
    assert looped.batches == 1 and looped.amax("up", "input") == want.amax("up", "input")


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (3, TypeError, "data must be an iterable of batches or a function of the model, got int"),
        (torch.ones(2, 16), TypeError, "got Tensor; put one batch into a list"),
        ({"x": torch.ones(2, 16)}, TypeError, "got dict; put one batch into a list"),
        (["text"], TypeError, "a batch must be a mapping, .*, got str as number 0"),
        ([], ValueError, "at least one batch, got none"),
    ],
)
def test_what_is_no_data(data, error, text) -> None:
    with pytest.raises(error, match=text):
        hybridq.calibrate(model(), data)


def hooks(net: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(one, kind)) for one in net.modules() for kind in kinds)


def test_the_model_stays_as_it_is() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 16))
    net[2].eval()
    before = {name: one.clone() for name, one in net.state_dict().items()}
    modes = [one.training for one in net.modules()]
    seen = []
    with net[0].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled())):
        found = hybridq.calibrate(net, [torch.randn(4, 16)])
        assert hooks(net) == 1 and seen == [False]
    assert [one.training for one in net.modules()] == modes
    assert torch.is_grad_enabled()
    for name, one in net.state_dict().items():
        assert torch.equal(one, before[name]), name
    assert found.amax("3", "input") is not None


def test_after_an_error_the_model_has_no_hooks() -> None:
    net = model().train()
    with pytest.raises(RuntimeError):
        hybridq.calibrate(net, [torch.randn(2, 16), torch.randn(2, 17)])
    assert not hooks(net) and net.training and torch.is_grad_enabled()

    def refuse(product):
        raise LookupError(product.name)

    with pytest.raises(LookupError), watch(hybridq.calibration.products(net), refuse):
        pass
    assert not hooks(net)


def test_values_that_are_not_finite_are_named() -> None:
    net = model()
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(2, 16)
        x[1, 3] = bad
        with pytest.raises(ValueError, match=r"must be finite, got (nan|inf) in the input of up"):
            hybridq.calibrate(net, [torch.ones(2, 16), x, torch.ones(2, 16)])
    with torch.no_grad():
        net.down.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="got nan in the weight of down"):
        hybridq.calibrate(net, [torch.ones(2, 16)])


def test_a_layer_that_is_not_called_is_named() -> None:
    net = model()
    net.spare = nn.Linear(16, 16)
    with pytest.warns(HybridQWarning, match="spare were not called"):
        found = hybridq.calibrate(net, batches())
    assert found.amax("spare", "input") is None
    assert found.amax("spare", "weight") == net.spare.weight.abs().max()


def test_what_is_left_alone_is_not_calibrated() -> None:
    net = nn.ModuleDict({"up": nn.Linear(16, 16), "lm_head": nn.Linear(16, 16)})

    def loop(inside) -> None:
        inside["lm_head"](inside["up"](torch.ones(1, 16)))

    assert set(hybridq.calibrate(net, loop).tokens) == {"up"}
    assert set(hybridq.calibrate(net, loop, also=("heads",)).tokens) == {"up", "lm_head"}
    with pytest.raises(ValueError, match="must have products that hybridq"):
        hybridq.calibrate(nn.ReLU(), loop)


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_filter_is_asked_of_converted_modules_too(is_converted: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    if is_converted:
        hybridq.convert(model)
    asked = []
    found = hybridq.calibration.products(
        model, lambda module, name: asked.append(name) or name in ("0", "2")
    )
    assert [one.name for one in found] == ["0", "2"]
    assert sorted(asked) == ["0", "1", "2"]  # once each


def test_fused_steps_are_seen() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
    want = hybridq.calibrate(plain, batches())
    hybridq.convert(plain, fuse=True)
    assert same(hybridq.calibrate(plain, batches()), want)


def test_quantized_weights_count_as_they_decode() -> None:
    with hybridq.quantized_model_init(recipe="nvfp4"):
        net = nn.Sequential(hybridq.Linear(32, 32))
    found = hybridq.calibrate(net, [torch.ones(1, 32)])
    assert found.amax("0", "weight") == net[0].weight.dequantize().abs().max()


def test_convolutions_of_patches_have_rows() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4))
    x, seen = torch.randn(2, 3, 8, 12), {}
    (product,) = hybridq.calibration.products(net)
    with watch([product], lambda one: lambda rows: seen.update(rows=rows)):
        y = net(x)
    want = seen["rows"] @ product.weight().t() + net[0].bias
    assert seen["rows"].shape == (12, 48)
    assert torch.allclose(want, y.movedim(1, -1).reshape(-1, 8), atol=1e-5)


def test_own_observers_see_every_matrix() -> None:
    net, data, grams = model(), batches(), {}

    def gram(product):
        total = grams[product.name] = torch.zeros(product.weight().shape[1], dtype=torch.float64)
        return lambda rows: total.add_(rows.double().square().sum(0))

    of = hybridq.calibration.products(net)
    with watch(of, lambda product: gram(product) if product.name == "up" else None):
        hybridq.calibration.run(net, data)
    x = torch.cat(data).reshape(-1, 16).double()
    assert set(grams) == {"up"} and torch.allclose(grams["up"], x.square().sum(0))


def test_the_recipes_formats_are_kept() -> None:
    found = hybridq.calibrate(model(), batches(1), "nvfp4")
    assert found.formats["up"] == {"input": "nvfp4", "weight": "nvfp4_16x16"}


def test_a_calibration_is_resumed_and_merged(tmp_path) -> None:
    net, data = model(), batches(4)
    whole = hybridq.calibrate(net, data)
    first = hybridq.calibrate(net, data[:1], path=tmp_path / "a")
    assert same(hybridq.calibrate(net, data[1:], resume=first), whole)
    assert same(hybridq.calibrate(net, data[1:], resume=tmp_path / "a"), whole)
    parts = [hybridq.calibrate(net, [one]) for one in data[1:]]
    assert same(hybridq.Calibration.load(tmp_path / "a").merge(*parts), whole)
    with pytest.raises(TypeError, match="others must be Calibrations, got str"):
        first.merge("a")
    wider = nn.ModuleDict({"up": nn.Linear(16, 16)})
    other = hybridq.calibrate(wider, lambda one: one["up"](torch.ones(1, 16)), "nvfp4")
    assert set(first.merge(other).tokens) == {"up", "down"}
    with pytest.raises(ValueError, match="formats of up must be the same"):
        hybridq.calibrate(net, data, "mxfp8").merge(other)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj.3", "model.layers.0.mlp.experts.gate_up_proj.3"),
        ("layers.0.experts.3.w1", "layers.0.experts.*.w1"),
        ("block.1.mlp.experts.expert_12.wi", "block.1.mlp.experts.expert_*.wi"),
        ("experts.7", "experts.*"),
        ("h.3.shared_expert.up", "h.3.shared_expert.up"),
    ],
)
def test_projections(name: str, want: str) -> None:
    assert projection_of(name) == want


def test_compiled_models_are_seen_as_they_were_written() -> None:
    net, data = model(), batches()
    want = hybridq.calibrate(net, data)
    compiled = torch.compile(net, backend="eager")
    compiled(data[0])
    assert same(hybridq.calibrate(compiled, data), want)
    net.down = torch.compile(net.down, backend="eager")
    net.up.compile(backend="eager")
    net(data[0])
    assert same(hybridq.calibrate(net, data), want)


def test_weights_that_are_not_in_memory_are_named() -> None:
    net = model()
    net.down.to("meta")
    with pytest.raises(ValueError, match="weights must be in memory, got down on the meta device"):
        hybridq.calibrate(net, lambda one: one.up(torch.ones(1, 16)))


def test_a_place_where_no_file_can_be_is_said_before_anything_runs(tmp_path) -> None:
    """`advise` too: it was found out when all had run, and the result was lost."""
    ran = []
    net = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)))
    net.register_forward_hook(lambda *_: ran.append(1))
    for bad, kind, text in (
        (tmp_path, IsADirectoryError, "must be a file, got the folder"),
        (tmp_path / "none" / "a", FileNotFoundError, "must be in a folder that is there, got"),
    ):
        with pytest.raises(kind, match=f"calibrate: path {text}"):
            hybridq.calibrate(net, [torch.ones(2, 16)], path=bad)
        with pytest.raises(kind, match=f"advise: path {text}"):
            hybridq.advise(net, torch.ones(2, 16), loss=lambda y: y.sum(), path=bad)
    assert not ran
    with pytest.raises(ValueError, match=r"calibrate: slots must be some of input, .* got none"):
        hybridq.calibrate(net, [torch.ones(2, 16)], slots=())

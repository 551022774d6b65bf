"""What optimizers, EMA, clipping and autograd call on a quantized parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq import PlaneError, QuantizedTensor
from tensor_tools import PAIRS, quantized_linear, same_planes

HYBRID = PAIRS["hybrid"]


@pytest.fixture
def writes(monkeypatch) -> list[int]:
    """The ids of tensors written through their quantizer, one entry per write."""
    seen: list[int] = []
    original = hybridq.Quantizer.update_quantized

    def counted(self, source, target, **options):
        seen.append(id(target))
        return original(self, source, target, **options)

    monkeypatch.setattr(hybridq.Quantizer, "update_quantized", counted)
    return seen


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
}
MODES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_to_the_values_what_it_does_to_plain_ones(name, mode, writes) -> None:
    """Each write is one requantization: the plain optimizer, rounded where the other writes.

    Decoupled weight decay of the loop and foreach variants writes twice; all others once.
    """
    kind, options = OPTIMIZERS[name]
    start = torch.randn(48, 64)
    w = nn.Parameter(hybridq.quantize(start, **HYBRID))
    mixed = nn.Parameter(torch.randn(3))  # a plain parameter beside it
    optimizer = kind([w, mixed], **options, **MODES[mode])
    plain = nn.Parameter(w.dequantize().detach())
    reference = kind([plain], **options, **MODES[mode])
    for step in range(3):
        grad = torch.randn(48, 64)
        w.grad, plain.grad, mixed.grad = grad.clone(), grad.clone(), torch.ones(3)
        writes.clear()
        optimizer.step()
        twice = name == "adamw" and mode != "fused"
        assert writes == [id(w)] * (2 if twice else 1)
        with torch.no_grad():
            if twice:  # the decay, rounded, before the step
                decayed = w.quantizer(plain * (1 - 0.1 * 0.1)).dequantize()
                plain.copy_(decayed / (1 - 0.1 * 0.1))
                reference.step()
                near = (w.dequantize() - w.quantizer(plain).dequantize()).abs()
                assert (near > 1e-6).float().mean() < 0.01  # the division rounds, rarely across
                plain.copy_(w.dequantize())
            else:
                reference.step()
                same_planes(w, w.quantizer(plain))
                plain.copy_(w.dequantize())
        assert isinstance(w, QuantizedTensor) and step < 3
    for state in optimizer.state[w].values():
        assert type(state) is torch.Tensor, "an optimizer's state keeps full precision"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"decoupled_weight_decay": True, "foreach": False}),
        (torch.optim.Adam, {"decoupled_weight_decay": True, "foreach": True}),
        (torch.optim.RAdam, {"decoupled_weight_decay": True, "foreach": False}),
        (torch.optim.RAdam, {"decoupled_weight_decay": True, "foreach": True}),
        (torch.optim.Muon, {}),
    ],
)
@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_a_decoupled_weight_decay_is_a_write_of_its_own(kind, options, decay, writes) -> None:
    """As docs/reference/tensors.md says: its result is rounded, and then that of the step."""
    w = nn.Parameter(hybridq.quantize(torch.randn(48, 64), **HYBRID))
    start = w.dequantize().detach()
    optimizer = kind([w], lr=0.1, weight_decay=decay, **options)
    w.grad = torch.zeros(48, 64)  # so that the step itself moves nothing
    optimizer.step()
    if kind is not torch.optim.Muon:  # which multiplies by one where there is no decay
        assert writes == [id(w)] * (2 if decay else 1)
    else:
        assert writes == [id(w)] * 2
    once = w.quantizer(start * (1 - 0.1 * decay))
    same_planes(w, w.quantizer(once.dequantize()))


def test_optimizers_refuse_a_parameter_without_quantizer_before_any_arithmetic() -> None:
    made = hybridq.quantize(torch.randn(8, 32), "mxfp8")
    w = nn.Parameter(QuantizedTensor.make(made.tensor_storage, made.shape, made.dtype))
    w.grad = torch.ones(8, 32)
    with pytest.raises(PlaneError, match="has no quantizer"):
        torch.optim.SGD([w], lr=0.1).step()
    same_planes(w, made)


FOREACH = {
    "_foreach_add_": (1.5,),
    "_foreach_mul_": (0.5,),
    "_foreach_sub_": (1.5,),
    "_foreach_div_": (2.0,),
    "_foreach_zero_": (),
    "_foreach_neg_": (),
    "_foreach_abs_": (),
    "_foreach_clamp_max_": (0.5,),
}


@pytest.mark.parametrize("name", FOREACH)
def test_foreach_writes_each_tensor_once(name, writes) -> None:
    ts = [hybridq.quantize(torch.randn(8, 64), **PAIRS[kind]) for kind in sorted(PAIRS)]
    plain = [t.dequantize() for t in ts]
    mixed = torch.ones(3)
    getattr(torch, name)([*ts, mixed], *FOREACH[name])
    getattr(torch, name)(plain, *FOREACH[name])
    assert sorted(writes) == sorted(map(id, ts))
    for t, value in zip(ts, plain, strict=True):
        same_planes(t, t.quantizer(value))


def test_foreach_with_tensor_arguments(writes) -> None:
    q = hybridq.MXFP8Quantizer()
    ts, others = [q(torch.randn(8, 64)) for _ in range(3)], [torch.randn(8, 64) for _ in range(3)]
    values = [t.dequantize() for t in ts]
    torch._foreach_add_(ts, others, alpha=2.0)
    torch._foreach_addcmul_(ts, others, ts, value=0.5)
    torch._foreach_lerp_(ts, others, 0.25)
    assert len(writes) == 9
    for t, value, other in zip(ts, values, others, strict=True):
        value = q(value + 2 * other).dequantize()
        value = q(value + 0.5 * other * value).dequantize()
        want = q(torch.lerp(value, other, 0.25)).dequantize()
        assert ((t.dequantize() - want).abs() > 1e-6).float().mean() < 0.01
    torch._foreach_copy_(ts, others)
    for t, other in zip(ts, others, strict=True):
        same_planes(t, q(other))
    out = [torch.empty(8, 64) for _ in ts]
    torch._foreach_copy_(out, ts)
    assert all(torch.equal(a, b.dequantize()) for a, b in zip(out, ts, strict=True))
    norms = torch._foreach_norm(ts)
    assert torch.equal(torch.stack(norms), torch.stack([t.dequantize().norm() for t in ts]))


def test_clipping(weight) -> None:
    plain = nn.Parameter(weight.dequantize().detach())
    weight.grad, plain.grad = torch.ones(48, 64), torch.ones(48, 64)
    for foreach in (True, False):
        total = nn.utils.clip_grad_norm_([weight], 1.0, foreach=foreach)
        assert torch.equal(total, nn.utils.clip_grad_norm_([plain], 1.0, foreach=foreach))
    nn.utils.clip_grad_value_([weight], 0.01)
    assert weight.grad.max() <= 0.01 and type(weight.grad) is torch.Tensor
    assert torch.equal(nn.utils.get_total_norm([weight]), nn.utils.get_total_norm([plain]))


@pytest.mark.parametrize("style", ["multi", "single"])
def test_ema(style, writes) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

    model = quantized_linear()
    options = (
        {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}
        if style == "multi"
        else {"avg_fn": get_ema_avg_fn(0.5)}
    )
    ema = AveragedModel(model, **options)
    ema.update_parameters(model)
    same_planes(ema.module.weight, model.weight)
    with torch.no_grad():
        model.weight.add_(1.0)
    mine = ema.module.weight
    want = torch.lerp(mine.dequantize(), model.weight.dequantize(), 0.5)
    writes.clear()
    ema.update_parameters(model)
    assert len(writes) <= 2 and isinstance(mine, QuantizedTensor)
    off = (mine.dequantize() - mine.quantizer(want).dequantize()).abs() > 1e-6
    assert off.float().mean() < 0.01
    assert not torch.equal(mine.dequantize(), model.weight.dequantize())


def test_in_place_bumps_the_version_and_autograd_refuses_what_is_stale() -> None:
    w = nn.Parameter(hybridq.quantize(torch.randn(48, 64), **HYBRID))
    x = torch.randn(3, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        w.add_(1.0)
    y = torch.nn.functional.linear(x, w)
    version = w._version
    with torch.no_grad():
        w.add_(1.0)
    assert w._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_on_a_tensor_with_history() -> None:
    x = torch.randn(8, 32, requires_grad=True)
    t = hybridq.quantize(x, "mxfp8")
    t.mul_(2.0)
    (t.dequantize() * 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full((8, 32), 6.0))


def test_gradient_through_views(weight) -> None:
    factor = torch.randn(48, 64)
    views = (
        lambda w: (w.view(4, 12, 64).dequantize(), factor.view(4, 12, 64)),
        lambda w: (w.t().dequantize(), factor.t()),
        lambda w: (w[16:32].dequantize() if is_q(w[16:32]) else w[16:32], factor[16:32]),
        lambda w: (w.detach().requires_grad_() * 0 + w, factor),
    )

    def is_q(t):
        return isinstance(t, QuantizedTensor)

    for view in views:
        weight.grad = None
        got, times = view(weight)
        (got * times).sum().backward()
        want = factor if times.numel() == factor.numel() else torch.zeros(48, 64)
        if want is not factor:
            want[16:32] = factor[16:32]
        assert torch.equal(weight.grad, want)


def _sources() -> dict[str, torch.Tensor]:
    return {
        "leaf": torch.randn(48, 64, requires_grad=True),
        "with history": torch.randn(48, 64, requires_grad=True) * 2,
        "quantized": nn.Parameter(hybridq.quantize(torch.randn(48, 64), "mxfp8")),
    }


#: Every way of writing a source into planes that autograd does not see.
WRITES = {
    "quantize_": lambda x, t: t.quantize_(x),
    "quantize_ of a part": lambda x, t: t[:16].quantize_(x[:16]),
    "update_quantized": lambda x, t: t.quantizer.update_quantized(x, t),
    "update_quantized of a part": lambda x, t: t.quantizer.update_quantized(x[:16], t[:16]),
    "out": lambda x, t: t.quantizer.quantize(x, out=t),
    "Float8Quantizer": lambda x, t: float8().update_quantized(x, t),
    "Float8Quantizer, out": lambda x, t: float8().quantize(x, out=t),
}


def float8() -> hybridq.quantizers.Float8Quantizer:
    return hybridq.quantizers.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")


@pytest.mark.parametrize("source", _sources())
@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_would_lose_a_gradient_is_refused(name: str, source: str) -> None:
    x = _sources()[source]
    target = (float8() if "Float8" in name else hybridq.quantizer(**HYBRID))(torch.randn(48, 64))
    before = target.clone()
    with pytest.raises(RuntimeError, match=r"source requires grad.*use target\.copy_\(source\)"):
        WRITES[name](x, target)
    same_planes(target, before)
    with torch.no_grad():
        WRITES[name](x, target)
    target.copy_(x)
    assert target.requires_grad
    target.dequantize().sum().backward()
    if x.is_leaf:
        assert torch.equal(x.grad, torch.ones(48, 64))

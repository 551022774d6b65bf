"""What optimizers, EMA, clipping, checkpoints and nn.Module call on a quantized parameter."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import hybridq
from hybridq import PlaneError, QuantizedTensor
from hybridq.tensor import DecodedPart
from tensor_tools import PAIRS, same_planes

HYBRID = PAIRS["hybrid"]


@pytest.fixture(params=sorted(PAIRS))
def weight(request) -> nn.Parameter:
    """A [48, 64] parameter of each kind of pair."""
    return nn.Parameter(hybridq.quantize(torch.randn(48, 64), **PAIRS[request.param]))


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


# ---- optimizers

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
}
MODES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


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

    model = _model()
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


# ---- copies


def test_copy_between_everything() -> None:
    x = torch.randn(32, 64)
    kinds = {name: hybridq.quantize(x, **options) for name, options in PAIRS.items()}
    for source in kinds.values():
        for target in kinds.values():
            mine = target.clone()
            mine.copy_(source)
            alike = (
                mine.tensor_storage.flatten()[1] == source.tensor_storage.flatten()[1]
                and mine.quantizer == source.quantizer
            )
            same_planes(mine, source if alike else mine.quantizer(source.dequantize()))
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            plain = torch.empty(32, 64, dtype=dtype).copy_(source)
            assert torch.equal(plain, source.dequantize().to(dtype))
        mine = source.clone()
        mine.copy_(torch.arange(64))  # broadcast, of another dtype
        same_planes(mine, mine.quantizer(torch.arange(64.0).expand(32, 64)))
    with pytest.raises(RuntimeError):
        kinds["uniform"].copy_(torch.zeros(5, 5))


def test_factories_make_plain_tensors_but_two(weight) -> None:
    """`new_zeros` and `empty_like` on another device are quantized; operators never fill such."""
    for made, shape in (
        (weight.new_zeros(7, 32), (7, 32)),
        (weight.new_zeros([0]), (0,)),
        (weight.new_zeros(size=(2, 3, 32), dtype=torch.bfloat16), (2, 3, 32)),
        (torch.empty_like(weight, device="meta"), (48, 64)),
        (torch.empty_like(torch.empty_like(weight, device="meta"), device="cpu"), (48, 64)),
    ):
        assert isinstance(made, QuantizedTensor) and made.shape == shape
        assert made.get_usages() == weight.get_usages() and made.quantizer == weight.quantizer
        if made.device.type != "meta":
            assert not made.dequantize().any()
            made.fill_(1.0)
    assert weight.new_zeros(3, dtype=torch.int64).dtype == torch.int64
    for plain in (
        torch.empty_like(weight),
        weight.new_empty(4, 32),
        torch.ops.aten.new_zeros(weight, [4, 32]),
        torch.zeros_like(weight),
        torch.ones_like(weight),
        torch.full_like(weight, 2.0),
        torch.randn_like(weight),
        weight.new_ones(4),
        weight.new_full((2,), 3.0),
        weight.new_tensor([1.0]),
    ):
        assert type(plain) is torch.Tensor and plain.dtype == torch.float32


def test_as_strided_of_the_same_geometry(weight) -> None:
    same = weight.as_strided(weight.size(), weight.stride())
    assert isinstance(same, QuantizedTensor)
    same_planes(same, weight)
    part = weight.detach()[32:]  # in torch, strides of a view count from the start of the whole
    for one, size, stride, offset in (
        (weight, (2, 2), (1, 1), None),
        (weight, weight.size(), weight.stride(), 64),
        (part, (2, 64), (64, 1), None),
        (weight[:, 1], (24,), (1,), 0),
        (weight.t(), (64, 48), (1, 64), None),
    ):
        with pytest.raises(RuntimeError, match="as_strided: a"):
            one.detach().as_strided(size, stride, offset)


def test_plain_facts(weight) -> None:
    assert weight.numel() == 48 * 64 and weight.stride() == (64, 1) and weight.is_contiguous()
    assert weight.element_size() == 4 and weight.is_floating_point() and weight.ndim == 2
    assert isinstance(weight, nn.Parameter) and isinstance(weight, torch.Tensor)
    assert len({weight, weight}) == 1 and weight in {weight} and {weight: 1}[weight] == 1
    other = weight.detach().clone()
    assert torch.equal(weight, other) and torch.allclose(weight, other)
    assert not torch.equal(weight, other + 1)
    assert (weight == other).all() and weight.isfinite().all()
    assert weight.detach().requires_grad_().requires_grad
    assert weight.tolist() == weight.dequantize().tolist()
    assert weight.detach().numpy().shape == (48, 64)
    assert weight.contiguous() is weight and weight.cpu() is weight
    assert weight.data_ptr() != other.data_ptr() and weight.data_ptr() == weight.data.data_ptr()
    assert not weight.is_shared()
    moved = weight.to("cpu", copy=True)
    same_planes(moved, weight)
    assert moved.data_ptr() != weight.data_ptr()
    for dtype in (torch.float64, torch.int32):
        plain = weight.detach().to(dtype)
        assert type(plain) is torch.Tensor and torch.equal(plain, weight.dequantize().to(dtype))


def test_is_pinned_says_no_without_an_accelerator_and_pin_memory_pins(weight) -> None:
    assert not weight.is_pinned()
    if not torch.cuda.is_available():
        pytest.skip("pin_memory needs an accelerator, and this machine has none")
    pinned = weight.pin_memory()
    assert pinned.is_pinned()
    same_planes(pinned, weight)


def test_the_storage_of_the_wrapper_is_not_readable(weight) -> None:
    with pytest.raises(RuntimeError):
        weight.untyped_storage().data_ptr()


def test_meta_device(weight) -> None:
    meta = weight.to("meta")
    assert isinstance(meta, QuantizedTensor) and meta.device.type == "meta"
    model = nn.Linear(64, 48, bias=False, device="meta")
    model.weight = nn.Parameter(meta)
    model.to_empty(device="cpu")
    assert isinstance(model.weight, QuantizedTensor) and model.weight.device.type == "cpu"
    model.load_state_dict({"weight": weight})
    same_planes(model.weight, weight)


# ---- data


def test_setting_data(weight) -> None:
    alias = weight.detach()
    before = weight.clone().detach()
    values = torch.randn(48, 64)
    weight.data = values  # plain: quantized by its quantizer, into new memory
    assert isinstance(weight, QuantizedTensor) and isinstance(weight, nn.Parameter)
    same_planes(weight, weight.quantizer(values))
    same_planes(alias, before)
    weight.data = before  # quantized: its planes, shared
    same_planes(weight, before)
    assert weight.data_ptr() == before.data_ptr() and weight.requires_grad
    other = hybridq.quantize(torch.randn(5, 32).bfloat16(), "nvfp4", columnwise=False)
    weight.data = other  # of any kind, shape and dtype
    assert type(weight) is hybridq.NVFP4Tensor and weight.shape == (5, 32)
    assert weight.dtype == torch.bfloat16
    same_planes(weight, other)
    weight.data.zero_()
    assert not weight.dequantize().any() and not other.dequantize().any()


def test_setting_data_refuses() -> None:
    t = hybridq.quantize(torch.randn(8, 32), "mxfp8")
    with pytest.raises(ValueError, match="quantize it first"):
        t.data = torch.zeros(8, 31)
    lone = QuantizedTensor.make(t.tensor_storage, t.shape, t.dtype)
    with pytest.raises(PlaneError, match="no quantizer"):
        lone.data = torch.zeros(8, 32)


# ---- autograd


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


# ---- modules


def _model(options=None) -> nn.Linear:
    model = nn.Linear(64, 48)
    model.weight = nn.Parameter(hybridq.quantize(model.weight.detach(), **(options or HYBRID)))
    return model


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_state_dict_round_trip(assign, swap) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        source, target = _model(), _model()
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        same_planes(target.weight, source.weight)
        assert isinstance(target.weight, nn.Parameter) and target.weight.requires_grad
        plain = nn.Linear(64, 48)
        target = _model()
        target.load_state_dict(plain.state_dict(), assign=assign)
        if assign:
            assert type(target.weight) is nn.Parameter
        else:
            same_planes(target.weight, target.weight.quantizer(plain.weight.detach()))
        plain.load_state_dict(source.state_dict(), assign=assign)
        if assign:
            same_planes(plain.weight, source.weight)
        else:
            assert torch.equal(hybridq_values(plain.weight), source.weight.dequantize())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def hybridq_values(t: torch.Tensor) -> torch.Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def test_module_conversions() -> None:
    model = _model()
    planes, values = model.weight.detach().clone(), model.weight.dequantize().detach()
    model.weight.grad = torch.ones(48, 64)
    model.to(torch.bfloat16)
    same_planes(model.weight, planes)
    assert model.weight.dtype == torch.bfloat16 == model.weight.grad.dtype == model.bias.dtype
    for convert, dtype in ((model.half, torch.float16), (model.float, torch.float32)):
        convert()
        assert isinstance(model.weight, QuantizedTensor) and model.weight.dtype == dtype
        assert isinstance(model.weight, nn.Parameter)
        x = torch.randn(2, 64, dtype=dtype)
        assert model(x).dtype == dtype
    if torch.equal(values.half().float(), values):  # else half rounded, and was quantized again
        same_planes(model.weight, planes)
    model.cpu()
    same_planes(model.to("cpu").weight, model.weight)
    twin = copy.deepcopy(model)
    same_planes(twin.weight, model.weight)
    assert twin.weight.data_ptr() != model.weight.data_ptr()
    assert torch.equal(twin.weight.grad, model.weight.grad)


def test_a_model_is_saved_and_loaded_whole() -> None:
    model = _model()
    model.weight.tag = "kept"
    twin = copy.deepcopy(model)
    assert twin.weight.tag == "kept" and isinstance(twin.weight, nn.Parameter)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    same_planes(loaded.weight, model.weight)
    assert isinstance(loaded.weight, nn.Parameter) and len(list(loaded.parameters())) == 2


def test_swap_tensors() -> None:
    a = nn.Parameter(hybridq.quantize(torch.randn(8, 32), "mxfp8"))
    b = nn.Parameter(hybridq.quantize(torch.randn(4, 64), "nvfp4", columnwise=False))
    one, two = a.detach().clone(), b.detach().clone()
    torch.utils.swap_tensors(a, b)
    same_planes(a, two)
    same_planes(b, one)
    assert type(a) is hybridq.NVFP4Tensor and a.shape == (4, 64)
    plain = nn.Parameter(torch.ones(2))
    torch.utils.swap_tensors(a, plain)
    assert type(a) is nn.Parameter and isinstance(plain, QuantizedTensor)


def test_parametrizations_and_functional_call() -> None:
    model = _model()
    x = torch.randn(2, 64)
    other = hybridq.quantize(torch.randn(48, 64), "mxfp8")
    got = torch.func.functional_call(model, {"weight": other}, (x,))
    assert torch.equal(got, nn.functional.linear(x, other, model.bias))
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.shape == (48 * 64 + 48,)
    nn.utils.vector_to_parameters(torch.zeros_like(vector), model.parameters())
    assert isinstance(model.weight, QuantizedTensor) and not model.weight.dequantize().any()


def test_distributed_checkpoint_round_trip(tmp_path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    source, target = _model(), _model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    target.load_state_dict(state["model"])
    same_planes(target.weight, source.weight)


def test_the_calls_of_fsdp2_on_a_parameter() -> None:
    """What FSDPParam._init_sharded_param does, for every rank of four and of three."""
    x = torch.randn(128, 64)
    for options in PAIRS.values():
        for ranks in (4, 3):
            param = nn.Parameter(hybridq.quantize(x, **options))
            with torch.no_grad():
                chunks = list(torch.chunk(param, ranks, dim=0))
                for shard in chunks:
                    padded = param.new_zeros(chunks[0].size())
                    window = padded.narrow(0, 0, shard.size(0))
                    if isinstance(window, DecodedPart):
                        with pytest.raises(RuntimeError, match="would not reach the tensor"):
                            window.copy_(shard)
                        continue
                    window.copy_(shard)
                    flat = padded.cpu().view(-1)
                    local = padded.narrow(0, 0, shard.size(0))
                    assert flat.numel() == padded.numel() and local.is_contiguous()
                    assert isinstance(padded, QuantizedTensor)
                    if ranks == 4 and isinstance(shard, QuantizedTensor):
                        assert isinstance(local, QuantizedTensor)
                        same_planes(local, shard)
                assert chunks[0].new_empty(0).numel() == 0

"""hybridq.GroupedLinear as a module: parameters, splits, roles, cached weights, errors."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import hybridq
from fake_indexing import Indexing
from grouped_model import (
    FEATURES,
    by_name,
    grouped,
    run_grouped,
    run_loop,
    same,
    singles,
    tokens_of,
)
from hybridq import CustomRecipe, GroupedLinear, RecipeError, autocast, recipes
from hybridq.formats import format
from hybridq.nn.autograd import TokenRows, grouped_function
from hybridq.nn.delayed_scaling.state import ScalingState
from hybridq.nn.modules import group_sizes as grouped_splits
from hybridq.quantizers import Float8CurrentScalingQuantizer, IdentityQuantizer, MXFP8Quantizer
from linear_model import Recorder, saved_tensors

RECIPES = recipes.names()
SIZES = (5, 0, 40)


def data(sizes=SIZES, dtype=torch.float32, extra: int = 0):
    x = tokens_of(sizes, dtype, extra)
    return x, torch.randn(x.shape[0], FEATURES[1]).to(dtype)


# ---- parameters


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("single", [(False, False), (True, False), (False, True), (True, True)])
def test_parameters_and_their_first_values(bias: bool, single) -> None:
    """Names and shapes of Transformer Engine; values that a list of nn.Linear would draw."""
    torch.manual_seed(3)
    module = GroupedLinear(
        3, 8, 5, bias, single_grouped_weight=single[0], single_grouped_bias=single[1]
    )
    torch.manual_seed(3)
    layers = [nn.Linear(8, 5, bias) for _ in range(3)]
    weights = ["weight"] if single[0] else ["weight0", "weight1", "weight2"]
    biases = ["bias"] if single[1] else ["bias0", "bias1", "bias2"]
    assert list(module.state_dict()) == weights + (biases if bias else [])
    parts = module._parts([*module._own_weights(), *module._biases()])
    same(parts[0], [layer.weight for layer in layers])
    same(parts[1], [layer.bias for layer in layers] if bias else [])
    assert "num_gemms=3, in_features=8, out_features=5" in repr(module)


def test_init_method_dtype_and_device() -> None:
    module = GroupedLinear(2, 8, 5, init_method=nn.init.ones_, dtype=torch.bfloat16, device="meta")
    assert module.weight0.is_meta and module.bias1.dtype == torch.bfloat16
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert (module.weight0 == 1).all() and (module.weight1 == 1).all()


def test_copies_pickles_and_checkpoints() -> None:
    module, (x, dy) = grouped(3, torch.float32, name="experts"), data()
    want = run_grouped(module, x, SIZES, dy, "mxfp8")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        same(run_grouped(other, x, SIZES, dy, "mxfp8"), want)
        assert other.name == "experts"
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = GroupedLinear(3, *FEATURES)
    fresh.load_state_dict(torch.load(file))
    same(run_grouped(fresh, x, SIZES, dy, "mxfp8"), want)


# ---- tokens and splits


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_current", "nvfp4"])
def test_tokens_of_no_group(recipe) -> None:
    """Behind the sum of device splits: zeros, no gradient, no part in anything."""
    module, (x, dy) = grouped(3, torch.float32), data(extra=7)
    x[-7:] = 1e6
    got = run_grouped(module, x, torch.tensor(SIZES), dy, recipe)
    want = run_grouped(module, x[:-7], list(SIZES), dy[:-7], recipe)
    assert not got[0][-7:].any() and not got[1][-7:].any()
    same([got[0][:-7], got[1][:-7], *got[2:]], want)


def test_device_splits_out_of_range_count_as_the_nearest() -> None:
    module, (x, dy) = grouped(3, torch.float32), data()
    want = run_grouped(module, x, [5, 0, 40], dy, "mxfp8")
    same(run_grouped(module, x, torch.tensor([5, -2, 99]), dy, "mxfp8"), want)


@pytest.mark.parametrize("shape", [(9, 5), (1, 45), (3, 3, 5), (45,)])
@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_any_batch_shape(shape, recipe) -> None:
    module, (x, dy) = grouped(3, torch.float32), data()
    want = run_grouped(module, x, SIZES, dy, recipe)
    shaped = run_grouped(module, x.view(*shape, -1), SIZES, dy.view(*shape, -1), recipe)
    assert shaped[0].shape == (*shape, FEATURES[1])
    same([shaped[0].flatten(0, -2), shaped[1].flatten(0, -2), *shaped[2:]], want)


@pytest.mark.parametrize("recipe", [None, "nvfp4", "fp8_current", "mxfp8"])
def test_sizes_of_zero_and_one(recipe) -> None:
    for features in ((0, 4), (4, 0), (1, 1)):
        module = GroupedLinear(2, *features)
        for splits in ([2, 1], torch.tensor([2, 1])):
            x = torch.ones(1, 3, features[0], requires_grad=True)
            with autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
                y = module(x, splits)
            assert y.shape == (1, 3, features[1])
            y.sum().backward()
            assert x.grad.shape == x.shape and module.weight0.grad.shape == features[::-1]
            if features[0] == 0:
                assert torch.equal(y[0, 2], module.bias1)


def test_strided_tokens() -> None:
    module, (x, dy) = grouped(3, torch.float32), data()
    want = run_grouped(module, x, SIZES, dy, "fp8_current")
    wide = torch.zeros(45, 80)
    wide[:, ::2] = x
    leaf = wide.requires_grad_()
    with autocast(recipe="fp8_current"):
        y = module(leaf[:, ::2], list(SIZES))
    assert torch.equal(y, want[0])
    y.backward(dy.t().contiguous().t())
    assert torch.equal(leaf.grad[:, ::2], want[1])


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4_1d_weight", "mxfp8"])
def test_a_nan_stays_in_its_group(recipe) -> None:
    module, (x, dy) = grouped(3, torch.float32), data()
    x[0] = float("nan")
    got = run_grouped(module, x, torch.tensor(SIZES), dy, recipe)
    assert got[0][0].isnan().all() and not got[0][5:].isnan().any()
    assert got[2].isnan().any() and not got[3].any() and not got[4].isnan().any()


def test_something_was_quantized() -> None:
    module, (x, dy) = grouped(3, torch.float32), data()
    plain = run_grouped(module, x, SIZES, dy, None)
    for recipe in set(RECIPES) - {"bf16", "high_precision"}:
        got = run_grouped(module, x, SIZES, dy, recipe)
        assert not torch.equal(got[0], plain[0]) or not torch.equal(got[1], plain[1]), recipe


# ---- recipes


def test_what_a_factory_is_asked() -> None:
    """One that reads names: for each group, by name; another: once for all."""
    asked = []

    def factory(role):
        asked.append((role.module_type, role.tensor_type, role.name))
        return MXFP8Quantizer()

    model = nn.ModuleDict({"experts": grouped(2, torch.float32)})
    hybridq.convert(model)
    x, _ = data((3, 4))
    with autocast(recipe=CustomRecipe(factory)):
        model["experts"](x, [3, 4])
        model["experts"](x, [7, 0])
    slots = ("input", "weight", "grad_output")
    assert asked == [("grouped_linear", s, f"experts.{g}") for g in range(2) for s in slots]
    asked.clear()
    factory.reads_names = False
    with autocast(recipe=CustomRecipe(factory, precision="exact")):
        model["experts"](x, [3, 4])
    assert asked == [("grouped_linear", s, "experts.0") for s in slots] or [
        one[1] for one in asked
    ] == list(slots)


def test_groups_with_different_quantizers_under_device_splits_with_padding() -> None:
    module, (x, dy) = grouped(3, torch.float32), data(extra=4)
    got = run_grouped(module, x, torch.tensor(SIZES), dy, CustomRecipe(by_name))
    want = run_loop(singles(module), x[:-4], SIZES, dy[:-4], CustomRecipe(by_name))
    assert not got[0][-4:].any() and not got[1][-4:].any()
    same([got[0][:-4], got[1][:-4], *got[2:]], want)


def test_weights_of_one_format_are_encoded_by_one_operation() -> None:
    module, (x, _) = grouped(3, torch.float32), data()
    with Recorder() as seen, autocast(recipe="mxfp8"), torch.no_grad():
        module(x, torch.tensor(SIZES))
    assert seen.ops.count("hybridq::encode_many") == 1
    assert seen.ops.count("hybridq::encode_ragged") == 1
    assert seen.ops.count("hybridq::grouped_gemm") == 1
    assert not any("item" in op or "local_scalar" in op for op in seen.ops)


def test_only_planes_are_saved() -> None:
    """A columnwise plane of the padded tokens and of each weight, and where the groups end."""
    module, (x, _) = grouped(3, torch.bfloat16, bias=False), data((128, 0, 256), torch.bfloat16)
    with saved_tensors() as found, autocast(recipe="mxfp8"):
        module(x.requires_grad_(), torch.tensor((128, 0, 256)))
    size = sum(t.numel() * t.element_size() for t in found)
    spec = format("mxfp8")
    planes = [spec.buffers(40, 3 * 128 + 3 * 128), *[spec.buffers(40, 24)] * 3]
    assert size == sum(b.numel for plane in planes for b in plane) + 3 * 4


# ---- cached weights, autocast, recomputation


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4_fwd_mxfp8_bwd"])
def test_cached_weights_change_no_bit_and_are_encoded_once(recipe, single) -> None:
    module, (x, dy) = grouped(3, torch.float32, single_grouped_weight=single), data()
    want = run_grouped(module, x, SIZES, dy, recipe)
    results = []
    for first in (True, False, False):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with autocast(recipe=recipe):
            y = module(leaf, torch.tensor(SIZES), is_first_microbatch=first)
        y.backward(dy)
        results.append([y.detach(), leaf.grad])
    for y, dx in results:
        same([y, dx], want[:2])
    kept = module._cached_weights
    assert sorted(kept) == ["0", "1", "2"] and all(one.has(True) for one in kept.values())
    buffers = [one.row[0] for one in kept.values()]
    with autocast(recipe=recipe):
        module(x, SIZES, is_first_microbatch=False)
        assert all(a is b.row[0] for a, b in zip(buffers, kept.values(), strict=True))
        with torch.no_grad():
            module._own_weights()[0].add_(1.0)
        changed = module(x, SIZES, is_first_microbatch=False)
    assert not torch.equal(changed, want[0])
    hybridq.forget(module)
    assert not module._cached_weights


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [None, "fp8_current"])
def test_torch_autocast(amp, recipe) -> None:
    module, (x, dy) = grouped(3, torch.float32), data()
    want = run_grouped(copy.deepcopy(module).to(amp), x.to(amp), SIZES, dy.to(amp), recipe)
    for splits in (SIZES, torch.tensor(SIZES)):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        with torch.autocast("cpu", dtype=amp):
            with autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
                y = module(leaf, splits)
            assert y.dtype == amp
            y.backward(dy.to(amp))
        got = [y.detach(), leaf.grad, *[p.grad for p in module.parameters()]]
        same(got, [one.to(t.dtype) for one, t in zip(want, got, strict=True)])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current", None])
def test_recomputation_gives_the_same_bits(recipe, reentrant: bool) -> None:
    module, (x, dy) = grouped(3, torch.float32), data()
    for splits in (list(SIZES), torch.tensor(SIZES)):
        want = run_grouped(module, x, splits, dy, recipe)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        torch.manual_seed(11)
        with autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            y = checkpoint(module, leaf, splits, use_reentrant=reentrant)
        y.backward(dy)
        same([y.detach(), leaf.grad, *[p.grad for p in module.parameters()]], want)


# ---- nothing waits, nothing breaks


@pytest.mark.parametrize("is_routed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_device_splits_are_never_read(recipe, is_routed: bool) -> None:
    """On CUDA tensors that have no values, where reading raises: the forward and the backward.

    The autograd engine starts no thread for a GPU that does not exist, so both are called by name.
    """
    plan = recipes.bind(recipes.get(recipe), "", "grouped_linear")
    with FakeTensorMode(), Indexing(), torch.no_grad():
        module = GroupedLinear(3, *FEATURES, device="meta", dtype=torch.bfloat16)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        params = [torch.empty(p.shape, **options) for p in module.parameters()]
        x, dy = torch.empty(45, FEATURES[0], **options), torch.empty(45, FEATURES[1], **options)
        rows = inverse = None
        if is_routed:  # three rows of each token
            x = x[:15]
            index = torch.empty(45, dtype=torch.int64, device="cuda")
            inverse = index.view(15, 3)
            rows = TokenRows(index, inverse)
        splits = torch.empty(3, dtype=torch.int64, device="cuda")
        assert grouped_splits.host_splits(splits, 3, dy, module._error) is None
        offsets = grouped_splits.group_offsets(splits, None, dy)
        seeds = torch.empty(3, dtype=torch.int64, device="cuda") if plan.is_stochastic else None
        layout = grouped_function.Layout(3, False, True, False, FEATURES)
        scales = None
        if plan.is_delayed:
            scales = [ScalingState(x.device, "grouped_linear").scales(plan, True) for _ in range(3)]
        call = grouped_function.GroupedCall(layout, plan, (), seeds, scales, rows=rows)
        y, x_col, w, own = grouped_function._forward(x, offsets, params, call, (True, True))
        assert y.shape == dy.shape and y.device.type == "cuda"
        saved = [*x_col, *w.cols] + ([] if seeds is None else [seeds])
        ctx = SimpleNamespace(
            into=(),
            plan=own,
            is_prepared=not w.rows,
            layout=layout,
            needs=(True, True, True),
            counts=(len(x_col), len(w.cols)),
            late=w.late,
            caches=(),
            scales=scales,
            activation=None,
            dtype=x.dtype,
            arriving=None,
        )
        dx, *grads = grouped_function._backward(ctx, offsets, saved, dy, inverse)
        assert dx.shape == x.shape
        assert [g.shape for g in grads] == [p.shape for p in params]


@pytest.mark.parametrize("single", [False, True])
def test_columns_that_are_decoded_rows_are_saved_as_rows(single) -> None:
    """Nothing is saved in high precision that has the size of a weight."""
    module = GroupedLinear(3, 64, 48, single_grouped_weight=single)
    x = torch.randn(40, 64, requires_grad=True)
    saved: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, autocast(recipe="mxfp8_fwd_high_precision_bwd"):
        module(x, [10, 0, 30])
    planes = [one for one in saved if one.dtype == torch.uint8 and tuple(one.shape) == (48, 64)]
    assert len(planes) == 3
    assert not [one for one in saved if one.is_floating_point() and one.numel() == 48 * 64]


def test_groups_with_different_quantizers_read_nothing() -> None:
    plans = [
        recipes.bind(CustomRecipe(by_name), f"experts.{g}", "grouped_linear") for g in (1, 2, 1)
    ]
    with FakeTensorMode(), Indexing(), torch.no_grad():
        options = {"device": "cuda", "dtype": torch.bfloat16}
        x, offsets = torch.empty(45, 40, **options), torch.empty(3, **options).int()
        groups = [grouped_splits.Group(one, torch.empty(24, 40, **options)) for one in plans]
        y = grouped_splits.mixed_linear(x, offsets, groups, FEATURES)
        assert y.shape == (45, 24) and y.device.type == "cuda"


# ---- errors


@pytest.mark.parametrize(
    ("splits", "error", "words"),
    [
        ([5, 0, 39], ValueError, "must sum to the 45 tokens of the input, got a sum of 44"),
        ([50, -5, 0], ValueError, r"must not be negative, got \[50, -5, 0\]"),
        ([45], ValueError, "one size for each of 3 groups, got 1"),
        ([5.0, 0, 40], TypeError, "must hold ints, got float"),
        ([True, 4, 40], TypeError, "must hold ints, got bool"),
        ("5,0,40", TypeError, "list or a tensor of ints, got str"),
        (None, TypeError, "list or a tensor of ints, got NoneType"),
        (torch.tensor([5.0, 0.0, 40.0]), TypeError, "int32 or int64, got torch.float32"),
        (torch.tensor([45]), ValueError, r"each of 3 groups, got shape \(1,\)"),
        (torch.tensor([5, 0, 40], device="meta"), ValueError, "on the input's device cpu, got"),
    ],
)
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_bad_splits(splits, error, words, recipe) -> None:
    module, (x, _) = grouped(3, torch.float32, name="moe.experts"), data()
    context = autocast(enabled=recipe is not None, recipe=recipe or "bf16")
    with context, pytest.raises(error, match=words) as caught:
        module(x, splits)
    assert "GroupedLinear moe.experts: " in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: torch.randn(45, 40, dtype=torch.bfloat16), RuntimeError, "same dtype"),
        (lambda: torch.randn(45, 40, dtype=torch.float64), TypeError, "float64"),
        (lambda: torch.randn(45, 41), RuntimeError, "in_features=40"),
        (lambda: torch.tensor(1.0), RuntimeError, "in_features=40"),
        (lambda: torch.randn(45, 40, device="meta"), RuntimeError, "one device"),
        (lambda: torch.randn(45, 40).to_sparse(), TypeError, "strided"),
        (lambda: [[1.0]], TypeError, "must be a Tensor"),
    ],
)
def test_bad_inputs(make, error, words) -> None:
    module = grouped(3, torch.float32)
    with autocast(recipe="mxfp8"), pytest.raises(error, match=words):
        module(make(), [5, 0, 40])
    if error is not TypeError or "Tensor" in words:
        with pytest.raises(error):
            module(make(), [5, 0, 40])


def test_mixed_parameters_are_refused() -> None:
    module, (x, _) = grouped(3, torch.float32), data()
    module.weight1 = nn.Parameter(module.weight1.to(torch.bfloat16))
    for recipe in (True, False):
        with autocast(enabled=recipe), pytest.raises(RuntimeError, match="one dtype"):
            module(x, list(SIZES))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 4, 4), ValueError, "num_gemms must be at least 1, got 0"),
        ((2.0, 4, 4), TypeError, "num_gemms must be an int, got 2.0"),
        ((2, -1, 4), ValueError, "in_features must not be negative, got -1"),
        ((2, 4, "4"), TypeError, "out_features must be an int, got '4'"),
    ],
)
def test_bad_constructor_arguments(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        GroupedLinear(*arguments)
    with pytest.raises(TypeError, match="name must be a string"):
        GroupedLinear(2, 4, 4, name=3)


def test_is_first_microbatch_must_be_a_bool() -> None:
    module, (x, _) = grouped(3, torch.float32), data()
    with pytest.raises(TypeError, match="is_first_microbatch must be a bool"):
        module(x, list(SIZES), 1)


def test_a_quantizer_that_a_gemm_cannot_use() -> None:
    def factory(role):
        if role.tensor_type == "weight":
            return MXFP8Quantizer(columnwise=False)
        return None if role.name.endswith("2") else IdentityQuantizer()

    module, (x, _) = grouped(3, torch.float32, name="experts"), data()
    words = r"experts\.0 \(grouped_linear\).*no columnwise"
    with autocast(recipe=CustomRecipe(factory)), pytest.raises(RecipeError, match=words):
        module(x, list(SIZES))


@pytest.mark.parametrize("splits", [list(SIZES), torch.tensor(SIZES)])
def test_double_backward_is_a_clear_error(splits) -> None:
    module, (x, _) = grouped(3, torch.float32), data()
    leaf = x.requires_grad_()
    recipe = CustomRecipe(lambda role: Float8CurrentScalingQuantizer("e4m3"))
    with autocast(recipe=recipe):
        y = module(leaf, splits)
    (dx,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="GroupedLinear: double backward is not supported"):
        dx.sum().backward()
    (dx,) = torch.autograd.grad(module(leaf, list(SIZES)).square().sum(), leaf, create_graph=True)
    dx.sum().backward()  # without a recipe it is torch's own

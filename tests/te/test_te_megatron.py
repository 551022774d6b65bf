"""What Megatron-Core 0.16 asks of Transformer Engine where it imports it and makes its modules."""

from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridq
import hybridq.te as te

IMPORTS = """
import hybridq.te
hybridq.te.stand_in()
import transformer_engine as te
from transformer_engine.pytorch.distributed import activation_recompute_forward
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast

assert [int(one) for one in te.__version__.split(".")] >= [2, 9]


class Recipe(te.common.recipe.DelayedScaling):
    def __init__(self, **more):
        super().__init__(margin=1, fp8_format=te.common.recipe.Format.HYBRID, amax_history_len=4,
                         amax_compute_algo="max", fp8_dpa=False, fp8_mha=False,
                         override_linear_precision=(False, False, False), **more)


def get(operation) -> te.pytorch.ops.FusibleOperation:
    return operation


import torch
given = {"params_dtype": torch.bfloat16, "device": "cpu"}
recipe = Recipe(**given)
assert recipe.current == te.common.recipe.DelayedScaling(margin=1, amax_history_len=4).current
norm = te.pytorch.RMSNorm(hidden_size=64, eps=1e-5, sequence_parallel=False, **given)
assert norm.weight.shape == (64,) and norm.weight.dtype == torch.bfloat16
"""


def test_its_imports_and_what_it_makes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_hidden_size_is_another_name_of_the_normalized_shape(kind: str) -> None:
    made = getattr(te, kind)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1)) + 2
    own, other = made(hidden_size=48, eps=1e-3), getattr(torch.nn, kind)(48, eps=1e-3)
    assert torch.allclose(own(x), other(x), rtol=1e-6, atol=1e-6)
    assert own.normalized_shape == made(48).normalized_shape
    with pytest.raises(TypeError, match=r"one of normalized_shape and hidden_size .* got both"):
        made(48, hidden_size=48)
    with pytest.raises(TypeError, match=r"one of normalized_shape and hidden_size .* got none"):
        made()


def test_products_in_high_precision_are_refused_by_delayed_scaling() -> None:
    with pytest.raises(NotImplementedError, match="override_linear_precision must be"):
        te.common.recipe.DelayedScaling(override_linear_precision=(False, False, True))


def test_operations_are_fusible_and_users_own_are_refused() -> None:
    assert isinstance(te.ops.Linear(8, 8), te.ops.FusibleOperation)
    assert isinstance(te.ops.SwiGLU(), te.ops.FusibleOperation)
    assert not isinstance(torch.nn.GELU(), te.ops.FusibleOperation)
    with pytest.raises(NotImplementedError, match=r"derive from torch.nn.Module"):
        type("Own", (te.ops.FusibleOperation,), {})


class Recomputed(torch.autograd.Function):
    """A checkpoint of another library's, in the way of Megatron-Core's."""

    @staticmethod
    def forward(ctx, run, recipe, x):
        ctx.run, ctx.recipe = run, recipe
        ctx.save_for_backward(x)
        with torch.no_grad(), te.distributed.activation_recompute_forward(True, False):
            return run(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        around = te.fp8_autocast(enabled=True, fp8_recipe=ctx.recipe)
        again = te.distributed.activation_recompute_forward(True, True)
        with torch.enable_grad(), around, again:
            y = ctx.run(x)
        torch.autograd.backward(y, dy)
        return None, None, x.grad


@pytest.mark.parametrize("kind", ["DelayedScaling", "MXFP8BlockScaling"])
def test_a_foreign_recomputation_has_the_gradients_of_a_plain_run(kind: str) -> None:
    found = []
    for recomputes in (False, True):
        torch.manual_seed(3)
        layer, rows = te.Linear(64, 32), torch.randn(3, 16, 64)
        recipe = getattr(te.common.recipe, kind)()
        for x in rows:
            own = x.clone().requires_grad_()
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                y = Recomputed.apply(layer, recipe, own) if recomputes else layer(own)
            y.square().sum().backward()
            hybridq.update_scaling(layer)
        found.append((y.detach(), own.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_experts_take_a_group_of_one_rank(tmp_path: Path) -> None:
    """`TEGroupedMLP` of experts that no tensor parallelism cuts names its group of one rank."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        made = []
        for options in (
            {},
            {"tp_group": torch.distributed.group.WORLD, "tp_size": 1, "parallel_mode": "column"},
            {"tp_group": torch.distributed.group.WORLD.group_name, "parallel_mode": "row"},
            {"tp_size": 1, "parallel_mode": "row", "sequence_parallel": True},
        ):
            torch.manual_seed(4)
            made.append(te.GroupedLinear(3, 32, 48, bias=False, **options))
        x, rows = torch.randn(12, 32), [2, 7, 3]
        with hybridq.autocast(recipe="mxfp8"):
            got = [one(x, rows) for one in made]
        parts = zip(x.split(rows), made[0].parameters(), strict=True)
        quantizer = hybridq.quantizer("mxfp8")
        want = [quantizer(a).dequantize() @ quantizer(w).dequantize().T for a, w in parts]
        assert torch.allclose(got[0], torch.cat(want), rtol=1e-5, atol=1e-5)
        assert all(torch.equal(one, got[0]) for one in got)
        with pytest.raises(NotImplementedError, match=r"parallel_mode must be None.*'rows'"):
            te.GroupedLinear(3, 32, 48, parallel_mode="rows")
        with pytest.raises(NotImplementedError, match=r"tp_size must be 1.* got 2"):
            te.GroupedLinear(3, 32, 48, tp_size=2, parallel_mode="row")
    finally:
        torch.distributed.destroy_process_group()


class Split(te.GroupedLinear):
    """Reads and puts together its extra state by groups, as `TEGroupedLinear` does."""

    def __init__(self) -> None:
        super().__init__(3, 32, 48, bias=False)
        self._register_load_state_dict_pre_hook(self._merge)

    def _merge(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.init_fp8_metadata(num_gemms=self.num_gemms)
        keys = [f"{prefix}_extra_state{i or ''}" for i in range(self.num_gemms)]
        if keys[1] in state:
            parts = [state.pop(key) for key in keys]
            state[keys[0]] = parts[0] if parts[0].numel() == 0 else torch.cat(parts)

    def _split_extra_state(self, state: torch.Tensor) -> list[Any]:
        if not (self.fp8_meta["fp8_checkpoint"] or self.fp8 or self.fp8_calibration):
            return [state] * self.num_gemms
        whole = pickle.loads(state.numpy().tobytes())
        assert whole["extra_fp8_variables"]["num_gemms"] == self.num_gemms
        # Megatron-Core looks at it again when it puts them together.
        own = self.fp8_meta["recipe"]
        is_delayed = isinstance(own, te.common.recipe.DelayedScaling)
        assert whole["recipe"] == (own if is_delayed else None)
        length = self.fp8_meta["scaling_fwd"].amax_history.shape[0]
        return [
            (
                whole["scale_fwd"].view(3, -1)[:, i],
                whole["amax_history_fwd"].view(length, 3, -1)[:, :, i],
                whole["scale_bwd"].view(2, -1)[:, i],
                whole["amax_history_bwd"].view(length, 2, -1)[:, :, i],
            )
            for i in range(self.num_gemms)
        ]


@pytest.mark.parametrize("kind", [None, "DelayedScaling", "MXFP8BlockScaling"])
def test_experts_have_the_state_that_is_split_by_groups(kind: str | None) -> None:
    torch.manual_seed(5)
    layer, other, rows = Split(), Split(), [2, 7, 3]
    for x in torch.randn(2, 12, 32) if kind else ():
        recipe = getattr(te.common.recipe, kind)()
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            layer(x, rows).square().sum().backward()
        hybridq.update_scaling(layer)
    state = layer.state_dict()
    parts = layer._split_extra_state(state["_extra_state"])
    assert len(parts) == 3
    if kind is None:
        assert all(one.numel() == 0 for one in parts)
    for i, one in enumerate(parts if kind == "DelayedScaling" else ()):
        meta = layer.fp8_meta
        scales, histories, backward, own = one
        assert torch.equal(scales, meta["scaling_fwd"].scale[3 * i : 3 * i + 3])
        assert torch.equal(histories, meta["scaling_fwd"].amax_history[:, 3 * i : 3 * i + 3])
        assert torch.equal(backward, meta["scaling_bwd"].scale[2 * i : 2 * i + 2])
        assert torch.equal(own, meta["scaling_bwd"].amax_history[:, 2 * i : 2 * i + 2])
        assert scales[0] != 1
        assert histories.max() > 0
    assert other.load_state_dict(state) == ([], [])
    assert all(
        torch.equal(*pair) for pair in zip(layer.parameters(), other.parameters(), strict=True)
    )
    assert "_extra_state" not in te.GroupedLinear(3, 32, 48).state_dict()
    assert "_extra_state" in hybridq.state_dict_with_history(layer)


@pytest.mark.parametrize(
    ("make", "dims"),
    [
        (lambda: te.GroupedLinear(2, 64, 32), {"weight0": 0, "weight1": 0}),
        (lambda: te.GroupedLinear(2, 64, 32, parallel_mode="row"), {"weight0": 1, "weight1": 1}),
        (lambda: te.Linear(64, 32), {"weight": 0}),
        (lambda: te.Linear(64, 32, parallel_mode="row", tp_size=2), {"weight": 1}),
        (lambda: te.LayerNormLinear(64, 32), {"weight": 0}),
        (lambda: te.LayerNormMLP(64, 32), {"fc1_weight": 0, "fc2_weight": 1}),
    ],
)
def test_weights_are_parts_to_norms_of_gradients(
    make: Callable[[], Any], dims: dict[str, int]
) -> None:
    """Megatron-Core divides experts itself, and counts on later ranks what is marked alone."""
    module = make()
    for again in (False, True):
        if again:
            module.to_empty(device="cpu")
            module.reset_parameters()
        for name, own in module.named_parameters():
            is_part = getattr(own, "tensor_model_parallel", False)
            assert (own.partition_dim if is_part else None) == dims.get(name)


class Column(te.LayerNormLinear):
    """Sets and reads what `TELayerNormColumnParallelLinear` does."""

    def __init__(self, **options: Any) -> None:
        self.tp_size = options.get("tp_size", 1)  # before the module is one
        self.sequence_parallel, self.tp_group = False, None
        super().__init__(
            in_features=64, out_features=96, parallel_mode="column", ub_name="fc1", **options
        )

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, TP={self.tp_size}, {self.use_bias}"


def test_modules_say_what_they_were_told_of_ranks(tmp_path: Path) -> None:
    duplicated = te.Linear(64, 32, bias=False)  # of MLA, whose sharded_state_dict asks
    assert duplicated.parallel_mode is None and duplicated.tp_group is None
    assert (duplicated.tp_size, duplicated.sequence_parallel) == (1, False)
    assert not duplicated.use_bias and duplicated.ub_name is None
    two = Column(tp_size=2, sequence_parallel=True)
    assert "in=64, out=48, TP=2, True" in repr(two)
    assert (two.parallel_mode, two.ub_name, two.tp_group) == ("column", "fc1", None)
    assert two.sequence_parallel and two.parallel[""].sequence_parallel
    two.sequence_parallel = False  # as Megatron-Core does around its own gathers
    assert not two.sequence_parallel and not two.parallel[""].sequence_parallel
    mlp = te.LayerNormMLP(64, 96, set_parallel_mode=True, tp_size=2, bias=False)
    assert (mlp.tp_size, mlp.use_bias) == (2, False)
    layer = te.TransformerLayer(64, 96, 4, bias=False, tp_size=2, set_parallel_mode=True)
    own = layer.self_attention
    assert (own.proj.tp_size, own.proj.parallel_mode, own.proj.use_bias) == (2, "row", False)
    assert own.layernorm_qkv.parallel_mode == "column" and not own.layernorm_qkv.use_bias
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        one = Column(tp_group=group, sequence_parallel=True)
        assert one.tp_group is group and one.tp_size == 1 and one.parallel_mode == "column"
        twin = copy.deepcopy(one)
        assert twin.tp_group is group
        later = Column()
        later.set_tensor_parallel_group(group)
        assert later.tp_group is group
        experts = te.GroupedLinear(2, 64, 96, tp_group=group, parallel_mode="row")
        assert experts.tp_group is group and experts.tp_size == 1
        assert experts.parallel_mode == "row" and experts.use_bias
    finally:
        torch.distributed.destroy_process_group()


def reduced(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that gradients are moved to once they are there, as by Megatron-Core's DDP."""
    into = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    owners = {
        id(one): module for module in model.modules() for one in module.parameters(recurse=False)
    }
    for name, one in model.named_parameters():

        def move(*_: Any, one: Any = one, buffer: torch.Tensor = into[name]) -> None:
            buffer.add_(one.grad)
            one.grad = None

        if getattr(one, "skip_backward_post_hook", False):
            owners[id(one)].register_wgrad_accumulation_and_reduce_hooks(move)
        else:
            one.register_post_accumulate_grad_hook(move)
    return into


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: te.Linear(32, 32, **o),
        lambda **o: te.LayerNormLinear(32, 32, **o),
        lambda **o: te.LayerNormMLP(32, 48, activation="swiglu", **o),
        lambda **o: te.GroupedLinear(1, 32, 32, **o),
        lambda **o: te.ops.Linear(32, 32, **o),
    ],
)
@pytest.mark.parametrize("is_low", [False, True])
def test_gradients_that_wait_are_reduced_when_they_are_there(make: Any, is_low: bool) -> None:
    around = te.quantized_model_init if is_low else contextlib.nullcontext
    with around():
        late, at_once = make(delay_wgrad_compute=True), make()
    at_once.load_state_dict(late.state_dict())
    found = []
    for module in (late, at_once):
        into, splits = reduced(module), [[8]] if isinstance(module, te.GroupedLinear) else []
        for seed in (0, 1):
            torch.manual_seed(seed)
            with te.autocast():
                y = module(torch.randn(8, 32), *splits)
            y.square().sum().backward()
            module.backward_dw()
        found.append(into)
    assert all(one.any() for one in found[1].values())
    assert all(torch.equal(found[0][name], one) for name, one in found[1].items())

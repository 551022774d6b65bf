"""Loads of experts: counted, balanced by biases, and experts placed by them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import hybridq
from hybridq.moe import (
    ExpertLoads,
    ExpertsLayout,
    balance_biases_,
    convert_experts,
    expert_copies,
    expert_placement,
    permute_experts_,
)
from own_experts import OwnExperts
from rank_runs import needs_gloo, run

LAYOUT = ExpertsLayout("up", "down", gate_up_bias="bias", scale="scale", has_gate=False)


class Own(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 64, 32) / 6)
        self.down = nn.Parameter(torch.randn(experts, 32, 64) / 6)
        self.bias = nn.Parameter(torch.randn(experts, 64))
        self.register_buffer("scale", torch.rand(experts) + 0.5)


class Router(nn.Linear):
    """Sigmoid scores; a bias takes part in the choice alone."""

    def __init__(self, experts: int) -> None:
        super().__init__(32, experts)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Block(nn.Module):
    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.gate, self.experts = Router(experts), convert_experts(Own(experts), LAYOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        top = (scores + self.gate.e_score_correction_bias).topk(2).indices
        return self.experts(x, top, scores.gather(1, top))


def made(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block()


def test_counts_and_biases_are_those_of_the_formula() -> None:
    model, bias = made(), np.zeros(8, np.float32)
    loads = ExpertLoads(model)
    for step in range(5):
        x = torch.randn(40, 32)
        scores = model.gate(x).sigmoid().detach().numpy() + bias
        top = np.argsort(-scores, 1, kind="stable")[:, :2]
        count = np.bincount(top.flatten(), minlength=8)
        with hybridq.autocast(recipe="mxfp8"):
            model(x[:30]), model(x[30:])  # microbatches
        assert loads.counts["experts"].tolist() == count.tolist()
        told = balance_biases_(model, loads, 0.01)
        bias = bias + np.float32(0.01) * np.sign(count.mean() - count).astype(np.float32)
        assert np.array_equal(model.gate.e_score_correction_bias.numpy(), bias), step
        assert told == {"experts": pytest.approx(count.max() / count.mean())}
        assert not loads.counts["experts"].any()
    loads.close()
    with hybridq.autocast(recipe="mxfp8"):
        model(torch.randn(4, 32))
    assert not loads.counts["experts"].any()


def test_loads_become_even() -> None:
    model = made()
    model.gate.bias.data[0] = 3.0
    loads, x = ExpertLoads(model), torch.randn(512, 32)
    told = []
    with hybridq.autocast(recipe="mxfp8"):
        for _ in range(60):
            model(x)
            told.append(balance_biases_(model, loads, 0.02)["experts"])
    assert told[0] > 3 and told[-1] < 1.5


def test_what_is_recomputed_or_evaluated_is_not_counted() -> None:
    model = made()
    loads, x = ExpertLoads(model), torch.randn(6, 32, requires_grad=True)
    with hybridq.autocast(recipe="mxfp8"):
        hybridq.checkpoint(model, x).sum().backward()
    assert loads.counts["experts"].sum() == 12
    model.eval()
    with hybridq.autocast(recipe="mxfp8"):
        model(x)
    assert loads.counts["experts"].sum() == 12
    of_all = ExpertLoads(model, training_only=False)
    with hybridq.autocast(recipe="mxfp8"):
        model(x)
    assert of_all.counts["experts"].sum() == 12
    loads.reset()
    assert loads.imbalance() == {"experts": 0.0}


def test_experts_of_given_sizes_and_indices_of_none() -> None:
    experts = convert_experts(Own(4), LAYOUT)
    loads = ExpertLoads(nn.ModuleDict({"experts": experts}))
    with hybridq.autocast(recipe="mxfp8"):
        experts(torch.randn(3, 32), torch.tensor([[0, 4], [3, -1], [3, 0]]), torch.ones(3, 2))
    assert loads.counts["experts"].tolist() == [2, 0, 0, 2]


@pytest.mark.parametrize(
    ("experts", "ranks", "groups"), [(8, 2, 1), (7, 3, 1), (16, 8, 4), (8, 4, 4)]
)
def test_placements_are_permutations_that_even_out(experts: int, ranks: int, groups: int) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        loads = generator.pareto(1.0, experts) + 0.01
        order = expert_placement(loads, ranks, groups).tolist()
        assert sorted(order) == list(range(experts))
        size = experts // groups
        assert all(place // size == one // size for place, one in enumerate(order))
        each = -(-experts // ranks)
        parts = [order[at : at + each] for at in range(0, experts, each)]
        assert all(part == sorted(part) for part in parts)
        if experts == 8 and ranks == 2:  # as good as the best of all, but for a third (Graham)
            best = min(
                max(loads[list(one)].sum(), loads.sum() - loads[list(one)].sum())
                for one in itertools.combinations(range(8), 4)
            )
            assert max(loads[part].sum() for part in parts) <= 4 / 3 * best + 1e-9


def test_a_permuted_model_is_the_same_function() -> None:
    model, moved = made(), made()
    order = [3, 0, 7, 1, 2, 6, 5, 4]
    permute_experts_(moved, {"experts": order})
    x = torch.randn(50, 32)
    with hybridq.autocast(recipe="mxfp8"):
        a, b = model(x), moved(x)
    assert torch.equal(a, b)
    assert torch.equal(model.gate(x)[:, order], moved.gate(x))
    assert torch.equal(model.experts.scale[order], moved.experts.scale)
    back = np.argsort(order).tolist()
    permute_experts_(moved, {"experts": back})
    for one, two in zip(model.state_dict().values(), moved.state_dict().values(), strict=True):
        assert torch.equal(one, two)


class Biased(nn.Module):
    """A block that adds a bias of its own for the choice, and may have a second gate."""

    def __init__(self, hidden: int = 32, has_noise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layout = ExpertsLayout()
        own = OwnExperts(layout, sizes=(8, hidden, 16))
        self.gate, self.experts = nn.Linear(hidden, 8), convert_experts(own, layout)
        self.expert_bias = nn.Parameter(torch.randn(8))
        self.noise = nn.Linear(hidden, 8) if has_noise else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        if self.noise is not None:
            scores = scores + self.noise(x)
        best = (scores + self.expert_bias).topk(2).indices
        made: torch.Tensor = self.experts(x, best, scores.gather(1, best))
        return made


def test_what_the_block_has_for_each_expert_moves_too() -> None:
    order = {"experts": [3, 0, 7, 1, 2, 6, 5, 4]}
    model, moved = Biased(), Biased()
    permute_experts_(moved, order)
    x = torch.randn(50, 32)
    with hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(model(x), moved(x))
    # A second gate, or a vector that may be of features, must be named.
    with pytest.raises(ValueError, match=r"noise.weight of as many.*routers=.*'noise'\)"):
        permute_experts_(Biased(has_noise=True), order)
    with pytest.raises(ValueError, match=r"expert_bias of as many.*routers=.*'expert_bias'\)"):
        permute_experts_(Biased(hidden=8), order)
    for options, names in (
        ({"has_noise": True}, ("gate", "noise")),
        ({"hidden": 8}, ("gate", "expert_bias")),
    ):
        model, moved = Biased(**options), Biased(**options)
        permute_experts_(moved, order, routers=names)
        x = torch.randn(50, model.gate.in_features)
        with hybridq.autocast(recipe="mxfp8"):
            assert torch.equal(model(x), moved(x))


def test_a_bias_beside_the_router_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.MiniMaxM2Config(
        vocab_size=96, hidden_size=64, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hybridq.convert(transformers.AutoModelForCausalLM.from_config(config))
    blocks = [layer.mlp for layer in model.model.layers]
    for block in blocks:
        block.e_score_correction_bias.normal_()
    ids = torch.randint(0, 96, (2, 16))
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
        before = model(ids).logits
    orders = {f"model.layers.{n}.mlp.experts": [3, 0, 7, 1, 2, 6, 5, 4] for n in range(2)}
    permute_experts_(model, orders)
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(model(ids).logits, before)


def test_errors_say_what_to_do() -> None:
    model = made()
    loads = ExpertLoads(model)
    with pytest.raises(ValueError, match=r"call hybridq.convert or parallelize_experts before"):
        ExpertLoads(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"must be an nn.Module, got int"):
        ExpertLoads(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loads must be ExpertLoads, got dict"):
        balance_biases_(model, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rate must be above 0, got 0"):
        balance_biases_(model, loads, 0)
    with pytest.raises(ValueError, match="got none of other"):
        balance_biases_(nn.ModuleDict({"other": made().experts}), loads)
    with pytest.raises(ValueError, match=r"plain float32 tensor of 8 experts.*bfloat16 \[8\]"):
        balance_biases_(model, loads, biases={"experts": torch.zeros(8, dtype=torch.bfloat16)})
    del model.gate.e_score_correction_bias
    with pytest.raises(ValueError, match="must have one e_score_correction_bias, got 0"):
        balance_biases_(model, loads)
    for wrong, ranks, groups in (
        ([1.0, -1.0], 1, 1),
        ([1.0] * 4, 5, 1),
        ([1.0] * 4, 2, 3),
        ([1.0] * 4, 2, 4),
    ):
        with pytest.raises(ValueError, match="must"):
            expert_placement(wrong, ranks, groups)
    for orders in ({"other": range(8)}, {"experts": [0] * 8}, {"experts": [0, 1]}):
        with pytest.raises(ValueError, match="permute_experts_"):
            permute_experts_(model, {key: list(one) for key, one in orders.items()})
    with pytest.raises(ValueError, match="give routers="):
        permute_experts_(model, {"experts": list(range(8))}, routers=("route",))
    model.gate.n_group = 2
    with pytest.raises(ValueError, match="chooses among 2 groups first"):
        permute_experts_(model, {"experts": [7, 1, 2, 3, 4, 5, 6, 0]})
    model.gate.register_buffer("other", torch.zeros(3))
    with pytest.raises(ValueError, match=r"a row for each of 8 experts, got \[3\]"):
        permute_experts_(model, {"experts": list(range(8))})


def test_a_router_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.DeepseekV3Config(
        vocab_size=96, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_group=2, topk_group=1,
        n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=0, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    hybridq.convert(model)
    loads, ids = ExpertLoads(model), torch.randint(0, 96, (2, 16))
    with hybridq.autocast(recipe="mxfp8"):
        before = model(ids).logits
    name = "model.layers.1.mlp.experts"
    assert loads.total()[name].sum() == 2 * 16 * 2
    orders = {one: expert_placement(count, 4, groups=2) for one, count in loads.counts.items()}
    permute_experts_(model, orders)
    with hybridq.autocast(recipe="mxfp8"):
        after = model(ids).logits
    assert torch.allclose(before, after, rtol=1e-5, atol=1e-6)
    told = balance_biases_(model, loads)
    assert set(told) == set(loads.counts)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert set((bias.abs() * 1e3).round().tolist()) <= {0.0, 1.0} and bias.any()


@needs_gloo
def test_loads_of_two_ranks(tmp_path) -> None:
    run(2, tmp_path / "store", "loads", program="experts_overlap_program.py")


def test_copies_go_to_ranks_that_have_less_to_do() -> None:
    assert expert_copies([8, 1, 1], 2) == {0: (1,)}
    assert expert_copies([8, 1, 1, 1], 2) == {0: (1,), 2: (0,)}
    assert expert_copies([8, 1, 1, 1], 2, least_gain=0.1) == {0: (1,)}
    assert expert_copies([1, 1, 1, 1], 2) == {}  # nothing to gain
    assert expert_copies([100] + [1] * 7, 4) == {0: (1, 2, 3)}
    rng = np.random.default_rng(0)
    for ranks, each in itertools.product((2, 4, 8), (1, 2)):
        loads = rng.pareto(1.0, 16) + 0.1
        found = expert_copies(loads, ranks, each)
        sums, taken = np.zeros(ranks), np.zeros(ranks, int)
        for expert, load in enumerate(loads):
            home = [expert * ranks // 16, *found.get(expert, ())]
            assert len(set(home)) == len(home)
            sums[home] += load / len(home)
            taken[home[1:]] += 1
        assert taken.max(initial=0) <= each
        assert sums.max() <= loads.reshape(ranks, -1).sum(1).max()
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="each must be copies of a rank"):
            expert_copies([1, 1], 2, wrong)
    with pytest.raises(ValueError, match="least_gain must be from 0 to 1"):
        expert_copies([1, 1], 2, least_gain=-1)
    with pytest.raises(ValueError, match="expert_copies: loads must be numbers"):
        expert_copies([-1.0, 1.0], 2)


COPIES = "experts_copies_program.py"


@needs_gloo
def test_copies_of_experts_change_no_result(tmp_path) -> None:
    run(2, tmp_path / "store", "results", "states", "dealt", "faults", program=COPIES)


@needs_gloo
@pytest.mark.slow
def test_copies_of_experts_in_one_graph(tmp_path) -> None:
    run(2, tmp_path / "store", "folded", program=COPIES)


@needs_gloo
@pytest.mark.slow
def test_copies_of_experts_on_four_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "results", "states", "dealt", "folded", "faults", program=COPIES)

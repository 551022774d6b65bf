"""What ranks do with their own shards, and whose shards are replaced: `shards_program.py`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import GatheredWeight, prepare_fsdp2, wire_nbytes
from hybridq.distributed.agreement import recipe_agreement as agreement
from hybridq.distributed.agreement.recipe_agreement import Note, check_trailers, trailer
from rank_runs import needs_gloo, run

PROGRAM = "shards_program.py"


@needs_gloo
def test_a_rank_that_reads_its_shard_and_models_that_start_on_the_meta_device(tmp_path) -> None:
    run(2, tmp_path / "store", "readers", "first_inference", "reset", program=PROGRAM)


@needs_gloo
@pytest.mark.more
def test_a_rank_that_writes_its_shard_and_shards_that_are_replaced(tmp_path) -> None:
    run(2, tmp_path / "store", "writers", "averages", "assigned", program=PROGRAM)


@needs_gloo
@pytest.mark.more
def test_gathers_that_begin_under_another_recipe(tmp_path) -> None:
    run(2, tmp_path / "store", "recipes_of_blocks", "recipes_in_flight", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_gathers_for_graphs_that_begin_under_another_recipe(tmp_path) -> None:
    run(2, tmp_path / "store", "recipes_of_graphs", program=PROGRAM, timeout=600.0)


@needs_gloo
@pytest.mark.more
def test_resharding_over_fewer_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "reshard_to_two", program=PROGRAM)


@needs_gloo
def test_the_recipe_of_a_modules_own_forward_decides() -> None:
    """Whatever recipe its gather begins under; from the second time on it travels once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = hybridq.Linear(64, 48)
        twin = copy.deepcopy(layer)
        fully_shard(prepare_fsdp2(layer))
        x = torch.randn(4, 64)
        run_under(layer, x, "mxfp8")
        for begun, own in ((None, "nvfp4"), ("mxfp8", "nvfp4_1d_weight"), ("nvfp4", None)):
            sizes = []
            for _ in range(2):
                before = wire_nbytes(layer)
                with hybridq.autocast(enabled=begun is not None, recipe=begun or "bf16"):
                    layer.unshard()
                mine, whole = (run_under(one, x, own) for one in (layer, twin))
                assert all(torch.equal(*pair) for pair in zip(mine, whole, strict=True)), own
                sizes.append(wire_nbytes(layer) - before)
            assert sizes[0] > sizes[1], "nothing was gathered again, or it was not learned"
    finally:
        dist.destroy_process_group()


@needs_gloo
def test_modules_that_share_a_weight_have_formats_of_their_own() -> None:
    def factory(role: hybridq.QuantizerRole) -> hybridq.Quantizer:
        return hybridq.quantizer("mxfp8" if role.name == "0" else "nvfp4")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        twin = hybridq.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
        twin[1].weight = twin[0].weight
        model = copy.deepcopy(twin)
        fully_shard(prepare_fsdp2(model))
        x = torch.randn(4, 32)
        for _ in range(2):
            found = []
            for one in (model, twin):
                with hybridq.autocast(recipe=hybridq.CustomRecipe(factory)):
                    y = one(x)
                y.square().sum().backward()
                grad = one[0].weight.grad
                found.append((y.detach(), grad.full_tensor() if one is model else grad))
            for mine, whole in zip(*found, strict=True):
                assert torch.equal(mine, whole)
            for one in (model, twin):
                one.zero_grad()
    finally:
        dist.destroy_process_group()


def test_what_ranks_note_beside_their_wishes(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "_global_rank", lambda group, rank: rank)
    own, other, cpu = b"0" * 16, b"1" * 16, torch.device("cpu")
    notes = list(range(4))
    trailers = torch.stack([trailer(own, cpu, note) for note in notes])
    found = check_trailers(trailers, own, own, "weight", None, 0)
    assert found == Note.WRITTEN | Note.STEPPED
    assert check_trailers(trailers[:1], own, own, "weight", None, 0) == 0
    with pytest.raises(
        RuntimeError, match=r"for weight one recipe .* on rank 0, another on ranks 1-2"
    ):
        mixed = torch.stack([trailer(other, cpu), trailers[0], trailers[0]])
        check_trailers(mixed, other, other, "weight", None, 0)
    agreement._check_same(notes[1:2] * 3, "weight", None)
    with pytest.raises(RuntimeError, match=r"by no optimizer on rank 1 only; .*shard.add_\(0\)"):
        agreement._check_same([notes[0], notes[1]], "weight", None)  # on a GPU


def run_under(layer: nn.Module, x: torch.Tensor, recipe: str | None) -> list[torch.Tensor]:
    """The output, and the gradients of input and weight."""
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        y = layer(x)
    y.square().sum().backward()
    grad = layer.weight.grad
    layer.zero_grad()
    return [y.detach(), x.grad, getattr(grad, "full_tensor", lambda: grad)()]


def test_only_what_lies_in_the_parameters_memory_is_prepared() -> None:
    weight = prepare_fsdp2(hybridq.Linear(8, 6)).weight
    values = weight.detach()
    assert type(values) is GatheredWeight
    before = values.writes.stamp
    for copied in (values.clone(), torch.empty_like(values), values.double(), values + 0):
        assert type(copied) is torch.Tensor
        copied.zero_()
    torch.abs(values, out=torch.empty(6, 8))
    assert values.writes.stamp == before, "a read is no write"
    with torch.inference_mode():
        views = [values.narrow(0, 0, 3), values.t(), values[1], values.view(-1)]
    for view in (*views, *values.unbind(1), values.diagonal(), values.view(torch.int32)):
        assert type(view) is GatheredWeight and view.writes is values.writes
    for number, write in enumerate((values[0].zero_, values.t().zero_, lambda: out_of(values))):
        write()
        assert values.writes.stamp[1] == before[1] + number + 1


def out_of(values: torch.Tensor) -> None:
    torch.add(torch.ones(6, 8), 1, out=values)


def test_shards_are_read_as_any_tensor() -> None:
    weight = prepare_fsdp2(hybridq.Linear(4, 3)).weight
    values = weight.detach() + 0
    assert weight.tolist() == values.tolist()
    assert (weight.detach().numpy() == values.numpy()).all()
    assert (weight.numpy(force=True) == values.numpy()).all()
    with pytest.raises(RuntimeError, match="numpy: a tensor that requires grad must be detached"):
        weight.numpy()
    with pytest.raises(RuntimeError, match="copy the model before that"):
        copy.deepcopy(weight)
    assert type(pickle.loads(pickle.dumps(weight.detach()))) is torch.Tensor


def test_weights_stay_prepared_where_a_module_moves_or_replaces_them() -> None:
    model = prepare_fsdp2(nn.Sequential(hybridq.Linear(4, 3)))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(torch.float16).to_empty(device="cpu")
    assert type(model[0].weight.data) is GatheredWeight and model[0].weight.dtype == torch.float16
    model.load_state_dict(state, assign=True)
    assert type(model[0].weight.data) is GatheredWeight and model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight.detach() + 0, state["0.weight"])


#: Without a recipe these multiply plain weights, and their backward is torch's own.
PLAIN = {
    "Linear": lambda: hybridq.Linear(64, 48),
    "LayerNormMLP": lambda: hybridq.LayerNormMLP(64, 96),
    "GroupedLinear": lambda: hybridq.GroupedLinear(2, 64, 48),
}


@needs_gloo
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_backward_after_a_gather_for_a_recipe_says_what_to_do(name: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = PLAIN[name]()
        fully_shard(prepare_fsdp2(model))
        x = torch.randn(8, 64, requires_grad=True)

        def forward(recipe: str | None) -> torch.Tensor:
            with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
                return model(x, *([[4, 4]] if name == "GroupedLinear" else []))

        plain = forward(None)
        forward("mxfp8").sum().backward()
        with pytest.raises(RuntimeError, match=r"freed by FSDP2.*run that backward before"):
            plain.sum().backward()
        if torch.__version__ < "2.11":  # whose FSDP2 gathers nothing after a backward that failed
            return
        model.reshard()
        forward(None).sum().backward()
        forward("mxfp8").sum().backward()
    finally:
        dist.destroy_process_group()

"""Clips of groups: each channel, block or row has the one that it would have alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import MSE, Calibration, Max, Percentile, calibrate

RATIOS = (1.0, 0.99, 0.98, 0.96, 0.9, 0.7)


def alone(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The clip of a tensor by itself, which the library's own encode has chosen."""
    running = MSE(name, RATIOS).start()
    for _ in range(2):
        for part in parts:
            running(part)
        running.begins_again()
    return running.amax()


def together(observer: MSE, parts: list[torch.Tensor]) -> torch.Tensor:
    running = observer.start(features=parts[0].shape[1])
    for again in (True, False):
        for part in parts:
            running(part)
        assert running.begins_again() == again
    return running.amax()


def uneven(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Groups of very different sizes; of even values inside, so that other scales may err less."""
    x = (torch.rand(rows, cols) - 0.5) * torch.randn(cols).exp() * torch.randn(rows, 1).exp()
    x[:, 3] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_and_blocks_have_the_clips_of_their_own_values(name, dtype):
    torch.manual_seed(1)
    parts = [uneven(40, 22, dtype) for _ in range(2)]
    got = together(MSE(name, RATIOS, "channel"), parts)
    want = [alone(name, [one[:, c : c + 1] for one in parts]) for c in range(22)]
    assert torch.equal(got, torch.stack(want))
    largest = torch.cat(parts).abs().amax(0).float()
    assert len((got[largest > 0] / largest[largest > 0]).unique()) > 2, "clips must differ"
    got = together(MSE(name, RATIOS, "block", 8), parts)
    want = [alone(name, [one[:, c : c + 8] for one in parts]) for c in range(0, 22, 8)]
    assert torch.equal(got, torch.stack(want))


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_rows_of_a_weight_have_the_clips_of_their_own_values(name):
    torch.manual_seed(2)
    weight = uneven(12, 64)
    weight[5] = 0.0
    got = together(MSE(name, RATIOS, "row"), [weight])
    want = torch.stack([alone(name, [weight[r : r + 1]]) for r in range(12)])
    assert torch.equal(got, want) and got[5] == 0.0
    assert bool((got < weight.abs().amax(1)).any()), "nothing was clipped"
    rows = together(MSE("nvfp4;rows", RATIOS, "row"), [weight])
    assert torch.equal(rows, together(MSE("nvfp4", RATIOS, "row"), [weight]))


def test_rows_of_weights_in_a_pass(tmp_path):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 40))
    with torch.no_grad():
        net[0].weight.copy_(uneven(8, 24))
    data = [uneven(30, 24) for _ in range(2)]
    observers = {"input": MSE(granularity="channel"), "weight": MSE(granularity="row")}
    found = calibrate(net, data, hybridq.recipe(fprop="fp8_e4m3"), observer=observers)
    weight = net[0].weight.detach()
    wanted = MSE("fp8_e4m3", granularity="row")
    assert torch.equal(found.amax("0", "weight"), together(wanted, [weight]))
    assert found.amax("1", "weight").shape == (40,) and found.amax("1", "input").shape == (8,)
    wanted = MSE("fp8_e4m3", granularity="channel")
    assert torch.equal(found.amax("0", "input"), together(wanted, data))
    assert found.observers["weight"] == "mse per row, 16 clips from 0.25 to 1"
    found.save(tmp_path / "found.safetensors")
    back = Calibration.load(tmp_path / "found.safetensors")
    assert torch.equal(back.amax("0", "weight"), found.amax("0", "weight"))
    for make in (Max("row"), Percentile("row", percent=100)):
        found = calibrate(net, data, observer={"weight": make})
        assert torch.equal(found.amax("0", "weight"), weight.abs().amax(1))


def test_experts_have_rows_each():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    model = transformers.MixtralForCausalLM(config)
    batch = {"input_ids": torch.arange(12)[None]}
    found = calibrate(
        model, [batch], hybridq.recipe(fprop="nvfp4"), observer={"weight": MSE(granularity="row")}
    )
    name = "model.layers.0.mlp.experts.down_proj"
    down = model.model.layers[0].mlp.experts.down_proj.detach()
    assert found.amax(name, "weight").shape == (3, 32)
    want = together(MSE("nvfp4", granularity="row"), [down[2]])
    assert torch.equal(found.amax(f"{name}.2", "weight"), want)


def test_ranks_choose_the_clips_of_all_their_values():
    """Three observers that share what they have after each pass, the last of which sees nothing."""
    torch.manual_seed(5)
    parts = [uneven(30, 10), uneven(20, 10)]
    observer = MSE("fp8_e4m3", RATIOS, "channel")
    ranks = [observer.start(features=10) for _ in range(3)]
    for how in ("max", "sum"):
        for rank, part in zip(ranks, parts, strict=False):
            rank(part)
        shared = [rank.shared() for rank in ranks]
        assert [one[0] for one in shared] == [how] * 3
        values = torch.stack([one[1] for one in shared])
        assert values.shape == (3, 10 if how == "max" else 60)
        for rank in ranks:
            rank.take_shared(values.amax(0) if how == "max" else values.sum(0))
            assert rank.begins_again() == (how == "max")
    want = together(observer, parts)
    for rank in ranks:
        assert torch.equal(rank.amax(), want)


def test_what_has_no_clip_of_its_own_is_refused():
    for call, text in (
        (lambda: MSE(granularity="token"), "got the granularity 'token'"),
        (lambda: MSE(granularity="colum"), "MSE: granularity must be one of"),
        (lambda: MSE(block=4), "MSE: block must be a positive number"),
        (lambda: MSE("nvfp4", granularity="channel").start(), "each channel need a format"),
        (lambda: MSE("nvfp4_16x16", granularity="row").start(), "each row need a format"),
        (
            lambda: calibrate(nn.Linear(16, 16), [torch.ones(1, 16)], observer=Max("row")),
            "only rows of weights have an amax each.*'max per row' for 'input'",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    # Formats without an amax of more than a block clip nothing.
    x = uneven(8, 64)
    running = MSE("mxfp8", granularity="row").start()
    running(x)
    assert not running.begins_again() and torch.equal(running.amax(), x.abs().amax(1))

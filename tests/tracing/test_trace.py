"""Traces: digests are hashlib's own of the planes, and the first difference is the one made."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridq
from hybridq.tracing import compare


def run(path: Path, steps: int = 2, flip: int | None = None, **options: bool) -> nn.Module:
    """Train a little; before step `flip` change one bit of the second layer's weight."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    model = hybridq.convert(nn.Sequential(*layers), least_width=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hybridq.trace(path, model, **options) as writer:
        for step in range(steps):
            if step == flip:
                with torch.no_grad():
                    model[2].weight.view(torch.int32)[1, 3] ^= 1 << 20
            with hybridq.autocast(recipe="nvfp4"):
                loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            writer.step()
    return model


def test_digests_are_those_of_the_planes(tmp_path: Path) -> None:
    x, layer = torch.randn(32, 64), hybridq.Linear(64, 64)
    with hybridq.trace(tmp_path / "a", layer) as writer:
        with hybridq.autocast(recipe="mxfp8"):
            y = layer(x)
        writer.step()
    header, *lines, end = map(json.loads, (tmp_path / "a").read_text().splitlines())
    assert header == {"format": "hybridq-trace", "version": 1} and end == {"end_of_step": 0}
    planes = hybridq.quantize(x, "mxfp8", columnwise="mxfp8")
    want = {("input", "values", "data"): x, ("output", "values", "data"): y.detach()}
    for direction in ("rowwise", "columnwise"):
        for name, buffer in getattr(planes, direction).buffers.items():
            want["input", direction, name] = buffer
    found = {(one["tensor"], one["direction"], one["buffer"]): one for one in lines}
    for key, tensor in want.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert found[key]["sha256"] == hashlib.sha256(raw).hexdigest(), key
        assert found[key]["shape"] == list(tensor.shape)
    assert {key[0] for key in found} == {"input", "weight", "output"}


def test_equal_runs_have_equal_traces_and_a_traced_run_is_the_same(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", values=True)
    assert compare(tmp_path / "a", tmp_path / "b") is None
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other)
    assert '"grad_output"' in (tmp_path / "a").read_text()


@pytest.mark.parametrize("values", [True, False])
def test_the_first_difference_is_the_bit_that_was_changed(tmp_path: Path, values: bool) -> None:
    run(tmp_path / "a", values=values)
    run(tmp_path / "b", flip=1, values=values)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found is not None
    assert found[:5] == (1, "2", "weight", "values", "data")
    # Value [1, 3] of 64 columns of four bytes; bit 20 is bit 4 of the third byte.
    place = (4 * (64 + 3) + 2, 4) if values else (None, None)
    assert (found.byte, found.bit) == place
    assert ("byte 270, bit 4" in str(found)) == values


def test_what_is_no_trace_of_the_same_model_is_said(tmp_path: Path) -> None:
    run(tmp_path / "a", 1)
    text = (tmp_path / "a").read_text()
    lines = text.splitlines(keepends=True)
    cases = {
        "must be a whole JSON object": text[: len(text) // 2],
        "must end with the end of a step": "".join(lines[:-1]),
        "must be a trace of version 1": '{"format": "other"}\n',
        "got fewer in": text + text[len(lines[0]) :],
        "must be of one model and recipe": text.replace('"module": "2"', '"module": "3"'),
        "must be of one kind": text.replace("float32", "float64"),
        r"line 2 must have step, module": lines[0] + "{}\n",
    }
    for said, content in cases.items():
        (tmp_path / "b").write_text(content)
        with pytest.raises(ValueError, match=said):
            compare(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="that can be read"):
        compare(tmp_path / "a", tmp_path / "none")
    with pytest.raises(ValueError, match="that can be written"):
        hybridq.trace(tmp_path / "none" / "a")


@pytest.mark.slow  # a process
def test_the_command_says_it(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    run(tmp_path / "a", values=True)
    run(tmp_path / "b", flip=1, values=True)
    (tmp_path / "c").write_text("")
    for other, status, said in (("a", 0, "the same"), ("b", 1, "byte 270, bit 4"), ("c", 2, "")):
        given = [sys.executable, "-m", "hybridq", "compare", "a", other]
        done = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == status and said in done.stdout, done.stderr


def test_a_model_in_the_place_of_the_path_is_told() -> None:
    with pytest.raises(TypeError, match=r"path must be that of a file, got Linear.*trace\(path"):
        hybridq.trace(nn.Linear(4, 4))  # type: ignore[arg-type]


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:-1]]


def test_products_of_another_model_are_not_written(tmp_path: Path) -> None:
    """A teacher with the same names runs in the loop, with a trace of its own or without."""
    for name in ("alone", "beside"):
        torch.manual_seed(0)
        model, teacher = (hybridq.convert(nn.Sequential(nn.Linear(64, 64))) for _ in range(2))
        x, theirs = torch.randn(32, 64), torch.randn(32, 64)
        with (
            hybridq.trace(tmp_path / name, model) as writer,
            hybridq.trace(tmp_path / "teacher", teacher) as other,
            hybridq.trace(tmp_path / "all") as every,
        ):
            with hybridq.autocast(recipe="mxfp8"):
                if name == "beside":
                    teacher(theirs)
                model(x).sum().backward()
            for one in (writer, other, every):
                one.step()
    assert (tmp_path / "alone").read_bytes() == (tmp_path / "beside").read_bytes()
    own, taught, both = (lines_of(tmp_path / one) for one in ("beside", "teacher", "all"))
    assert both == taught + own and {line["module"] for line in both} == {"0"}
    want = hashlib.sha256(theirs.numpy().tobytes()).hexdigest()
    assert taught[0]["sha256"] == want and own[0]["sha256"] != want
    assert not any(line["tensor"] == "grad_output" for line in taught)


def test_attention_of_another_model_is_not_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = hybridq.recipes.with_attention(hybridq.recipes.get("mxfp8"))
    options = {"qkv_format": "bshd", "attn_mask_type": "no_mask", "name": "core"}
    model, other = (hybridq.nn.DotProductAttention(2, 32, **options) for _ in range(2))
    x = torch.randn(1, 16, 2, 32)
    with hybridq.trace(tmp_path / "a", model) as writer, hybridq.autocast(recipe=recipe):
        other(x, x, x)
        writer.step()
        model(x, x, x)
        writer.step()
    steps = [line["step"] for line in lines_of(tmp_path / "a") if "step" in line]
    assert set(steps) == {1}


def test_modules_that_come_into_the_model_later_are_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with hybridq.trace(tmp_path / "a", model) as writer:
        hybridq.convert(model)
        model.append(hybridq.Linear(64, 64))
        model(torch.ones(32, 64))
        writer.step()
    assert [line["module"] for line in lines_of(tmp_path / "a")] == ["0"] * 3 + ["1"] * 3


@pytest.mark.parametrize("given", [5, "no base64!", None])
def test_bytes_that_are_none_are_told(tmp_path: Path, given: object) -> None:
    place = {"step": 0, "module": "0", "tensor": "input", "direction": "rowwise", "buffer": "data"}
    for name, digest in (("a", "0" * 64), ("b", "1" * 64)):
        line = {**place, "dtype": "uint8", "shape": [1], "sha256": digest, "bytes": given}
        lines = ({"format": "hybridq-trace", "version": 1}, line, {"end_of_step": 0})
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(ValueError, match="compare: bytes of 0/0/input/rowwise/data must be Base64"):
        compare(tmp_path / "a", tmp_path / "b")


def test_experts_have_the_numbers_that_they_have_among_all_ranks(tmp_path: Path) -> None:
    layer = hybridq.GroupedLinear(2, 32, 32)
    layer.first_matrix, layer.all_matrices = 3, 5  # as on the last of two ranks
    model = nn.ModuleDict({"experts": layer})
    with hybridq.trace(tmp_path / "a", model) as writer:
        with hybridq.autocast(recipe="mxfp8"):
            layer(torch.randn(8, 32), [5, 3])
        writer.step()
    lines = [json.loads(text) for text in (tmp_path / "a").read_text().splitlines()]
    named = {one["module"] for one in lines if one.get("tensor") in ("input", "weight")}
    assert named == {"experts.3", "experts.4"}


def test_a_model_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="trace: model must be a Module or None, got list"):
        hybridq.trace(tmp_path / "a", [])  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_trainer_by_its_rollout(tmp_path: Path, recipe: str) -> None:
    """A server has one plane of each weight and no gradients: forwards are compared alone."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    trainer = hybridq.convert(nn.Sequential(*layers), least_width=0).to(torch.bfloat16)
    server = hybridq.quantize_model(copy.deepcopy(trainer), recipe)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    with hybridq.trace(tmp_path / "a", trainer, values=True) as writer:
        with hybridq.autocast(recipe=recipe):
            trainer(x).square().mean().backward()
        writer.step()
    with hybridq.trace(tmp_path / "b", server, values=True) as writer, torch.no_grad():
        server(x)
        writer.step()
    assert compare(tmp_path / "a", tmp_path / "b", forward=True) is None
    with pytest.raises(ValueError, match="one model and recipe"):
        compare(tmp_path / "a", tmp_path / "b")
    # A server that was sent older weights.
    with torch.no_grad():
        trainer[2].weight[5, 7] += 0.5
    server = hybridq.quantize_model(copy.deepcopy(trainer), recipe)
    with hybridq.trace(tmp_path / "c", server, values=True) as writer, torch.no_grad():
        server(x)
        writer.step()
    found = compare(tmp_path / "a", tmp_path / "c", forward=True)
    assert found is not None
    assert found[:4] == (0, "2", "weight", "rowwise")


def test_traces_without_a_product_are_not_the_same(tmp_path: Path) -> None:
    """A model that was not converted shows nothing: there is nothing to be equal."""
    model = hybridq.convert(nn.Sequential(nn.Linear(64, 64)))
    for name, run in (("a", nn.Linear(64, 64)), ("b", nn.Linear(64, 64))):
        with (
            pytest.warns(hybridq.HybridQWarning, match="has no product of 1 steps, since none"),
            hybridq.trace(tmp_path / name, model) as trace,
        ):
            with hybridq.autocast(recipe="mxfp8"):
                run(torch.ones(8, 64))
            trace.step()
    with pytest.raises(ValueError, match="must have something to compare, got no product in"):
        hybridq.tracing.compare(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").write_text(json.dumps({"format": "hybridq-trace", "version": 1}) + "\n")
    with pytest.raises(ValueError, match="must have something to compare"):
        hybridq.tracing.compare(tmp_path / "c", tmp_path / "c", forward=True)


def test_digests_of_other_programs_are_read(tmp_path: Path) -> None:
    """Large letters are the same digits; what is no digest is an error, and no difference."""
    model = hybridq.convert(nn.Sequential(nn.Linear(64, 64)))
    with hybridq.trace(tmp_path / "a", model) as trace:
        with hybridq.autocast(recipe="mxfp8"):
            model(torch.ones(8, 64))
        trace.step()
    head, *lines = (tmp_path / "a").read_text().splitlines()
    for name, digest in (("large", str.upper), ("short", lambda text: text[:8])):
        read = [json.loads(line) for line in lines]
        for one in read:
            if "sha256" in one:
                one["sha256"] = digest(one["sha256"])
        (tmp_path / name).write_text("".join(f"{x}\n" for x in (head, *map(json.dumps, read))))
    assert hybridq.tracing.compare(tmp_path / "a", tmp_path / "large") is None
    with pytest.raises(ValueError, match=r"short, line 2 must have a sha256 of 64 hexadecimal"):
        hybridq.tracing.compare(tmp_path / "a", tmp_path / "short")

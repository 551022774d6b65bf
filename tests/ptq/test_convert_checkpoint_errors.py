"""What a conversion refuses: in one line, the input untouched, and nothing that looks finished."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import hybridq
from checkpoint_tools import INDEX, Notes, convert, digests, shard_name, write_raw, write_sharded
from hybridq.ptq import ConvertOptions, Selection, convert_checkpoint

QUANTIZER = hybridq.quantizer("mxfp8", None)


@pytest.fixture
def source(tmp_path) -> Path:
    shards = [{f"{i}.up.weight": torch.randn(64, 64), f"{i}.bias": torch.ones(3)} for i in range(2)]
    return write_sharded(tmp_path / "in", shards)


def refused(source: Path, target: Path, match: str, selection=QUANTIZER, **options) -> None:
    """The call raises, the source is as it was, and the target holds no checkpoint."""
    before = digests(source) if source.is_dir() else {}
    with pytest.raises(hybridq.CheckpointError, match=match) as caught:
        convert(source, target, selection, **options)
    assert "\n" not in str(caught.value)
    if source.is_dir():
        assert digests(source) == before
    if target.is_dir() and target.resolve() != source.resolve():
        assert not list(target.glob("*.partial")) and not list(target.glob(".*.partial"))
        assert not (target / INDEX).exists()


def edit_index(source: Path, change) -> None:
    index = json.loads((source / INDEX).read_text())
    change(index)
    (source / INDEX).write_text(json.dumps(index))


def cut(source: Path) -> None:
    path = source / shard_name(1, 2)
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "a cut shard": (cut, r"00002-of-00002\.safetensors is no whole safetensors file"),
    "a missing shard": (
        lambda s: (s / shard_name(1, 2)).unlink(),
        r"names model-00002-of-00002\.safetensors, which is not there",
    ),
    "a missing tensor": (
        lambda s: edit_index(s, lambda i: i["weight_map"].update(x=shard_name(0, 2))),
        r"has 'x' in model-00001-of-00002\.safetensors, which lacks it",
    ),
    "a tensor elsewhere": (
        lambda s: edit_index(s, lambda i: i["weight_map"].update({"0.bias": shard_name(1, 2)})),
        r"has '0\.bias' in model-00002.*, which lacks it",
    ),
    "a tensor in two shards": (
        lambda s: save_file(
            {"0.bias": torch.ones(3), "1.up.weight": torch.ones(64, 64), "1.bias": torch.ones(3)},
            s / shard_name(1, 2),
        ),
        r"'0\.bias' is in model-00001.* and in model-00002",
    ),
    "a path": (
        lambda s: edit_index(s, lambda i: i["weight_map"].update(x="../x.safetensors")),
        r"must name \.safetensors files that lie beside it, and no paths, got '\.\./x\.saf",
    ),
    "a folder inside": (
        lambda s: edit_index(s, lambda i: i["weight_map"].update(x="sub/x.safetensors")),
        r"must name \.safetensors files that lie beside it, and no paths, got 'sub/x\.safet",
    ),
    "another type": (
        lambda s: edit_index(s, lambda i: i["weight_map"].update(x=3)),
        "must name .* files, got 3",
    ),
    "no map": (lambda s: edit_index(s, lambda i: i.pop("weight_map")), "has no weight_map"),
    "no JSON": (lambda s: (s / INDEX).write_text("{"), "is no index"),
    "a list": (lambda s: (s / INDEX).write_text("[]"), "is no index"),
    "a name twice": (lambda s: (s / INDEX).write_text('{"a": 1, "a": 2}'), "names 'a' twice"),
    "two checkpoints": (
        lambda s: shutil.copy(s / shard_name(0, 2), s / "model.safetensors"),
        "has both model.safetensors and an",
    ),
    "nothing": (
        lambda s: [path.unlink() for path in s.iterdir()],
        r"has neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_source(kind, source, tmp_path):
    damage, match = DAMAGES[kind]
    damage(source)
    refused(source, tmp_path / "out", match)
    assert not (tmp_path / "out").exists()
    with pytest.raises(hybridq.CheckpointError, match=match):
        hybridq.load_checkpoint(source)


def test_a_source_that_is_none(tmp_path):
    refused(tmp_path / "none", tmp_path / "out", "there is no ")
    (tmp_path / "a.bin").write_bytes(b"x")
    refused(tmp_path / "a.bin", tmp_path / "o.safetensors", r"a file must end in \.safetensors")


def test_places_of_the_target(source, tmp_path):
    refused(source, source, "source and target must differ")
    (tmp_path / "link").symlink_to(source)
    refused(source, tmp_path / "link", "source and target must differ")
    refused(source, source / "out", "must not lie in the source")
    refused(source, tmp_path, "must not lie in the target")
    file = source / shard_name(0, 2)
    refused(file, tmp_path / "out.bin", r"must end in \.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    refused(file, tmp_path / "folder.safetensors", "so the target must be one, got the folder")
    (tmp_path / "file").write_text("x")
    refused(source, tmp_path / "file", "so the target must be one, got the file")
    refused(file, tmp_path / "none" / "o.safetensors", "there is no folder")
    (tmp_path / "locked").write_text("x")
    refused(source, tmp_path / "locked" / "out", "cannot make ")


def test_a_target_with_something_else_in_it(source, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("x")
    for overwrite in (False, True):
        refused(source, target, r"is not empty .* \(mine\.txt\)", overwrite=overwrite)
    assert digests(target).keys() == {"mine.txt"}
    file, there = source / shard_name(0, 2), tmp_path / "o.safetensors"
    there.write_text("x")
    refused(file, there, "exists; overwrite replaces it")
    assert there.read_text() == "x"
    convert(file, there, QUANTIZER, overwrite=True)
    assert "0.up.weight" in hybridq.load_checkpoint(there)


def test_a_converted_checkpoint_is_not_converted_again(source, tmp_path):
    convert(source, tmp_path / "out", QUANTIZER)
    refused(tmp_path / "out", tmp_path / "again", "holds quantized tensors already")


def test_a_name_that_is_taken(tmp_path):
    tensors = {"a.weight": torch.ones(32, 32), "a.weight.rowwise.data": torch.ones(3)}
    write_sharded(tmp_path / "in", [dict([item]) for item in tensors.items()])
    refused(
        tmp_path / "in",
        tmp_path / "out",
        r"'a\.weight' would be stored as 'a\.weight\.rowwise\.data', a name that another",
    )


def test_nothing_to_quantize(source, tmp_path):
    refused(
        source, tmp_path / "out", "no tensor of .* is chosen", Selection(QUANTIZER, include=("x",))
    )
    refused(
        source, tmp_path / "out", "no tensor", Selection(QUANTIZER, include=("*.bias", "nothing"))
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "needs a quantizer or a recipe"),
        ({"quantizer": QUANTIZER, "recipe": "mxfp8"}, "needs a quantizer or a recipe"),
        ({"recipe": "mxfp9"}, "recipe: must be one of"),
        ({"quantizer": hybridq.quantizer("mxfp8", stochastic=True)}, "stochastically"),
        ({"quantizer": hybridq.IdentityQuantizer()}, "must quantize"),
        ({"quantizer": replace(hybridq.quantizer("nvfp4"), amax_group="0")}, "group of processes"),
    ],
)
def test_a_selection_that_makes_no_checkpoint(arguments, match):
    with pytest.raises(ValueError, match=match):
        Selection(**arguments)


def test_too_little_memory():
    with pytest.raises(ValueError, match="at least 67108864 bytes, got 1000"):
        ConvertOptions(memory=1000)


def test_values_that_are_not_finite(source, tmp_path):
    weight = torch.randn(64, 64)
    weight[3, 5] = float("nan")
    weight[9] = float("inf")
    save_file({"1.up.weight": weight, "1.bias": torch.ones(3)}, source / shard_name(1, 2))
    target = tmp_path / "out"
    refused(source, target, r"'1\.up\.weight' has 65 values .* which strict refuses", strict=True)
    assert {path.name for path in target.iterdir()} == {".hybridq-convert", shard_name(0, 2)}
    notes = convert(source, target, QUANTIZER)  # the same job: strict changes no byte
    assert notes.warnings == ["'1.up.weight' has 65 values that are NaN or infinite"]
    found = notes.outcome.tensors["1.up.weight"]
    assert (found.amax, found.num_nonfinite) == (None, 65)
    assert found.errors["rowwise"].relative is None
    refused_again = Notes()
    with pytest.raises(hybridq.CheckpointError, match="strict refuses"):
        options = ConvertOptions(strict=True)
        convert_checkpoint(source, target, Selection(QUANTIZER), options, refused_again)
    shutil.rmtree(target)
    with pytest.warns(hybridq.HybridQWarning, match="65 values"):  # who has no observer is warned
        convert_checkpoint(source, target, Selection(QUANTIZER))


def test_a_full_disk_before_anything_is_written(source, tmp_path, monkeypatch):
    nearly = SimpleNamespace(f_bavail=2, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: nearly)
    refused(source, tmp_path / "out", r"what is left of .* needs \d+ bytes in .*, which has 8192 ")
    file = source / shard_name(0, 2)
    nearly.f_bavail = 0
    refused(
        file, tmp_path / "o.safetensors", r"o\.safetensors needs \d+ bytes .*, which has 0 free"
    )
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_while_it_is_written(call, code, source, tmp_path, monkeypatch):
    own, count = getattr(os, call), [0]

    def fails(*args, **options):
        # The first calls are the journal's.
        count[0] += 1
        if count[0] > 4:
            raise OSError(code, os.strerror(code))
        return own(*args, **options)

    target = tmp_path / "out"
    match = "no space left for .* run again" if code == errno.ENOSPC else "cannot write .*output"
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        refused(source, target, match)
    before = {path.name for path in target.iterdir() if path.suffix == ".safetensors"}
    notes = convert(source, target, QUANTIZER)
    assert notes.outcome.num_kept == len(before) or call != "pwrite"
    convert(source, tmp_path / "whole", QUANTIZER)
    assert digests(target) == digests(tmp_path / "whole")


def test_a_source_that_changes_while_it_is_read(source, tmp_path):
    class Touches(Notes):
        def advance(self, nbytes):
            path = source / shard_name(0, 2)
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    with pytest.raises(hybridq.CheckpointError, match="has changed while it was read"):
        convert_checkpoint(source, tmp_path / "out", Selection(QUANTIZER), observer=Touches())
    assert not (tmp_path / "out" / shard_name(0, 2)).exists()

    class Cuts(Notes):
        def shard(self, name, what):
            os.truncate(source / shard_name(0, 2), 500)

    with pytest.raises(hybridq.CheckpointError, match="has become shorter while it was read"):
        convert_checkpoint(source, tmp_path / "out2", Selection(QUANTIZER), observer=Cuts())


def test_a_large_file_beside_the_weights_is_left_out(source, tmp_path):
    with (source / "video.mp4").open("wb") as file:
        file.truncate((256 << 20) + 1)
    notes = convert(source, tmp_path / "out", QUANTIZER)
    assert notes.warnings == ["video.mp4 is too large for a configuration and was not copied"]
    assert not (tmp_path / "out" / "video.mp4").exists()


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    write_raw(tmp_path / "a.safetensors", {}, b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install hybridq\[checkpoints\]"):
        hybridq.load_checkpoint(tmp_path / "a.safetensors")


def test_no_warning_without_a_reason(source, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_checkpoint(source, tmp_path / "out", Selection(QUANTIZER))


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (
            ["consolidated.safetensors", "params.json"],
            r"give the file \S+consolidated\.safe",
        ),
        (
            ["a.safetensors", "adapter_model.safetensors"],
            r"give the file \S+a\.safetensors its",
        ),
        (["a.safetensors", "b.safetensors"], "but a.safetensors and 1 more; an .* must name them$"),
        (["adapter_model.safetensors"], "but adapter_model.safetensors: merge the adapter into"),
        (["m-Q4_K_M.gguf", "config.json"], r"but m-Q4_K_M\.gguf, which is read by other programs"),
        (["pytorch_model.bin"], "pytorch_model.bin, which is read by other programs: save it as"),
        (["config.json"], r"index\.json$"),
    ],
)
def test_a_folder_of_other_files_names_them(names, match, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / name).write_bytes(b"{}")
    refused(tmp_path / "in", tmp_path / "out", match)
    with pytest.raises(hybridq.CheckpointError, match=match):
        hybridq.load_checkpoint(tmp_path / "in")


def test_a_file_of_another_program_is_named(tmp_path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(hybridq.CheckpointError, match=r"m\.gguf, which is read by other programs"):
        hybridq.load_checkpoint(path)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_link_to_nothing_is_named(name, tmp_path) -> None:
    """As folders of a cache have them whose files were removed."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).symlink_to(tmp_path / "blobs" / "0123")
    with pytest.raises(hybridq.CheckpointError, match=f"its {name} is a link to a file that is no"):
        hybridq.load_checkpoint(tmp_path / "in")


def test_a_dtype_that_is_none_is_left_alone(tmp_path) -> None:
    save_file({"a.up.weight": torch.ones(64, 64)}, tmp_path / "model.safetensors")
    for said in (["bfloat16"], {"text": "float16"}, 16):
        config = {"model_type": "m", "torch_dtype": said, "quantization_config": {}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        hybridq.load_checkpoint(tmp_path)
        codes = torch.ones(64, 64).to(torch.float8_e4m3fn)
        tensors = {"a.up.weight": codes, "a.up.weight_scale_inv": torch.ones(1, 1)}
        save_file(tensors, tmp_path / "model.safetensors")
        assert hybridq.load_checkpoint(tmp_path)["a.up.weight"].dtype == torch.bfloat16

"""What a conversion opens and deletes: regular files, and nothing behind a link in its target."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hybridq
from checkpoint_tools import INDEX, convert, digests, shard_name, write_sharded
from hybridq.ptq import disk
from hybridq.ptq.disk import Folder, partial_name

QUANTIZER = hybridq.quantizer("mxfp8", None)
JOURNAL = ".hybridq-convert"
#: Calls that open, make, delete or rename what a path leads to, by the last part of their names.
OPENING = {
    *("open", "fdopen", "unlink", "remove", "rename", "replace", "renames", "mkdir", "makedirs"),
    *("rmdir", "rmtree", "link", "symlink", "symlink_to", "hardlink_to", "touch", "truncate"),
    *("read_bytes", "read_text", "write_bytes", "write_text", "copy", "copyfile", "copyfileobj"),
    *("move", "listdir", "scandir", "iterdir", "glob", "rglob", "mkstemp", "mkdtemp", "mknod"),
    *("removedirs", "copytree", "copy2", "open_code", "NamedTemporaryFile", "savez", "save"),
}
#: Of other files: on open descriptors, and the library that checks what is open already.
ALLOWED = {("files.py", "fdopen")}


def test_one_module_opens_paths() -> None:
    folder = Path(disk.__file__).parent
    seen = set()
    for file in folder.rglob("*.py"):
        if file.name == "disk.py":
            continue
        tree = ast.parse(file.read_text())
        of_values = {  # dataclasses.replace makes a new value
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = node.func
                name = getattr(function, "attr", None) or getattr(function, "id", "")
                if isinstance(function, ast.Name) and name in of_values:
                    continue
                if name in OPENING:
                    seen.add((file.name, name))
    assert seen <= ALLOWED, sorted(seen - ALLOWED)
    assert seen, "nothing was looked at"


@pytest.fixture
def source(tmp_path) -> Path:
    shards = [{f"{i}.up.weight": torch.randn(64, 64)} for i in range(2)]
    made = write_sharded(tmp_path / "in", shards)
    (made / "tok").mkdir()
    (made / "tok" / "victim.txt").write_text("of the source")
    return made


@pytest.fixture
def outside(tmp_path) -> Path:
    made = tmp_path / "elsewhere"
    made.mkdir()
    for name in ("victim.txt", shard_name(0, 2), ".victim.txt.partial", "job.json"):
        (made / name).write_text("mine")
    return made


def refused(match, *args, **options) -> None:
    with pytest.raises(hybridq.CheckpointError, match=match) as caught:
        convert(*args, **options)
    assert "\n" not in str(caught.value)


def test_overwrite_deletes_nothing_behind_a_link(source, outside, tmp_path) -> None:
    target, before = tmp_path / "out", digests(outside)
    convert(source, target, QUANTIZER)
    (target / "lnk").symlink_to(outside)
    job = target / JOURNAL / "job.json"
    value = json.loads(job.read_text())
    job.write_text(json.dumps({**value, "files": ["lnk/victim.txt"]}))
    refused("a link on its way", source, target, QUANTIZER, overwrite=True)
    assert digests(outside) == before
    # A link under a file's own name is deleted itself.
    job.write_text(json.dumps({**value, "files": ["own.txt"]}))
    (target / "own.txt").symlink_to(outside / "victim.txt")
    convert(source, target, QUANTIZER, overwrite=True)
    assert digests(outside) == before and not (target / "own.txt").is_symlink()


def test_a_resumed_run_writes_nothing_behind_a_link(source, outside, tmp_path) -> None:
    target, before = tmp_path / "out", digests(outside)
    convert(source, target, QUANTIZER)
    (target / INDEX).unlink()  # as of a run that was stopped
    (target / "tok" / "victim.txt").unlink()
    (target / "tok").rmdir()
    (target / "tok").symlink_to(outside)
    refused("a link on its way", source, target, QUANTIZER)
    (target / "tok").unlink()
    (target / "tok").mkdir()
    for name in ("tok/victim.txt", partial_name("tok/victim.txt"), partial_name("config.json")):
        (target / name).symlink_to(outside / "victim.txt")
    convert(source, target, QUANTIZER)
    assert digests(outside) == before
    assert (target / "tok" / "victim.txt").read_text() == "of the source"
    assert not (target / "tok" / "victim.txt").is_symlink()


def test_no_part_of_the_target_is_a_link(source, outside, tmp_path) -> None:
    target, before = tmp_path / "out", digests(outside)
    target.mkdir()
    (target / JOURNAL).symlink_to(outside)
    refused("a link on its way", source, target, QUANTIZER)
    refused("a link on its way", source, target, QUANTIZER, overwrite=True)
    (target / JOURNAL).unlink()
    convert(source, target, QUANTIZER)
    want = (target / shard_name(0, 2)).read_bytes()
    (target / shard_name(0, 2)).unlink()
    (target / shard_name(0, 2)).symlink_to(outside / shard_name(0, 2))
    refused("a link on its way", source, target, QUANTIZER)
    assert digests(outside) == before
    (target / shard_name(0, 2)).unlink()
    convert(source, target, QUANTIZER)
    assert (target / shard_name(0, 2)).read_bytes() == want
    # The target itself may be one: the caller named it. So may what is read.
    (tmp_path / "named").symlink_to(target)
    (source / "config.json").rename(tmp_path / "blob")
    (source / "config.json").symlink_to(tmp_path / "blob")
    convert(source, tmp_path / "named", QUANTIZER)
    assert (target / "config.json").read_bytes() == (tmp_path / "blob").read_bytes()


@pytest.mark.parametrize(
    "files", [None, "abc", {}, [3], ["."], [""], ["a\0b"], ["/etc/x"], ["a/../../x"]], ids=str
)
def test_a_journal_that_names_no_files(files, source, tmp_path) -> None:
    target = tmp_path / "out"
    convert(source, target, QUANTIZER)
    before = digests(target)
    (target / JOURNAL / "job.json").write_text(json.dumps({"files": files}))
    refused("is damaged", source, target, QUANTIZER, overwrite=True)
    assert {**digests(target), f"{JOURNAL}/job.json": ""} == {**before, f"{JOURNAL}/job.json": ""}


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "../a", "a/../../b", "a\0b"])
def test_names_that_lead_out(name, tmp_path) -> None:
    with Folder(tmp_path) as folder:
        for call in (folder.has, folder.delete, lambda n: folder.writing(n).__enter__()):
            with pytest.raises(hybridq.CheckpointError, match="cannot hold a file named"):
                call(name)


def test_what_is_no_regular_file_is_not_waited_for(source, tmp_path) -> None:
    shard = source / shard_name(0, 2)
    shard.unlink()
    os.mkfifo(shard)
    refused("must be a regular file", source, tmp_path / "out", QUANTIZER)
    with pytest.raises(hybridq.CheckpointError, match="must be a regular file"):
        hybridq.load_checkpoint(source)
    alone = tmp_path / "model.safetensors"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(alone)
        with pytest.raises(hybridq.CheckpointError, match="must be a regular file"):
            hybridq.load_checkpoint(alone)
        alone.unlink()
    folder = write_sharded(tmp_path / "in2", [{"a.weight": torch.ones(32, 32)}])
    for name in (INDEX, "config.json"):
        before = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused("must be a regular file", folder, tmp_path / "out", QUANTIZER)
        (folder / name).unlink()
        (folder / name).write_bytes(before)


DEEP = "[" * 100_000
LONG = "x" * 5000 + ".safetensors"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"weight_map": ' + DEEP, "is no index"),
        (json.dumps({"weight_map": {"a": LONG}}), r"cannot read .*name too long"),
        (json.dumps({"weight_map": {"a": "a\0.safetensors"}}), r"must name \.safetensors files"),
    ],
    ids=["deep", "long", "nul"],
)
def test_an_index_that_no_writer_makes(text, match, source, tmp_path) -> None:
    (source / INDEX).write_text(text)
    refused(match, source, tmp_path / "out", QUANTIZER)
    with pytest.raises(hybridq.CheckpointError, match=match):
        hybridq.load_checkpoint(source)
    with pytest.raises(hybridq.CheckpointError, match="name too long"):
        convert(
            write_sharded(tmp_path / "in3", [{"a.weight": torch.ones(32, 32)}]),
            tmp_path / ("x" * 5000),
            QUANTIZER,
        )


GOOD = {"quantizer": QUANTIZER.text, "shape": [64, 64], "dtype": "F32"}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "U8"},
        {"dtype": "F64"},
        {"dtype": "F99"},
        {"dtype": ["F32"]},
        {"shape": [64.9, 64]},
        {"shape": [True, 64]},
        {"shape": ["64", 64]},
        {"shape": [-1, 64]},
        {"shape": [64]},
        {"shape": 64},
        {"quantizer": hybridq.quantizer("mxfp8", None, stochastic=True).text},
        {"quantizer": QUANTIZER.text + "made-up"},
        {"quantizer": 3},
    ],
    ids=str,
)
def test_a_record_that_no_writer_makes(change, tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    made = QUANTIZER(torch.ones(64, 64))
    buffers = {
        "w.rowwise.data": made.rowwise.data.clone(),
        "w.rowwise.scale": made.rowwise.scale.clone(),
    }
    for record, is_good in ((GOOD, True), ({**GOOD, **change}, False)):
        text = json.dumps({"version": 1, "tensors": {"w": record}})
        save_file(buffers, path, metadata={"hybridq": text})
        if is_good:
            assert torch.equal(hybridq.load_checkpoint(path)["w"].dequantize(), torch.ones(64, 64))
            continue
        with pytest.raises(hybridq.CheckpointError, match=r"damaged|'w'"):
            hybridq.load_checkpoint(path)

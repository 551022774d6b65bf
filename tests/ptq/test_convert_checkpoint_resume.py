"""A conversion that is stopped anywhere is continued as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hybridq
from checkpoint_tools import INDEX, Notes, convert, digests, shard_name, write_sharded
from hybridq.ptq import ConvertOptions, Selection, convert_checkpoint
from hybridq.ptq.disk import Folder, partial_name

QUANTIZER = hybridq.quantizer("nvfp4", "mxfp8")

#: Converts, and is killed when it has done that many bytes or begins with that shard or file.
KILLED = """
import os, signal, sys
import hybridq
from hybridq.ptq import Observer, Selection, convert_checkpoint

class Killer(Observer):
    done = 0
    def shard(self, name, what):
        if name == sys.argv[4]:
            os.kill(os.getpid(), signal.SIGKILL)
    def advance(self, nbytes):
        self.done += nbytes
        if self.done >= int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

q = hybridq.quantizer("nvfp4", "mxfp8")
convert_checkpoint(sys.argv[1], sys.argv[2], Selection(q), observer=Killer())
"""


@pytest.fixture
def source(tmp_path) -> Path:
    shards = [
        {f"{i}.{name}.weight": torch.randn(96, 200).bfloat16() for name in ("up", "down", "out")}
        for i in range(3)
    ]
    return write_sharded(tmp_path / "in", shards)


def run_killed(source: Path, target: Path, nbytes: int = 1 << 40, name: str = "") -> None:
    command = [sys.executable, "-c", KILLED, str(source), str(target), str(nbytes), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


class Stops(Notes):
    """Interrupts in the second shard."""

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        if self.done > 3 * 96 * 200 * 2:
            raise KeyboardInterrupt


def test_selections_by_recipes_of_one_class_differ():
    one, other = (
        hybridq.ptq.Selection(
            recipe=hybridq.recipes.NVFP4BlockScaling(disable_2d_quantization=flag)
        )
        for flag in (False, True)
    )
    assert one.as_dict() != other.as_dict()


@pytest.mark.more
def test_killed_twice_and_resumed(source, tmp_path):
    before = digests(source)
    whole, target = tmp_path / "whole", tmp_path / "out"
    convert(source, whole, QUANTIZER)
    want = digests(whole)
    shard = 3 * 96 * 200 * 2

    # Within the third shard: the first is finished, and the second perhaps.
    run_killed(source, target, nbytes=2 * shard + shard // 2)
    assert (target / partial_name(shard_name(2, 3))).exists()
    found = digests(target)
    assert shard_name(0, 3) in found and shard_name(2, 3) not in found
    shards = [name for name in found if not name.startswith(".")]
    assert all(found[name] == want[name] for name in shards)
    with pytest.raises(hybridq.CheckpointError, match="not finished: run the same command again"):
        hybridq.load_checkpoint(target)
    run_killed(source, target, name="config.json")  # all shards are there, the index is not
    assert (target / shard_name(2, 3)).exists() and not (target / INDEX).exists()
    with pytest.raises(hybridq.CheckpointError, match="not finished"):
        hybridq.load_checkpoint(target)

    notes = convert(source, target, QUANTIZER)
    assert [what for _, what in notes.shards] == ["checking"] * 3 + ["copying"] * 2
    assert notes.outcome.num_kept == 3 and notes.outcome.converted_nbytes == 0
    assert len(notes.outcome.tensors) == 9
    assert digests(target) == want
    assert digests(source) == before


def test_a_shard_without_its_entry_is_not_finished(source, tmp_path):
    # Killed after the shard had its name and before the journal said so.
    target = tmp_path / "out"
    convert(source, target, QUANTIZER)
    want = digests(target)
    (target / ".hybridq-convert" / f"{shard_name(1, 3)}.json").unlink()
    notes = convert(source, target, QUANTIZER)
    assert (shard_name(1, 3), "converting") in notes.shards
    assert digests(target) == want


def test_a_finished_shard_that_was_damaged_is_made_again(source, tmp_path):
    target = tmp_path / "out"
    convert(source, target, QUANTIZER)
    want = digests(target)
    with (target / shard_name(0, 3)).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    (target / shard_name(2, 3)).unlink()
    notes = convert(source, target, QUANTIZER)
    assert [what for _, what in notes.shards[:5]] == [
        *("checking", "converting", "checking", "checking", "converting")
    ]
    assert len(notes.warnings) == 2 and "is converted again" in notes.warnings[0]
    assert digests(target) == want


def test_the_memory_may_change_between_runs(source, tmp_path):
    convert(source, tmp_path / "a", QUANTIZER)
    target = tmp_path / "b"
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, target, Selection(QUANTIZER), ConvertOptions(), Stops())
    notes = convert(source, target, QUANTIZER, memory=64 << 20, strict=True)
    assert notes.outcome.num_kept == 1
    assert digests(target) == digests(tmp_path / "a")


@pytest.mark.parametrize(
    ("selection", "options", "word"),
    [
        (Selection(hybridq.quantizer("mxfp8")), {}, "quantizer was"),
        (Selection(recipe="mxfp8"), {}, "quantizer was"),
        (Selection(QUANTIZER, exclude=("0.*",)), {}, "exclude was"),
        (Selection(QUANTIZER, include=("0.*",)), {}, "include was"),
        (Selection(QUANTIZER), {"measure": False}, "measure was"),
    ],
)
def test_other_arguments_are_refused_or_start_anew(selection, options, word, source, tmp_path):
    target = tmp_path / "out"
    convert(source, target, QUANTIZER)
    before = digests(target)
    with pytest.raises(hybridq.CheckpointError, match=rf"other arguments: .*{word}"):
        convert(source, target, selection, **options)
    assert digests(target) == before
    convert(source, target, selection, **options, overwrite=True)
    convert(source, tmp_path / "anew", selection, **options)
    assert digests(target) == digests(tmp_path / "anew")


def test_a_changed_source_is_refused(source, tmp_path):
    target = tmp_path / "out"
    convert(source, target, QUANTIZER)
    shard = source / shard_name(1, 3)
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    with pytest.raises(hybridq.CheckpointError, match=r"00002-of-00003.* has changed since"):
        convert(source, target, QUANTIZER)
    convert(source, target, QUANTIZER, overwrite=True)


def test_a_new_file_beside_the_source_is_another_job(source, tmp_path):
    convert(source, tmp_path / "out", QUANTIZER)
    (source / "merges.txt").write_text("a b")
    with pytest.raises(hybridq.CheckpointError, match="files was"):
        convert(source, tmp_path / "out", QUANTIZER)


def test_overwrite_deletes_only_what_a_run_wrote(source, tmp_path):
    target = tmp_path / "out"
    convert(source, target, QUANTIZER)
    (target / "notes.txt").write_text("mine")
    (source / "tokenizer.json").unlink()
    convert(source, target, QUANTIZER, overwrite=True)
    assert (target / "notes.txt").read_text() == "mine"
    assert not (target / "tokenizer.json").exists()


def test_a_damaged_journal_is_refused(source, tmp_path):
    target = tmp_path / "out"
    convert(source, target, QUANTIZER)
    entry = target / ".hybridq-convert" / f"{shard_name(0, 3)}.json"
    value = json.loads(entry.read_text())
    del value["tensors"]
    entry.write_text(json.dumps(value))
    with pytest.raises(hybridq.CheckpointError, match="is damaged"):
        convert(source, target, QUANTIZER)
    job = target / ".hybridq-convert" / "job.json"
    job.write_text(json.dumps({"files": ["../in/config.json"]}))
    with pytest.raises(hybridq.CheckpointError, match="is damaged"):
        convert(source, target, QUANTIZER, overwrite=True)
    assert (source / "config.json").exists()


def test_one_process_at_a_time(source, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    another = pytest.raises(hybridq.CheckpointError, match="another process is writing")
    with Folder(target) as folder, folder.locked(), another:
        convert(source, target, QUANTIZER)
    convert(source, target, QUANTIZER)


def test_an_interruption_leaves_finished_shards(source, tmp_path):
    target = tmp_path / "out"
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, target, Selection(QUANTIZER), ConvertOptions(), Stops())
    assert torch.get_num_threads() == threads
    assert {path.name for path in target.iterdir()} == {".hybridq-convert", shard_name(0, 3)}
    assert convert(source, target, QUANTIZER).outcome.num_kept == 1

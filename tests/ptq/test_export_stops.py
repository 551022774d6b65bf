"""Exports that are stopped, run out of space, or find links and damage: at every stage."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hybridq
from checkpoint_tools import INDEX, Notes, digests, shard_name, write_sharded
from export_tools import run, shuffled
from hybridq.ptq import files
from hybridq.ptq.disk import partial_name

#: What IN is (layout and format, or nothing), and what OUT is asked to be.
JOBS = {
    "plain": (None, {"layout": "modelopt", "format": "nvfp4"}),
    "kept": (("modelopt", "nvfp4"), {"layout": "compressed-tensors"}),
    "anew": (("fine-grained-fp8", "mxfp8"), {"layout": "modelopt", "format": "nvfp4"}),
    "decoded": (("modelopt", "nvfp4"), {"layout": "bf16"}),
    "own": (("fine-grained-fp8", "mxfp8"), {"layout": "hybridq", "format": "nvfp4"}),
}


@pytest.fixture(params=JOBS)
def job(request, tmp_path):
    """IN in three shards, whose siblings and scales stand in different ones, and the options."""
    torch.manual_seed(4)
    names = ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj")
    tensors = {f"{name}.weight": torch.randn(32, 64).bfloat16() for name in names}
    shards = [dict(list(tensors.items())[i::3]) | {f"b{i}": torch.ones(3)} for i in range(3)]
    source = write_sharded(tmp_path / "plain", shards)
    (source / "config.json").write_text('{"model_type": "none"}')
    first, options = JOBS[request.param]
    if first is not None:
        run(source, tmp_path / "in", layout=first[0], format=first[1])
        for name in (".hybridq-convert", "hybridq.json"):
            for path in (tmp_path / "in" / name).glob("*"):
                path.unlink()
        source = shuffled(tmp_path / "in")
    return source, options


class Stops(Notes):
    """Is interrupted at the event of that number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def _event(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def shard(self, name: str, what: str) -> None:
        self._event()

    def advance(self, nbytes: int) -> None:
        self._event()


def contents(folder: Path) -> dict[str, str]:
    """Digests of a folder's files but for the journal, whose times differ."""
    return {name: one for name, one in digests(folder).items() if not name.startswith(".hybridq")}


@pytest.mark.thinned(1, few=2)
def test_stopped_at_every_stage_and_continued(job, tmp_path):
    source, options = job
    before = digests(source)
    run(source, tmp_path / "whole", **options)
    want = contents(tmp_path / "whole")
    stopped = 0
    for at in range(1, 60, 4):
        target = tmp_path / f"out{at}"
        try:
            hybridq.export(source, target, observer=Stops(at), **options)
        except KeyboardInterrupt:
            stopped += 1
            assert not (target / INDEX).exists()
            with pytest.raises(hybridq.CheckpointError):
                hybridq.load_checkpoint(target)
            run(source, target, **options)
            assert contents(target) == want, at
        else:
            break  # there are no more events
    assert stopped > 3
    assert digests(source) == before


@pytest.mark.thinned(1, few=2)
def test_a_full_disk_at_every_write(job, tmp_path, monkeypatch):
    source, options = job
    before = digests(source)
    run(source, tmp_path / "whole", **options)
    want = contents(tmp_path / "whole")
    write, calls = os.pwrite, 0

    def full(file: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, offset)

    monkeypatch.setattr(files.os, "pwrite", full)
    for number, at in enumerate((1, 4, 12)):
        calls, target = at, tmp_path / f"out{number}"
        with pytest.raises(hybridq.CheckpointError, match=r"no space left .* run again"):
            run(source, target, **options)
        assert not (target / INDEX).exists()
        assert not any(name.endswith(".partial") for name in digests(target))
        calls = 0
        run(source, target, **options)
        assert contents(target) == want
    assert digests(source) == before


@pytest.mark.thinned(1, few=2)
def test_links_in_the_target(job, tmp_path):
    source, options = job
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "victim").write_text("mine")
    run(source, tmp_path / "whole", **options)
    want = contents(tmp_path / "whole")
    for number, name in enumerate(sorted(want)[::2]):
        target = tmp_path / f"out{number}"
        run(source, target, **options)
        (target / INDEX).unlink()  # as of a run that was stopped
        for own in {name, partial_name(name)}:
            (target / own).unlink(missing_ok=True)
            (target / own).symlink_to(outside / "victim")
        if name.endswith(".safetensors"):
            with pytest.raises(hybridq.CheckpointError, match="a link on its way"):
                run(source, target, **options)
            (target / name).unlink()
        run(source, target, **options)
        assert contents(target) == want
        assert not (target / name).is_symlink()
        assert (outside / "victim").read_text() == "mine"
    target = tmp_path / "linked"
    target.mkdir()
    (target / ".hybridq-convert").symlink_to(outside)
    with pytest.raises(hybridq.CheckpointError, match="a link on its way"):
        run(source, target, **options)
    assert [path.name for path in outside.iterdir()] == ["victim"]


@pytest.mark.thinned(1, few=2)
def test_a_file_that_is_read_beside_the_shard_counts(job, tmp_path):
    """Scales and siblings in another shard: one that changes makes the result of another source."""
    source, options = job
    target = tmp_path / "out"

    class Changes(Notes):
        def shard(self, name: str, what: str) -> None:
            if name == shard_name(0, 3):
                path = source / shard_name(2, 3)
                os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    with pytest.raises(hybridq.CheckpointError, match="has changed"):
        hybridq.export(source, target, observer=Changes(), **options)
    run(source, target, **options, overwrite=True)
    (target / INDEX).unlink()
    path = source / shard_name(2, 3)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with pytest.raises(hybridq.CheckpointError, match="has changed since"):
        run(source, target, **options)


@pytest.mark.thinned(1, few=2)
def test_damaged_bytes_are_refused_or_values(job, tmp_path):
    source, options = job
    generator = torch.Generator().manual_seed(0)
    path = source / shard_name(1, 3)
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    for number in range(12):
        at = int(torch.randint(0, size if number % 2 else len(whole), (), generator=generator))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        path.write_bytes(damaged)
        before = digests(source)
        try:
            hybridq.export(source, tmp_path / f"out{number}", observer=Notes(), **options)
        except (hybridq.CheckpointError, hybridq.SpecError) as error:
            assert "\n" not in str(error)
        assert digests(source) == before
    for count in (0, 7, size - 1, size, len(whole) - 1):
        path.write_bytes(whole[:count])
        with pytest.raises(hybridq.CheckpointError, match="no whole safetensors file"):
            run(source, tmp_path / "cut", **options)
        assert not (tmp_path / "cut").exists()


#: Exports, and is killed when it begins with the second shard.
KILLED = """
import os, signal, sys, json
import hybridq
from hybridq.ptq import Observer

class Killer(Observer):
    def shard(self, name, what):
        if name == sys.argv[4]:
            os.kill(os.getpid(), signal.SIGKILL)
    def warn(self, text):
        pass

hybridq.export(sys.argv[1], sys.argv[2], observer=Killer(), **json.loads(sys.argv[3]))
"""


@pytest.mark.slow
def test_killed_and_continued(job, tmp_path):
    source, options = job
    run(source, tmp_path / "whole", **options)
    for number, name in enumerate((shard_name(1, 3), "config.json")):
        target = tmp_path / f"out{number}"
        command = [sys.executable, "-c", KILLED, source, target, json.dumps(options), name]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        with pytest.raises(hybridq.CheckpointError, match="was not finished"):
            hybridq.load_checkpoint(target)
        notes = run(source, target, **options)
        assert number == 0 or notes.outcome.num_kept > 0
        assert contents(target) == contents(tmp_path / "whole")
        assert load_file(target / shard_name(0, 3)).keys()

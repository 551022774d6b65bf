"""The demo's data: split, order, limits and errors."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from hybridq.demo import data
from hybridq.demo.data import (
    VALIDATION_FRACTION,
    DataError,
    load_corpus,
    stable_fraction,
    training_batches,
    validation_batches,
)

SEQUENCE = 16


@pytest.fixture(scope="module")
def stdlib():
    return load_corpus(None, SEQUENCE)


def make_folder(root: Path, num_files: int = 40) -> Path:
    for i in range(num_files):
        path = root / f"part{i % 4}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"this is file number {i} of the folder\n".encode() * 5)
    return root


def test_no_file_is_in_both_parts(stdlib):
    assert not set(stdlib.train_files) & set(stdlib.validation_files)
    share = len(stdlib.validation_files) / (len(stdlib.train_files) + len(stdlib.validation_files))
    assert 0.05 < share < 0.2


def test_standard_library_holds_what_it_should(stdlib):
    names = stdlib.train_files + stdlib.validation_files
    assert "json/decoder.py" in names
    assert all(name.endswith(".py") for name in names)
    unwanted = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
    assert not [name for name in names if unwanted & set(name.split("/"))]
    # Written when Python was built: they hold the paths of that machine.
    assert not [name for name in names if name.startswith("_sysconfigdata")]


def test_parts_are_the_files_contents(stdlib):
    root = Path(sysconfig.get_path("stdlib"))
    first = (root / stdlib.validation_files[0]).read_bytes()
    assert bytes(stdlib.validation[: len(first)].tolist()) == first
    sizes = [(root / name).stat().st_size for name in stdlib.train_files]
    assert stdlib.train.numel() == sum(sizes) + len(sizes) - 1
    assert not stdlib.is_truncated


def test_corpus_does_not_depend_on_the_place_or_the_order_of_creation(tmp_path):
    one = make_folder(tmp_path / "one")
    other = tmp_path / "somewhere" / "else"
    for path in sorted(one.rglob("*.txt"), reverse=True):
        copy = other / path.relative_to(one)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    a, b = load_corpus(one, SEQUENCE), load_corpus(other, SEQUENCE)
    assert a.digest == b.digest
    assert (a.train_files, a.validation_files) == (b.train_files, b.validation_files)


def test_a_new_file_moves_no_other_one(tmp_path):
    before = load_corpus(make_folder(tmp_path), SEQUENCE)
    (tmp_path / "new.txt").write_text("some more text for the model to read\n")
    after = load_corpus(tmp_path, SEQUENCE)
    assert set(before.train_files) <= set(after.train_files)
    assert set(before.validation_files) <= set(after.validation_files)


def test_the_split_is_the_same_in_every_process_and_version():
    # Python's own hash is seeded per process; these values must never change.
    assert data.stable_fraction("json/decoder.py") == 0x3B2E3CB3D29D / 2**48
    assert data.stable_fraction("os.py") == 0xD9D7C69C64B6 / 2**48


def test_a_single_file_is_cut_at_its_end(tmp_path):
    content = bytes(i % 251 for i in range(1000))
    path = tmp_path / "text.bin"
    path.write_bytes(content)
    corpus = load_corpus(path, SEQUENCE)
    assert bytes(corpus.train.tolist()) == content[:900]
    assert bytes(corpus.validation.tolist()) == content[900:]


def test_a_folder_of_one_file_and_of_two(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 500)
    assert load_corpus(tmp_path, SEQUENCE).validation.numel() == 50
    (tmp_path / "b.txt").write_bytes(b"b" * 500)
    corpus = load_corpus(tmp_path, SEQUENCE)
    assert len(corpus.train_files) == len(corpus.validation_files) == 1
    assert not set(corpus.train_files) & set(corpus.validation_files)


def test_binary_hidden_and_empty_files_of_a_folder_are_left_out(tmp_path):
    make_folder(tmp_path)
    expected = load_corpus(tmp_path, SEQUENCE).digest
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0\0" * 100)
    (tmp_path / ".secret").write_text("hidden " * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden " * 100)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert load_corpus(tmp_path, SEQUENCE).digest == expected


@pytest.mark.parametrize("limit", [1000, 3000, 5001])
def test_memory_is_bounded_and_the_cut_is_told(tmp_path, limit):
    corpus = load_corpus(make_folder(tmp_path), SEQUENCE, max_nbytes=limit)
    files = len(corpus.train_files) + len(corpus.validation_files)
    assert corpus.is_truncated
    # The separators between files are ours and not read.
    assert corpus.train.numel() + corpus.validation.numel() == limit + files - 2


def test_a_cut_is_told_where_nothing_but_binary_files_follows(tmp_path):
    """Names are read by their hashes: text first, and then a file that is none."""
    names = sorted((f"{i}.txt" for i in range(9)), key=stable_fraction)
    names = [name for name in names if stable_fraction(name) >= VALIDATION_FRACTION]
    (tmp_path / names[0]).write_text("words " * 50)
    (tmp_path / names[1]).write_bytes(b"\0" * 300)
    corpus = load_corpus(tmp_path, 8, max_nbytes=120)
    assert corpus.is_truncated and corpus.train.numel() + corpus.validation.numel() == 120


def test_a_limit_that_fits_exactly_cuts_nothing(tmp_path):
    make_folder(tmp_path)
    total = sum(path.stat().st_size for path in tmp_path.rglob("*.txt"))
    assert not load_corpus(tmp_path, SEQUENCE, max_nbytes=total).is_truncated
    assert load_corpus(tmp_path, SEQUENCE, max_nbytes=total - 1).is_truncated


def test_bad_data_is_one_clear_error(tmp_path, monkeypatch):
    empty_file, empty_folder, small = tmp_path / "e", tmp_path / "d", tmp_path / "s"
    empty_file.touch()
    empty_folder.mkdir()
    small.write_bytes(b"x" * (2 * SEQUENCE + 1))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, text in (
        (tmp_path / "missing", "must be an existing file or folder"),
        (empty_file, "must not be empty"),
        (empty_folder, "must hold text files"),
        (small, "must hold more than the sequence of 16 bytes"),
        (pipe, "must be a regular file or a folder"),
    ):
        with pytest.raises(DataError, match=text):
            load_corpus(path, SEQUENCE)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, whom no file mode stops.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"must be readable, got Permission denied for .*/s"):
        load_corpus(small, SEQUENCE)


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_FILES", 10)
    with pytest.raises(DataError, match="at most 10 files"):
        load_corpus(make_folder(tmp_path), SEQUENCE)


def test_a_python_without_its_sources_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="--data"):
        load_corpus(None, SEQUENCE)


def test_batches_are_the_same_for_the_same_seed(stdlib):
    def batches(seed):
        return list(training_batches(stdlib, 3, SEQUENCE, 4, seed))

    for (x, y), (x2, y2) in zip(batches(5), batches(5), strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert x.shape == (3, SEQUENCE)
    assert not torch.equal(batches(5)[0][0], batches(6)[0][0])


def test_batches_reach_both_ends_of_the_smallest_corpus():
    values = torch.arange(SEQUENCE + 2, dtype=torch.uint8)
    corpus = data.Corpus(values, values[: SEQUENCE + 1], ("a",), ("b",), "", False)
    starts = {int(x[0, 0]) for x, _ in training_batches(corpus, 1, SEQUENCE, 50, 0)}
    assert starts == {0, 1}
    ((x, y),) = validation_batches(corpus, 2, SEQUENCE, 1)
    assert x.tolist() == [list(range(SEQUENCE))] * 2
    assert y[0, -1] == SEQUENCE


def test_validation_batches_spread_over_the_whole_part():
    values = (torch.arange(200) % 256).to(torch.uint8)
    corpus = data.Corpus(values, values, ("a",), ("b",), "", False)
    batches = validation_batches(corpus, 2, SEQUENCE, 5)
    starts = [int(v) for x, _ in batches for v in x[:, 0]]
    assert starts[0] == 0
    assert starts[-1] == 200 - SEQUENCE - 1
    assert starts == sorted(set(starts))
    assert len(batches) == 5

"""Bytes to train on: the Python standard library's own sources, or the user's file or folder.

Every machine with Python has the standard library, so the default needs no download and no
licence question. Files are known by their names relative to the root, never by where the root
lies: two machines with the same Python version train on the same bytes in the same order.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

VALIDATION_FRACTION = 0.1
"""Share of the files (of the bytes, for a single file) that is kept for validation."""

MAX_NBYTES = 64 * 2**20
"""Most bytes held in memory by default; files beyond it are left out, and that is said."""

MAX_FILES = 100_000
"""Most files looked at in a folder: a folder with more is taken for a mistake (``--data /``)."""

_SEPARATOR = b"\0"
_SNIFF_NBYTES = 8192
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Written when Python was built or by the machine's owner: they differ between machines that
# have the same standard library.
_MACHINE_FILES = ("_sysconfigdata", "sitecustomize.py", "usercustomize.py")


class DataError(ValueError):
    """The data cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes.

    Args:
        train: ``[n]`` uint8.
        validation: ``[m]`` uint8.
        train_files: relative names of the files in ``train``, in their order.
        validation_files: the same for ``validation``; equal to ``train_files`` only for a single
            file, whose tail is the validation part.
        source: what was read, in words.
        is_truncated: files were left out because the limit on bytes was reached.
    """

    train: Tensor
    validation: Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    source: str
    is_truncated: bool

    @property
    def digest(self) -> str:
        """SHA-256 of both parts: equal digests mean that two runs saw the same bytes."""
        state = hashlib.sha256(self.train.numpy().tobytes())
        state.update(self.validation.numpy().tobytes())
        return state.hexdigest()


def load_corpus(path: Path | None, sequence: int, max_nbytes: int = MAX_NBYTES) -> Corpus:
    """Read the data and split it into training and validation parts.

    A folder is split by file: a file whose relative name hashes into the lowest tenth goes to
    validation. The hash depends on nothing else, so that adding a file moves no other one. A
    single file is cut: its last tenth is the validation part.

    Args:
        path: a file, a folder, or None for the standard library of the running Python.
        sequence: bytes per sample; each part must hold more than that.
        max_nbytes: most bytes to keep.

    Raises:
        DataError: nothing there, unreadable, not a regular file, empty, or too small.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        source = f"Python {sysconfig.get_python_version()} standard library"
        names = _list_files(root, is_stdlib=True)
        if not names:
            raise DataError(
                f"load_corpus: the standard library must lie there as .py files, got none in "
                f"{root}; give your own text with --data"
            )
    else:
        root, source = path.expanduser(), str(path)
        if not root.exists():
            raise DataError(f"load_corpus: data must be an existing file or folder, got {path}")
        if root.is_file():
            return _cut_file(root, source, sequence, max_nbytes)
        if not root.is_dir():
            raise DataError(f"load_corpus: data must be a regular file or a folder, got {path}")
        names = _list_files(root, is_stdlib=False)
        if not names:
            raise DataError(f"load_corpus: the folder must hold text files, got none in {path}")
    return _split_files(root, names, source, sequence, max_nbytes)


def stable_fraction(name: str) -> float:
    """A number in [0, 1) that depends on ``name`` alone (SHA-256, not Python's seeded hash)."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _list_files(root: Path, is_stdlib: bool) -> list[str]:
    """Relative POSIX names of the files to use, sorted."""
    names = []
    skipped = _SKIPPED_FOLDERS | _TEST_FOLDERS if is_stdlib else _SKIPPED_FOLDERS
    for folder, subfolders, files in os.walk(root, onerror=_raise_unreadable):
        # Pruned in place: os.walk then never enters them. Links to folders are not followed, so
        # there are no cycles.
        subfolders[:] = [
            s
            for s in subfolders
            if s not in skipped
            and not s.startswith(".")
            and not (is_stdlib and s.startswith("config-"))
        ]
        for file in files:
            if file.startswith("."):
                continue
            if is_stdlib and (not file.endswith(".py") or file.startswith(_MACHINE_FILES)):
                continue
            path = Path(folder, file)
            if path.is_file():
                names.append(path.relative_to(root).as_posix())
        if len(names) > MAX_FILES:
            raise DataError(
                f"load_corpus: a folder must hold at most {MAX_FILES} files, got more in {root}; "
                "give a smaller folder or one file"
            )
    return sorted(names)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(
        f"load_corpus: data must be readable, got {error.strerror} for {error.filename}"
    ) from error


def _read(path: Path, limit: int, text_only: bool = False) -> bytes:
    """At most ``limit`` bytes of a file; nothing of a binary one if ``text_only``."""
    try:
        with path.open("rb") as file:
            start = file.read(min(limit, _SNIFF_NBYTES))
            if text_only and b"\0" in start:
                return b""
            return start + file.read(limit - len(start))
    except OSError as error:
        raise DataError(
            f"load_corpus: data must be readable, got {error.strerror} for {path}"
        ) from error


def _split_files(
    root: Path, names: list[str], source: str, sequence: int, max_nbytes: int
) -> Corpus:
    contents: dict[str, bytes] = {}
    left, is_truncated = max_nbytes, False
    for name in _interleave(names):
        # One byte more than allowed tells a file that fits exactly from one that is cut.
        content = _read(root / PurePosixPath(name), left + 1, text_only=True)
        if content and not left:
            is_truncated = True
            break
        is_truncated |= len(content) > left
        content = content[:left]
        if content:
            contents[name] = content
            left -= len(content)
    if not contents:
        raise DataError(f"load_corpus: data must not be empty, got no text in {source}")
    if len(contents) == 1:
        ((name, content),) = contents.items()
        return _cut_bytes(content, name, source, sequence, is_truncated)
    by_fraction = sorted(contents, key=stable_fraction)
    validation = {n for n in by_fraction if stable_fraction(n) < VALIDATION_FRACTION}
    if not validation:
        validation = {by_fraction[0]}
    elif len(validation) == len(contents):
        validation.discard(by_fraction[-1])
    train = [n for n in sorted(contents) if n not in validation]
    held_out = sorted(validation)
    return _corpus(
        _SEPARATOR.join(contents[n] for n in train),
        _SEPARATOR.join(contents[n] for n in held_out),
        (tuple(train), tuple(held_out)),
        source,
        sequence,
        is_truncated,
    )


def _interleave(names: list[str]) -> list[str]:
    """Reorder so that every prefix is a sample of all names with both parts in proportion.

    Reading stops at the limit on bytes: what was read by then should neither be the start of the
    alphabet nor validation files alone.
    """
    order = sorted(names, key=stable_fraction)
    low = [n for n in order if stable_fraction(n) < VALIDATION_FRACTION]
    high = order[len(low) :]
    ranked = [((i + 0.5) / len(part), n) for part in (low, high) for i, n in enumerate(part)]
    return [n for _, n in sorted(ranked)]


def _cut_file(path: Path, source: str, sequence: int, max_nbytes: int) -> Corpus:
    content = _read(path, max_nbytes + 1)
    is_truncated = len(content) > max_nbytes
    return _cut_bytes(content[:max_nbytes], path.name, source, sequence, is_truncated)


def _cut_bytes(content: bytes, name: str, source: str, sequence: int, is_truncated: bool) -> Corpus:
    if not content:
        raise DataError(f"load_corpus: data must not be empty, got 0 bytes in {source}")
    held_out = max(int(len(content) * VALIDATION_FRACTION), sequence + 1)
    cut = max(len(content) - held_out, 0)
    names = ((name,), (name,))
    return _corpus(content[:cut], content[cut:], names, source, sequence, is_truncated)


def _corpus(
    train: bytes,
    validation: bytes,
    files: tuple[tuple[str, ...], tuple[str, ...]],
    source: str,
    sequence: int,
    is_truncated: bool,
) -> Corpus:
    for part, content in (("training", train), ("validation", validation)):
        if len(content) <= sequence:
            raise DataError(
                f"load_corpus: the {part} part must hold more than the sequence of {sequence} "
                f"bytes, got {len(content)} in {source}; give more data or a smaller --sequence"
            )
    return Corpus(
        # bytearray: torch shares the memory of writable buffers without a warning or a copy.
        torch.frombuffer(bytearray(train), dtype=torch.uint8),
        torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        *files,
        source,
        is_truncated,
    )


def training_batches(
    corpus: Corpus, batch: int, sequence: int, steps: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """``steps`` random batches; the same for the same seed, whatever the recipe or the device.

    Yields:
        inputs and targets, each ``[batch, sequence]`` int64; targets are inputs one byte later.
    """
    generator = torch.Generator().manual_seed(seed)
    last_start = corpus.train.numel() - sequence
    for _ in range(steps):
        starts = torch.randint(last_start, (batch,), generator=generator, dtype=torch.int64)
        yield _windows(corpus.train, starts, sequence)


def validation_batches(
    corpus: Corpus, batch: int, sequence: int, count: int
) -> list[tuple[Tensor, Tensor]]:
    """``count`` fixed batches, spread evenly over the validation part (no random numbers)."""
    last_start = corpus.validation.numel() - sequence - 1
    total = batch * count
    starts = torch.arange(total, dtype=torch.int64) * last_start // max(total - 1, 1)
    return [_windows(corpus.validation, part, sequence) for part in torch.split(starts, batch)]


def _windows(data: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    window = data[starts[:, None] + torch.arange(sequence + 1, dtype=torch.int64)].long()
    return window[:, :-1], window[:, 1:]

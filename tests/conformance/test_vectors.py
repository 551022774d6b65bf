"""The committed vectors equal what the reference writes today.

Where the reference changes on purpose: `python -m hybridq conformance --write
src/hybridq/conformance/vectors`, and a line in CHANGELOG.md.
"""

from __future__ import annotations

from functools import cache

import pytest

from hybridq.conformance import VECTORS, Case, build_vectors, read_file

PLAIN = ("kind", "spec", "dtype", "shape", "direction", "seed", "stream", "offset", "source", "ulp")
NAMES = sorted(path.stem for path in VECTORS.glob("*"))


@cache
def written() -> dict[str, list[Case]]:
    """Cases by file: built when the first test asks, as every process collects this module."""
    return {name: cases for name, _, cases in build_vectors()}


def test_there_is_a_file_for_each_and_no_other():
    assert set(NAMES) == set(written())
    # Small enough for a wheel and a repository.
    assert sum(path.stat().st_size for path in VECTORS.glob("*")) < 1 << 20


def assert_same_arrays(got, want, what: str) -> None:
    assert list(got) == list(want), what
    for name, array in want.items():
        same = got[name].shape == array.shape and got[name].tobytes() == array.tobytes()
        assert got[name].dtype == array.dtype and same, f"{what}: {name}"


@pytest.mark.parametrize("name", NAMES)
def test_committed_vectors_are_what_the_reference_writes(name: str):
    committed, wanted = read_file(VECTORS / f"{name}.npz"), written()[name]
    assert [case.id for case in committed] == [case.id for case in wanted]
    for old, new in zip(committed, wanted, strict=True):
        assert_case(old, new)


def assert_case(old: Case, new: Case) -> None:
    for part in PLAIN:
        assert getattr(old, part) == getattr(new, part), f"{new.id}: {part}"
    assert (old.x is None) == (new.x is None)
    if new.x is not None:
        assert_same_arrays({"x": old.x}, {"x": new.x}, new.id)
    assert_same_arrays(old.given, new.given, new.id)
    assert_same_arrays(old.want, new.want, new.id)
    if new.other is not None:
        assert old.other[:2] == new.other[:2]
        assert_same_arrays(old.other[2], new.other[2], new.id)

"""Files that are no vector files: an error of one kind, and no memory taken for them."""

from __future__ import annotations

import io
import json
import os
import zipfile

import numpy as np
import pytest
from typer.testing import CliRunner

from hybridq import conformance
from hybridq.conformance import VectorError, archive
from hybridq_cli.app import app

META = np.array(json.dumps({"format": conformance.FORMAT, "version": 1, "cases": []}))


def npy(array, **options) -> bytes:
    """The bytes of an array in a file of its own."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def header(shape, descr="|u1") -> bytes:
    """The first bytes of an array that says it has this shape, and has no values."""
    file = io.BytesIO()
    about = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def packed(path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in {"meta": npy(META), **members}.items():
            made.writestr(f"{name}.npy", data)


def huge(path) -> None:
    """A bomb: a small file of very many zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("meta.npy", npy(META))
        with made.open("a.npy", "w") as member:
            member.write(header((archive.MOST_NBYTES,)))
            for _ in range(archive.MOST_NBYTES >> 20):
                member.write(bytes(1 << 20))


def meta(path, text: str) -> None:
    np.savez(path, meta=np.array(text))


def entry(path, **changes) -> None:
    case = {"id": "a", "kind": "decode", "spec": {}, "shape": [1, 1], **changes}
    meta(path, json.dumps({"format": conformance.FORMAT, "version": 1, "cases": [case]}))


DAMAGES = {
    "a bomb": (huge, "must hold at most"),
    "an array that says more": (lambda p: packed(p, a=header((8 << 30,))), "an array of 8589"),
    "an array that says less": (lambda p: packed(p, a=npy(np.ones(9))[:-8]), "an array of 72"),
    "no array": (lambda p: packed(p, a=b"abc"), "no whole npz"),
    "objects": (
        lambda p: packed(p, a=npy(np.array([{}]), allow_pickle=True)),
        "an array of objects",
    ),
    "no zip": (lambda p: p.write_bytes(b"PK\3\4" + bytes(99)), "no whole npz"),
    "a pickle": (lambda p: p.write_bytes(b"\x80\4]q\0."), "no whole npz"),
    "a cut file": (
        lambda p: (packed(p, a=npy(np.ones(9))), p.write_bytes(p.read_bytes()[:-30])),
        "no whole npz",
    ),
    "a FIFO": (os.mkfifo, "must be a regular file"),
    "a folder": (lambda p: p.mkdir(), "must be a regular file"),
    "no meta": (lambda p: np.savez(p, a=np.ones(1)), "no JSON meta"),
    "deep meta": (lambda p: meta(p, "[" * 100_000), "no JSON meta"),
    "a list": (lambda p: meta(p, "[]"), "must be an object"),
    "no cases": (lambda p: meta(p, json.dumps({"format": conformance.FORMAT, "version": 1})), "ca"),
    "a case that is none": (lambda p: entry(p, shape=3), "is damaged"),
    "a case of nothing": (lambda p: entry(p, given=["x"]), "is damaged"),
    "an x that is none": (lambda p: entry(p, x=3), "is damaged"),
    "a golden of nothing": (lambda p: meta(p, '{"options": {"family": "mx"}}'), "is damaged"),
    "a golden that is none": (lambda p: meta(p, '{"options": 3}'), "is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_is_none(kind, tmp_path) -> None:
    make, match = DAMAGES[kind]
    make(tmp_path / "x.npz")
    with pytest.raises(VectorError, match=match):
        conformance.load_vectors(tmp_path)
    done = CliRunner().invoke(app, ["conformance", "--vectors", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert not isinstance(done.exception, VectorError)


def test_arrays_are_read_as_numpy_reads_them(tmp_path) -> None:
    made = {
        "empty": np.zeros((0, 3), np.float32),
        "transposed": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "number": np.array(3, np.uint16),
        "text": np.array("a text"),
        "bytes": np.arange(256, dtype=np.uint8),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **made)
        found = archive.read_arrays(tmp_path / "x.npz")
        assert found.keys() == made.keys()
        for name, array in made.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)

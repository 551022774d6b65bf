"""Headers of safetensors files: ours are the library's own, and broken ones are refused."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import write_raw
from hybridq.ptq.header import TORCH_DTYPES, dtype_name, make_header, read_header

#: Dtypes of which torch can make random tensors: by bytes.
_NAMES = [name for name in TORCH_DTYPES if name not in ("F4", "BOOL")]

tensors = st.dictionaries(
    st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(_NAMES), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)


@given(tensors=tensors, metadata=st.sampled_from([{}, {"format": "pt"}, {"é\n": '"\\'}]))
def test_our_file_is_the_librarys_byte_for_byte(tensors, metadata, tmp_path_factory):
    made = {
        name: torch.randint(0, 256, (*shape, TORCH_DTYPES[dtype].itemsize), dtype=torch.uint8)
        .view(TORCH_DTYPES[dtype])
        .reshape(shape)
        for name, (dtype, shape) in tensors.items()
    }
    folder = tmp_path_factory.mktemp("header")
    save_file(made, folder / "theirs.safetensors", metadata=metadata or None)
    prefix, entries = make_header(
        [(name, dtype_name(one.dtype), tuple(one.shape), one.nbytes) for name, one in made.items()],
        metadata,
    )
    data = b"".join(
        made[one.name].reshape(-1).view(torch.uint8).numpy().tobytes() for one in entries
    )
    assert prefix + data == (folder / "theirs.safetensors").read_bytes()
    header = read_header(folder / "theirs.safetensors")
    assert (header.entries, header.metadata) == (entries, metadata)
    ours = folder / "ours.safetensors"
    ours.write_bytes(prefix + data)
    assert load_file(ours).keys() == made.keys()


def one(shape=(4,), place=(0, 4), dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(place)}


BROKEN = {
    "too short": ({"a": one()}, bytes(3)),
    "too long": ({"a": one()}, bytes(5)),
    "overlap": ({"a": one(), "b": one(place=(2, 6))}, bytes(6)),
    "hole": ({"a": one(), "b": one(place=(6, 10))}, bytes(10)),
    "shape": ({"a": one((5,))}, bytes(4)),
    "dtype": ({"a": one(dtype="U7")}, bytes(4)),
    "negative": ({"a": one((-4,))}, bytes(4)),
    "no JSON": (b"hello", b""),
    "a list": (b"[]      ", b""),
    "not text": (b"\xff\xfe{}", b""),
    "name twice": (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "metadata that is no text": ({"__metadata__": {"a": 1}, "b": one()}, bytes(4)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_by_name(kind, tmp_path):
    path = write_raw(tmp_path / "broken.safetensors", *BROKEN[kind])
    with pytest.raises(hybridq.CheckpointError, match=r"broken\.safetensors is no .*safetensors"):
        read_header(path)
    with pytest.raises(hybridq.CheckpointError):
        hybridq.load_checkpoint(path)


@pytest.mark.parametrize(
    "raw", [b"", b"\x08\0\0", struct.pack("<Q", 1 << 60), struct.pack("<Q", 9)]
)
def test_a_cut_header_is_refused(raw, tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(raw)
    with pytest.raises(hybridq.CheckpointError, match="is no whole safetensors file"):
        read_header(tmp_path / "cut.safetensors")


@pytest.mark.more
def test_a_header_beyond_what_the_library_reads_is_not_written():
    names = (f"{number:0500d}" for number in range(200_000))
    with pytest.raises(hybridq.CheckpointError, match="at most 100000000 bytes"):
        make_header([(name, "U8", (), 1) for name in names], {})


RECORDS = {
    "version": {"version": 2, "tensors": {}},
    "no tensors": {"version": 1},
    "shape": {"version": 1, "tensors": {"a": {"quantizer": "q", "shape": [-1, 4], "dtype": "F32"}}},
    "dtype": {"version": 1, "tensors": {"a": {"quantizer": "q", "shape": [4, 4], "dtype": "F31"}}},
    "text": {"version": 1, "tensors": {"a": {"quantizer": "q", "shape": [4, 4], "dtype": "F32"}}},
    "format": {
        "version": 1,
        "tensors": {
            "a": {"quantizer": "x9/1x4/e8m0/rceil/x||original|11|", "shape": [4, 4], "dtype": "F32"}
        },
    },
    "no buffers": {
        "version": 1,
        "tensors": {
            "a": {
                "quantizer": hybridq.quantizer("mxfp8", None).text,
                "shape": [4, 4],
                "dtype": "F32",
            }
        },
    },
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_damaged_record_is_refused(kind, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"b": torch.ones(3)}, path, metadata={"hybridq": json.dumps(RECORDS[kind])})
    with pytest.raises(hybridq.CheckpointError, match=r"a\.safetensors"):
        hybridq.load_checkpoint(path)
    save_file({"b": torch.ones(3)}, path, metadata={"hybridq": "no JSON"})
    with pytest.raises(hybridq.CheckpointError, match=r"a\.safetensors"):
        hybridq.load_checkpoint(path)


def test_a_buffer_of_another_shape_is_refused(tmp_path):
    quantizer = hybridq.quantizer("mxfp8", None)
    record = {"quantizer": quantizer.text, "shape": [4, 32], "dtype": "F32"}
    text = json.dumps({"version": 1, "tensors": {"a": record}})
    for data, scale in (
        (torch.zeros(4, 31), torch.zeros(4, 1)),
        (torch.zeros(4, 32), torch.zeros(4)),
    ):
        planes = {"a.rowwise.data": data.byte(), "a.rowwise.scale": scale.byte()}
        save_file(planes, tmp_path / "a.safetensors", metadata={"hybridq": text})
        with pytest.raises(hybridq.CheckpointError, match=r"must hold 'a\.rowwise\."):
            hybridq.load_checkpoint(tmp_path / "a.safetensors")

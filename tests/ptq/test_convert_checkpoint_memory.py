"""The memory that a conversion takes is what it was given, whatever the size of the tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import hybridq
from hybridq.ptq.budget import make_budget
from hybridq.ptq.record import Record
from hybridq.ptq.tiles import choose_tile, tiles_of

#: Prints by how many bytes the largest resident size grew over the conversion, read-back included.
MEASURED = """
import resource, sys
import safetensors, torch, hybridq
from hybridq.ptq import ConvertOptions, Selection, convert_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

source, target, row, col, origin, memory, backend = sys.argv[1:]
q = hybridq.quantizer(row, col or None, columnwise_source=origin)
with hybridq.backend(backend or None):
    q(torch.randn(128, 128)).dequantize()  # what is loaded at the first call
    before = peak()
    options = ConvertOptions(memory=int(memory))
    convert_checkpoint(source, target, Selection(q, include=("*",)), options)
    print(peak() - before)
"""


def write_large(path: Path, rows: int, cols: int) -> int:
    """Write one BF16 matrix of that size, piece by piece; return its bytes."""
    nbytes = 2 * rows * cols
    raw = json.dumps({"w": {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [0, nbytes]}})
    piece = torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 20, np.float32))
    data = piece.bfloat16().view(torch.uint8).numpy().tobytes()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw.encode())
        for start in range(0, nbytes, len(data)):
            file.write(data[: nbytes - start])
    return nbytes


def grown(source: Path, row: str, col: str, origin: str, memory: int, backend: str = "") -> int:
    target = source.with_name("out.safetensors")
    arguments = [str(one) for one in (source, target, row, col, origin, memory, backend)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.more
def test_a_tensor_of_four_times_the_memory(tmp_path):
    memory = 64 << 20
    assert write_large(tmp_path / "in.safetensors", 8193, 16384) > 4 * memory
    assert grown(tmp_path / "in.safetensors", "nvfp4", "", "original", memory) < memory


@pytest.mark.slow
@pytest.mark.parametrize("memory", [64 << 20, 128 << 20])
@pytest.mark.parametrize(
    ("row", "col", "origin", "backend"),
    [
        ("mxfp8", "nvfp4", "original", ""),
        ("mxfp8", "nvfp4", "rowwise_dequantized", ""),
        ("mxfp8", "bf16", "original", ""),
        ("fp8_128x128", "nvfp4_16x16", "original", ""),
        ("mxfp8", "nvfp4", "rowwise_dequantized", "reference"),
    ],
)
def test_pairs_keep_to_the_memory(row, col, origin, backend, memory, tmp_path):
    rows = 1025 if backend else 8193
    write_large(tmp_path / "in.safetensors", rows, 16387 if rows > 5000 else 4099)
    assert grown(tmp_path / "in.safetensors", row, col, origin, memory, backend) < memory


def test_tiles_cover_a_matrix_once_and_cut_no_block():
    for row, col in (("nvfp4", "mxfp8"), ("fp8_128x128", None), (None, "mxfp8_32x32")):
        quantizer = hybridq.quantizer(row, col)
        for shape in ((300, 4000), (4000, 300), (1, 100_000), (100_000, 1), (129, 257)):
            record = Record("w", quantizer, shape, torch.bfloat16)
            for most in (1, 5000, 70_000):
                seen = np.zeros(shape, np.int8)
                high, wide = choose_tile(record, most)
                for tile in tiles_of(record, most):
                    seen[tile.row : tile.row + tile.rows, tile.col : tile.col + tile.cols] += 1
                    assert (tile.rows == high or tile.row + tile.rows == shape[0]) and (
                        tile.cols == wide or tile.col + tile.cols == shape[1]
                    )
                    for spec, axes in ((record.row, (0, 1)), (record.col, (1, 0))):
                        if spec is not None:
                            origin = (tile.row, tile.col)
                            assert origin[axes[0]] % spec.unit(0) == 0
                            assert origin[axes[1]] % spec.unit(1) == 0
                assert (seen == 1).all()
                assert high * wide <= max(most, 128 * 128)


def test_more_memory_makes_larger_tiles():
    record = Record("w", hybridq.quantizer("mxfp8", "nvfp4"), (1 << 16, 1 << 16), torch.bfloat16)
    sizes = [make_budget(n << 20, True, [record]).most_values(record) for n in (64, 256, 1024)]
    assert sizes == sorted(sizes) and sizes[0] > 1 << 20
    with hybridq.backend("reference"):  # which needs much more for each value
        assert make_budget(64 << 20, True, [record]).most_values(record) < sizes[0] / 10


#: The same over an export.
EXPORTED = """
import resource, sys
import torch, hybridq
from hybridq.ptq import ConvertOptions, Observer

class Quiet(Observer):
    def warn(self, text):
        pass

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

source, target, layout, fmt, first, memory = sys.argv[1:]
for one in ("nvfp4", "mxfp8", "mxfp4"):
    hybridq.quantize(torch.randn(128, 128), one).dequantize()  # what is loaded at the first call
chosen = {"format": fmt, "include": ("*",)} if fmt else {}
before = peak()
hybridq.export(
    source, target, layout=layout, source_layout=first or None,
    options=ConvertOptions(memory=int(memory)), observer=Quiet(), **chosen,
)
print(peak() - before)
"""


@pytest.mark.slow
def test_exports_from_one_layout_to_the_next(tmp_path):
    """Encoded, encoded anew from another format, made exact, decoded."""
    memory, before = 64 << 20, tmp_path / "0.safetensors"
    assert write_large(before, 8192, 16384) == 4 * memory
    steps = [
        ("fine-grained-fp8", "mxfp8", ""),
        ("modelopt", "nvfp4", "fine-grained-fp8"),
        ("compressed-tensors", "mxfp4", "modelopt"),
        ("modelopt", "nvfp4", "compressed-tensors"),
        ("bf16", "", "modelopt"),
    ]
    for number, (layout, fmt, first) in enumerate(steps):
        target = tmp_path / f"{number + 1}.safetensors"
        done = subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-c", EXPORTED, str(before), str(target)),
                *(layout, fmt, first, str(memory)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < memory, (layout, fmt, first)
        before.unlink()
        before = target

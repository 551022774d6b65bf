"""A default device of the caller's (`torch.set_default_device`) is none of hybridq's own tensors.

The meta device stands for any: on it numbers would be lost, on a GPU they would meet those of a
CPU.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hybridq

SOURCES = sorted(Path(hybridq.__file__).parent.rglob("*.py"))
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros"}
#: Programs, which set no default device.
LEFT_OUT = {"demo"}


def _is_without_device(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    is_torch = isinstance(owner, ast.Name) and owner.id == "torch"
    named = {one.arg for one in node.keywords}  # None: ** of a dict
    return is_torch and node.func.attr in FACTORIES and not named & {"device", None}


def test_every_new_tensor_says_its_device() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in SOURCES
        if not LEFT_OUT & set(path.relative_to(Path(hybridq.__file__).parent).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _is_without_device(node)
    ]
    assert not found


def _model() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return hybridq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def _text_of_report(folder: Path, x: torch.Tensor) -> str:
    loss = _mean_square
    return str(hybridq.report(_model(), x, ["mxfp8"], recipe="nvfp4", loss=loss))


def _mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def _text_of_views(folder: Path, x: torch.Tensor) -> str:
    model = hybridq.show(_model(), recipe="nvfp4")
    return f"{hybridq.show(hybridq.quantize(x, 'nvfp4'), original=x)} {model}"


def _amaxes(folder: Path, x: torch.Tensor) -> str:
    return str(hybridq.calibrate(_model(), [x, 2 * x]).amaxes)


def _files(folder: Path, x: torch.Tensor) -> list[str]:
    """An export of a plain checkpoint, of MXFP4 to NVFP4 without loss, and what is read again."""
    save_file({"a.up_proj.weight": x, "b.up_proj.weight": 3 * x}, folder / "in.safetensors")
    source, steps = folder / "in.safetensors", [("hybridq", "mxfp4"), ("modelopt", "nvfp4")]
    for number, (layout, fmt) in enumerate(steps):
        target = folder / f"out{number}.safetensors"
        hybridq.export(source, target, layout=layout, format=fmt)
        source = target
    read = hybridq.load_checkpoint(source)
    made = [str(one.dequantize().sum()) for _, one in sorted(read.items())]
    return [hashlib.sha256(source.read_bytes()).hexdigest(), *made]


def _rows(folder: Path, x: torch.Tensor) -> str:
    return str(hybridq.quantize(x, "nvfp4").dequantize_rows([3, 1]))


@pytest.mark.parametrize("made", [_text_of_report, _text_of_views, _amaxes, _files, _rows])
@pytest.mark.filterwarnings("ignore::hybridq.HybridQWarning")
def test_results_are_those_without_a_default_device(made: Callable, tmp_path: Path) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    want = made(folders[0], x)
    torch.set_default_device("meta")
    try:
        got = made(folders[1], x)
    finally:
        torch.set_default_device(None)
    assert got == want

"""`hybridq.trace`: a file with digests of all planes of a run.

The file is JSON lines in UTF-8. Its first line is the header, `{"format": "hybridq-trace",
"version": 1}`. Every other line is a buffer, in the order of the run: `step` (from 0), `module`
(its qualified name), `tensor` (`input`, `weight`, `output`, `grad_output`; of quantized attention
`query`, `key`, `value`, `attention_weights`, `grad_attention`, `grad_scores`), `direction`
(`rowwise`, `columnwise`, or `values`: the tensor as it is), `buffer` (its name in the plane, `data`
of values), `dtype` (torch's name without `torch.`), `shape`, `sha256` (of the buffer's bytes,
contiguous, in little-endian order, as hexadecimal digits), and, if they are kept, `bytes` (the same
in Base64). A step that has ended is a line `{"end_of_step": 0}`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from .._torch_private import graph_task_id
from ..direction import COLUMNWISE, DIRECTIONS, ROWWISE
from ..distributed.scaling_history import plain_named_modules
from ..errors import warn
from ..nn.autograd import WatchedProduct, WatchedTensor, watch_products
from ..recipes import Plan
from ..report.precision.slot_statistics import made_planes, rowwise_plane

__all__ = ["HEADER", "Trace", "trace"]

HEADER: Final = {"format": "hybridq-trace", "version": 1}


class Trace:
    """What `hybridq.trace` returns: writes a line for each buffer until it is closed.

    Args:
        file: to write to.
        model: whose modules are written; None: all of them, as `hybridq.convert` named them.
        values: whether bytes are kept.
    """

    #: Experts that nothing quantizes run as they do.
    sees_plain = False

    def __init__(self, file: Any, model: nn.Module | None, values: bool) -> None:
        self._file, self._model, self._values = file, model, values
        self._names = _names_of(model)
        self._step = 0
        self._is_empty = True
        self._stack = ExitStack()
        self._write(HEADER)
        self._stack.enter_context(watch_products(self))

    def step(self) -> None:
        """Count a step; call it once after each of the optimizer's."""
        self._write({"end_of_step": self._step})
        self._step += 1

    def close(self) -> None:
        """End the trace; a second call does nothing."""
        self._stack.close()
        if self._step and self._is_empty and not self._file.closed:
            whose = (
                "modules of hybridq" if self._model is None else "the model's modules of hybridq"
            )
            warn(
                f"trace: {self._file.name} has no product of {self._step} steps, since none of "
                f"{whose} ran eagerly; convert the model, and compile it for other runs",
            )
        self._file.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, product: WatchedProduct) -> Callable[[torch.Tensor], None] | None:
        """Write the forward of a product; return what writes its gradient."""
        own = self._name(product.module)
        if own is None:
            return None
        name = f"{own}.{product.part}" if own and product.part else own or product.part
        x = product.matrix().reshape(-1, product.matrix().shape[-1])
        ends = [len(x)] if product.offsets is None else product.offsets.tolist()
        if graph_task_id() == -1:  # no recomputation, whose forward has been written
            self._groups(name, product, "input", x, ends)
            for group, weight in enumerate(product.weights()):
                self._slot(_of(name, group, product), product, group, "weight", weight)
            self._tensor(name, "output", "values", "data", product.result)
        return lambda grad: self._groups(name, product, "grad_output", grad, ends)

    def see_tensor(self, seen: WatchedTensor) -> None:
        """Write an operand of quantized attention."""
        if not seen.is_gradient and graph_task_id() != -1:
            return  # a recomputation
        name = self._name(seen.module)
        if name is None:
            return
        x = seen.values.reshape(-1, seen.values.shape[-1])
        self._tensor(name, seen.tensor, "values", "data", x)
        spec = seen.quantizer.rowwise
        if spec is None or spec.format.is_identity or not x.numel():
            return
        for buffer, tensor in rowwise_plane(x.contiguous(), spec).buffers.items():
            self._tensor(name, seen.tensor, ROWWISE, buffer, tensor)

    def _name(self, module: Any) -> str | None:
        """Return the name of a module; None: it is none of the model's."""
        if self._model is None:
            name: str = module.name
            return name
        if id(module) not in self._names:  # of another model, or put into this one since
            self._names = _names_of(self._model)
        return self._names.get(id(module))

    def _groups(
        self, name: str, product: WatchedProduct, slot: str, x: torch.Tensor, ends: list[int]
    ) -> None:
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            self._slot(_of(name, group, product), product, group, slot, x[start:end])

    def _slot(
        self, name: str, product: WatchedProduct, group: int, slot: str, x: torch.Tensor
    ) -> None:
        self._tensor(name, slot, "values", "data", x)
        plan: Plan | None = product.plans[group % len(product.plans)]
        if plan is None or plan.is_plain or not x.numel():
            return
        scales = product.scales[group % len(product.scales)] if product.scales else None
        own = getattr(plan, slot)
        held = product.held_by(group) if slot == "weight" else None
        planes = made_planes(x.detach().contiguous(), own, slot, DIRECTIONS, scales, held)
        for direction, text in ((ROWWISE, own.row), (COLUMNWISE, own.col)):
            if not text.is_plain:
                for buffer, tensor in planes[direction].buffers.items():
                    self._tensor(name, slot, direction, buffer, tensor)

    def _tensor(
        self, name: str, slot: str, direction: str, buffer: str, value: torch.Tensor
    ) -> None:
        self._is_empty = False
        host = value.detach().cpu().contiguous()
        raw = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
        line = {
            "step": self._step,
            "module": name,
            "tensor": slot,
            "direction": direction,
            "buffer": buffer,
            "dtype": str(host.dtype).removeprefix("torch."),
            "shape": list(host.shape),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
        if self._values:
            line["bytes"] = base64.b64encode(raw).decode()
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        if not self._file.closed:  # a backward after the end has nothing to write to
            self._file.write(json.dumps(line) + "\n")


def _names_of(model: nn.Module | None) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, module in () if model is None else plain_named_modules(model):
        found.setdefault(id(module), name)
    return found


def _of(name: str, group: int, product: WatchedProduct) -> str:
    if product.offsets is None:
        return name
    return f"{name}.{product.numbers[group]}".removeprefix(".")


def trace(
    path: str | os.PathLike[str], model: nn.Module | None = None, *, values: bool = False
) -> Trace:
    """Return a trace that writes a digest of every plane that hybridq's modules multiply.

    For each product of a step: its input, weight, output and gradient as they are, and the buffers
    of the planes that the recipe makes of them. Planes are made again, stochastic ones with a seed
    of their own, so that a trace changes nothing of the run. What is compiled shows no products:
    run it eagerly.

    Args:
        path: of the file, which is written anew; its format is said in `hybridq.tracing.trace`.
        model: whose modules are written, by their names in it; None: all modules of hybridq that
            run, by the names that `hybridq.convert` gave them.
        values: whether the bytes are kept too, so that `compare` names the bit; the file is then
            larger than all tensors together.

    Returns:
        The trace, a context manager; call `step()` after each of the optimizer's steps.

    Raises:
        ValueError: the file cannot be written.
        TypeError: the path is none, or the model is no module.

    Source: ours.

    Example:
        >>> import torch, hybridq, tempfile
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, scale in (("a", 1.0), ("b", 2.0)):
        ...         with hybridq.trace(f"{folder}/{name}", model) as run:
        ...             with hybridq.autocast(recipe="mxfp8"):
        ...                 y = model(torch.ones(32, 64) * scale)
        ...             run.step()
        ...     found = hybridq.tracing.compare(f"{folder}/a", f"{folder}/b")
        >>> print(found.step, found.module, found.tensor, found.direction)
        0 0 input values
    """
    given: object = path
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            f"trace: path must be that of a file, got {type(given).__name__}; a trace is "
            "trace(path, model)"
        )
    given = model
    if given is not None and not isinstance(given, nn.Module):
        raise TypeError(f"trace: model must be a Module or None, got {type(given).__name__}")
    try:
        file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ValueError(
            f"trace: path must be a file that can be written, got {path} ({error.strerror})"
        ) from error
    return Trace(file, model, values)

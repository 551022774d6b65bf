"""What is installed, what the machine has, and which backend every operation would use.

Nothing runs: backends are asked as they are asked before a launch, so that a diagnosis costs
nothing and needs no device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from .. import settings
from .._text import Table, render
from ..errors import SpecError
from ..formats import DEFAULT_SIGNS, ERRORS, PlaneSpec, entries
from ..kernels import Call, Chip, backends, check_precision, described
from ..kernels.plain import ProductWay, product_ways, slow_advice
from ..tensor.functional import explain_call
from .machine import Core, Machine, read_core, read_machine, versions

__all__ = ["Diagnosis", "Route", "diagnose"]

#: Options that a plane may take beside its format; one that does not go with a format is left out.
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stochastic": {"stochastic": True},
    "transform": {"signs": DEFAULT_SIGNS},
    "both": {"stochastic": True, "signs": DEFAULT_SIGNS},
    **{f"4o6 {error}": {"four_over_six": error, "tensor_bound": 256.0} for error in ERRORS},
    "row-scaled": {"row_scaled": True},
}
_PLANE_OPS = ("encode", "decode", "amax")
_PRODUCTS = ("gemm", "grouped_gemm")
#: Asked only by a backend's own gemm, or only of the backend that encodes.
_INNER_OPS = ("operand", "encode_ragged")
#: Sizes of training, for backends that want to know them.
_SIZES = (16384, 4096, 4096)


@dataclass(frozen=True)
class Route:
    """Which backend one call goes to, and why.

    Args:
        op: the operation.
        a: format of the plane, or of operand a; "" where the operation has none.
        b: format of operand b, or the plane's options (`"plain"`, `"stochastic"`, ...).
        backend: the backend's name, or None where none can.
        refusals: (backend, reason) of each that cannot.
        notes: how the backend does it.
    """

    op: str
    a: str
    b: str
    backend: str | None
    refusals: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


def _route(op: str, a: str, b: str, call: Call) -> Route:
    """Return where `call` goes, as `explain` says it."""
    found = explain_call(call)
    refusals = tuple((name, reason) for name, reason in found.reasons if reason is not None)
    return Route(op, a, b, found.chosen, refusals, found.notes)


def _plane_routes(device: str, dtype: torch.dtype) -> Iterator[Route]:
    for entry in entries():
        if entry.format.is_identity:
            continue  # such a plane is a copy, made by torch before any backend is asked
        for label, options in _OPTIONS.items():
            try:
                spec = PlaneSpec(entry.format, **options)
            except SpecError:
                continue
            for op in _PLANE_OPS:
                if op != "amax" or spec.needs_amax:
                    yield _route(op, entry.name, label, Call(op, device, dtype, spec))


def _gemm_routes(op: str, chip: Chip, dtype: torch.dtype, precision: str) -> Iterator[Route]:
    sizes = None if chip.kind == "cpu" else _SIZES
    for a in entries():
        for b in entries():
            row, col = (PlaneSpec(entry.format).resolve(dtype) for entry in (a, b))
            call = Call(op, chip.kind, dtype, row, col, precision, sizes, chip)
            yield _route(op, a.name, b.name, call)


def _other_routes(chip: Chip, dtype: torch.dtype) -> Iterator[Route]:
    known = (*_PLANE_OPS, *_INNER_OPS, *_PRODUCTS)
    ops = dict.fromkeys(op for backend in backends() for op in backend.ops if op not in known)
    for op in ops:
        yield _route(op, "", "", Call(op, chip.kind, dtype, chip=chip))


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `str()` is a report in plain text.

    Args:
        versions: package to version, "" for one that is missing.
        core: the compiled core.
        machine: the machine.
        forced_backend: the backend that is forced, or None.
        device, dtype, precision: of the calls in `routes`; the precision is that of GEMMs.
        routes: one per operation, format and option (gemm: per pair of formats).
        products: how this machine's CPU multiplies plain tensors, by dtype.
    """

    versions: dict[str, str]
    core: Core
    machine: Machine
    forced_backend: str | None
    device: str
    dtype: str
    precision: str
    routes: tuple[Route, ...]
    products: tuple[ProductWay, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join(render(table) for table in self.tables)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists and texts, for JSON."""
        return asdict(self)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The report's tables, in order."""
        ops = dict.fromkeys(route.op for route in self.routes)
        planes = [self._plane_table(op) for op in ops if op in _PLANE_OPS]
        products = [self._gemm_table(op) for op in ops if op in _PRODUCTS]
        plain = self._plain_products()
        found = [self._versions(), self._core(), self._machine(), plain, *planes, *products]
        return tuple(table for table in (*found, self._other_table()) if table.rows)

    def _versions(self) -> Table:
        shown = {name: version or "not installed" for name, version in self.versions.items()}
        return Table("Versions", (), tuple(shown.items()))

    def _core(self) -> Table:
        core = self.core
        if not core.is_built:
            return Table(
                "Compiled core: MISSING",
                (),
                (("reason", core.error), ("so", "the slow PyTorch reference runs everything")),
                ("install the package again: pip install hybridq, or pip install -e . in a clone",),
            )
        rows = [("variant in use", core.variant)]
        for key, value in core.build.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            rows.append((key.replace("_", " "), shown))
        return Table("Compiled core: built", (), tuple(rows))

    def _machine(self) -> Table:
        here = self.machine
        rows = [
            ("system", here.system),
            ("processor", here.cpu),
            ("features", f"{here.capability}: {' '.join(here.flags)}"),
            ("logical cores", str(here.cores)),
            ("torch's threads", str(here.threads)),
            *(
                (f"GPU {i}", f"{g.name}, sm_{g.compute_capability}, {g.memory}, driver {g.driver}")
                for i, g in enumerate(here.gpus)
            ),
        ]
        if here.gpu_note:
            rows.append(("GPUs", here.gpu_note))
        rows.append(("forced backend", self.forced_backend or "none"))
        return Table("Machine", (), tuple(rows))

    def _plain_products(self) -> Table:
        rows = tuple(
            (way.dtype, "fast" if way.is_fast else "SLOW", way.ours) for way in self.products
        )
        slow = (getattr(torch, way.dtype) for way in self.products if not way.is_fast)
        return Table(
            "Products without quantization, on this CPU",
            ("dtype", "torch's own", "hybridq takes"),
            rows,
            tuple(slow_advice(dtype) for dtype in slow),
        )

    def _title(self, op: str) -> str:
        return f"{op} on {self.device}, {self.dtype}"

    def _plane_table(self, op: str) -> Table:
        routes = [route for route in self.routes if route.op == op]
        labels = tuple(dict.fromkeys(route.b for route in routes))
        cells: dict[str, dict[str, str]] = {}
        reasons: dict[str, list[str]] = {}
        for route in routes:
            cells.setdefault(route.a, {})[route.b] = route.backend or "none"
            for name, reason in route.refusals:
                if not reason.startswith("has no "):
                    # Long reasons are whole in the JSON.
                    short = f"{name}: {reason.splitlines()[0]}"
                    reasons.setdefault(short, []).append(f"{route.a} {route.b}")
        rows = tuple(
            (name, *(row.get(label, "-") for label in labels)) for name, row in cells.items()
        )
        notes = (f"{reason} [{_shortened(who)}]" for reason, who in reasons.items())
        return Table(self._title(op), ("format", *labels), rows, ("-: no such plane", *notes))

    def _gemm_table(self, op: str) -> Table:
        routes = [route for route in self.routes if route.op == op]
        kinds: dict[tuple[str, ...], str] = {}
        cells: dict[str, list[str]] = {}
        for route in routes:
            how = (route.backend or "none", *route.notes, *_faster_ones(route))
            mark = kinds.setdefault(how, _mark(len(kinds)))
            cells.setdefault(route.a, []).append(mark)
        names = tuple(cells)
        heads = tuple(str(i + 1) for i in range(len(names)))
        rows = tuple((f"{heads[i]:>2} {name}", *cells[name]) for i, name in enumerate(names))
        notes = tuple(f"{mark}: {'; '.join(how)}" for how, mark in kinds.items())
        title = f"{self._title(op)}, precision {self.precision} (row: operand a)"
        return Table(title, ("a \\ b", *heads), rows, notes)

    def _other_table(self) -> Table:
        routes = [route for route in self.routes if route.op not in (*_PLANE_OPS, *_PRODUCTS)]
        rows = tuple(
            (
                route.op,
                route.backend or "none",
                "; ".join(f"{n}: {r}" for n, r in route.refusals if not r.startswith("has no ")),
            )
            for route in routes
        )
        return Table(f"Other operations on {self.device}", ("operation", "backend", "why"), rows)


def _shortened(names: list[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _faster_ones(route: Route) -> tuple[str, ...]:
    """Return why the backends that are asked before the chosen one cannot, without formats' texts.

    Whole reasons are in the JSON.
    """
    order = [backend.name for backend in backends()]
    end = order.index(route.backend) if route.backend in order else len(order)
    return tuple(
        f"{name} cannot: {re.sub(r' [(][^)]*/[^)]*[)]', '', reason)}"
        for name, reason in route.refusals
        if name in order[:end] and not reason.startswith(("has no ", "runs on "))
    )


def _mark(index: int) -> str:
    """Return A to Z, AA to AZ, BA, ..."""
    head, tail = divmod(index, 26)
    return (_mark(head - 1) if head else "") + chr(ord("A") + tail)


def _chip(device: str | torch.device | Chip, machine: Machine) -> Chip:
    """Return the chip that is asked about; a GPU's capability as its driver says it."""
    chip = described(device)
    if chip.kind == "cuda" and chip.capability is None and machine.gpus:
        major, _, minor = machine.gpus[0].compute_capability.partition(".")
        if major.isdigit() and minor.isdigit():
            return Chip.of("cuda", (int(major), int(minor)))
    return chip


def diagnose(
    device: str | torch.device | Chip | None = None,
    dtype: torch.dtype = torch.bfloat16,
    precision: str = "auto",
) -> Diagnosis:
    """Return versions, the core, the machine, and the backend of every operation and format.

    Args:
        device: whose backends are asked about, a device of torch or an NVIDIA architecture as
            `"sm_90"`; it need not be there. None: `"cuda"` where the driver lists a GPU and torch
            can use it, else `"cpu"`.
        dtype: of the high-precision side: input of encode, output of decode and gemm.
        precision: of GEMMs.

    Raises:
        ValueError: unknown device or precision.

    Example:
        >>> import hybridq
        >>> found = hybridq.report.diagnose("cpu")
        >>> [route.backend for route in found.routes if route.op == "gemm"][0]
        'torch'
    """
    check_precision(precision, "diagnose")
    machine = read_machine()
    if device is None:
        device = "cuda" if machine.gpus and torch.version.cuda else "cpu"
    chip = _chip(device, machine)
    routes = (
        *_plane_routes(chip.kind, dtype),
        *(route for op in _PRODUCTS for route in _gemm_routes(op, chip, dtype, precision)),
        *_other_routes(chip, dtype),
    )
    return Diagnosis(
        versions(),
        read_core(),
        machine,
        settings.current().backend,
        str(chip),
        str(dtype).removeprefix("torch."),
        precision,
        routes,
        product_ways(),
    )

"""What is installed, what the machine has, and which backend every operation would use.

Nothing runs: backends are asked as they are asked before a launch, so that a diagnosis costs
nothing and needs no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .. import settings
from ..errors import SpecError
from ..formats import DEFAULT_SIGNS, ERRORS, PlaneSpec, entries
from ..kernels import Call, backends, candidates
from ..tensor import explain
from .machine import Core, Machine, read_core, read_machine, versions
from .text import Table, render

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
#: Asked only by a backend's own gemm.
_INNER_OPS = ("operand",)


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
    """Return where `call` goes, as `kernels.select` decides but without its warning or error."""
    choices = candidates(call)
    able = [choice.backend.name for choice in choices if choice.reason is None]
    refusals = [(choice.backend.name, choice.reason) for choice in choices if choice.reason]
    chosen = able[0] if able else None
    forced = settings.current().backend
    if forced is not None:
        owner = {backend.name: backend for backend in backends()}.get(forced)
        if owner is None or (call.op in owner.ops and forced not in able):
            chosen = None
        elif forced in able:
            chosen = forced
    return Route(op, a, b, chosen, tuple(refusals))


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


def _gemm_routes(device: str, dtype: torch.dtype) -> Iterator[Route]:
    for a in entries():
        for b in entries():
            row, col = (PlaneSpec(entry.format).resolve(dtype) for entry in (a, b))
            route = _route("gemm", a.name, b.name, Call("gemm", device, dtype, row, col))
            unforced = explain("gemm", row, col, device=device, dtype=dtype)
            same = route.backend == unforced.chosen
            yield replace(route, notes=unforced.notes) if same else route


def _other_routes(device: str, dtype: torch.dtype) -> Iterator[Route]:
    known = (*_PLANE_OPS, *_INNER_OPS, "gemm")
    ops = dict.fromkeys(op for backend in backends() for op in backend.ops if op not in known)
    for op in ops:
        yield _route(op, "", "", Call(op, device, dtype))


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `str()` is a report in plain text.

    Args:
        versions: package to version, "" for one that is missing.
        core: the compiled core.
        machine: the machine.
        forced_backend: the backend that is forced, or None.
        device, dtype: of the calls in `routes`.
        routes: one per operation, format and option (gemm: per pair of formats).
    """

    versions: dict[str, str]
    core: Core
    machine: Machine
    forced_backend: str | None
    device: str
    dtype: str
    routes: tuple[Route, ...]

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
        found = [self._versions(), self._core(), self._machine(), *planes, self._gemm_table()]
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

    def _gemm_table(self) -> Table:
        routes = [route for route in self.routes if route.op == "gemm"]
        kinds: dict[tuple[str, ...], str] = {}
        cells: dict[str, list[str]] = {}
        for route in routes:
            refused = tuple(
                f"{name} cannot: {reason}"
                for name, reason in route.refusals
                if not reason.startswith("has no ")
            )
            # The way it is made without its reasons, which name the formats.
            how = (route.backend or "none", *route.notes[:1], *refused)
            mark = kinds.setdefault(how, chr(ord("A") + len(kinds) % 26))
            cells.setdefault(route.a, []).append(mark)
        names = tuple(cells)
        heads = tuple(str(i + 1) for i in range(len(names)))
        rows = tuple((f"{heads[i]:>2} {name}", *cells[name]) for i, name in enumerate(names))
        notes = tuple(f"{mark}: {'; '.join(how)}" for how, mark in kinds.items())
        return Table(self._title("gemm") + " (row: operand a)", ("a \\ b", *heads), rows, notes)

    def _other_table(self) -> Table:
        routes = [route for route in self.routes if route.op not in (*_PLANE_OPS, "gemm")]
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


def diagnose(device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16) -> Diagnosis:
    """Return versions, the core, the machine, and the backend of every operation and format.

    Args:
        device: whose backends are asked about; it need not be there.
        dtype: of the high-precision side: input of encode, output of decode and gemm.

    Example:
        >>> import hybridq
        >>> found = hybridq.report.diagnose()
        >>> [route.backend for route in found.routes if route.op == "gemm"][0]
        'torch'
    """
    kind = torch.device(device).type
    routes = (
        *_plane_routes(kind, dtype),
        *_gemm_routes(kind, dtype),
        *_other_routes(kind, dtype),
    )
    return Diagnosis(
        versions(),
        read_core(),
        read_machine(),
        settings.current().backend,
        kind,
        str(dtype).removeprefix("torch."),
        routes,
    )

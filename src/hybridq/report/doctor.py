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
from ..kernels import Chip, OpQuery, backends, check_precision, described
from ..kernels.decoded import ProductWay, product_ways, slow_advice
from ..tensor.functional import explain_query
from .machine import Core, Machine, read_core, read_machine, versions

__all__ = ["BackendEntry", "Diagnosis", "Route", "diagnose"]

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
#: Asked only by GEMMs, of what they multiply.
_INNER_OPS = ("operand", "skinny_gemm")
#: Asked of the planes or operands of an example.
_EXAMPLE_OPS = (
    "map_encode",
    "encode_many",
    "encode_ragged",
    "map_encode_ragged",
    "grouped_loop",
)
_EXAMPLE = "mxfp8"
#: The variant whose BF16 products are made of tiles.
_TILES = "x86-64-v4-amx"
_NO_TILES = (
    "not used: the core was built without it, or the system does not let this process use it "
    "(Linux 5.16 and newer do, where arch_prctl is allowed); BF16 products take AVX-512"
)
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
        unrelated: backends that lack the operation, or run on no such devices at all.
    """

    op: str
    a: str
    b: str
    backend: str | None
    refusals: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    unrelated: tuple[str, ...] = ()

    @property
    def related_refusals(self) -> tuple[tuple[str, str], ...]:
        """The refusals of backends that are made for such calls."""
        return tuple(one for one in self.refusals if one[0] not in self.unrelated)


def _route(op: str, a: str, b: str, query: OpQuery) -> Route:
    """Return where `query` goes, as `explain` says it."""
    found = explain_query(query)
    refusals = tuple((name, reason) for name, reason in found.reasons if reason is not None)
    return Route(op, a, b, found.chosen, refusals, found.notes, found.unrelated)


def _plane_routes(chip: Chip, dtype: torch.dtype) -> Iterator[Route]:
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
                    yield _route(
                        op, entry.name, label, OpQuery(op, chip.kind, dtype, spec, chip=chip)
                    )


def _gemm_routes(op: str, chip: Chip, dtype: torch.dtype, precision: str) -> Iterator[Route]:
    for a in entries():
        for b in entries():
            row, col = (PlaneSpec(entry.format).resolve(dtype) for entry in (a, b))
            tokens = _SIZES[0] if op == "grouped_gemm" else None  # many, as `explain` has it
            query = OpQuery(
                op, chip.kind, dtype, row, col, precision, _SIZES, chip, tokens_per_group=tokens
            )
            yield _route(op, a.name, b.name, query)


def _other_routes(chip: Chip, dtype: torch.dtype) -> Iterator[Route]:
    known = (*_PLANE_OPS, *_INNER_OPS, *_PRODUCTS)
    ops = dict.fromkeys(op for backend in backends() for op in backend.ops if op not in known)
    for op in ops:
        name = _EXAMPLE if op in _EXAMPLE_OPS else ""
        spec = PlaneSpec.parse(name) if name else None
        yield _route(op, name, name, OpQuery(op, chip.kind, dtype, spec, spec, chip=chip))


@dataclass(frozen=True)
class BackendEntry:
    """A backend in the list of those that are asked.

    Args:
        name: what `hybridq.backend` takes.
        devices: what it runs on, in words.
        priority: those of a higher one are asked first; the reference is last whatever it has.
        package: where it comes from.
        error: why it could not be had; "" if it could.
    """

    name: str
    devices: str
    priority: int
    package: str
    error: str


def _backend_entries() -> tuple[BackendEntry, ...]:
    return tuple(
        BackendEntry(
            one.name, str(one.devices), one.priority, one.package or "hybridq", one.load_error
        )
        for one in backends()
    )


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
        backends: all of them, in the order in which they are asked.
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
    backends: tuple[BackendEntry, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join(render(table) for table in self.tables)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists and strings, for JSON."""
        return asdict(self)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The report's tables, in order."""
        ops = dict.fromkeys(route.op for route in self.routes)
        planes = [self._plane_table(op) for op in ops if op in _PLANE_OPS]
        products = [self._gemm_table(op) for op in ops if op in _PRODUCTS]
        plain = self._plain_products()
        here = [self._versions(), self._core(), self._machine(), self._backends(), plain]
        found = [*here, *planes, *products]
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
        if "amx_bf16" in self.machine.flags and _TILES not in core.build.get("variants", ()):
            rows.append(("AMX", _NO_TILES))
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
        if here.accelerator:
            own = here.accelerator
            rows.append(("accelerator", f"{own}; --device {own} says what runs there"))
        rows.append(("forced backend", self.forced_backend or "none"))
        return Table("Machine", (), tuple(rows))

    def _backends(self) -> Table:
        rows = tuple((one.name, one.devices, one.package) for one in self.backends)
        failed = tuple(f"{one.name}: {one.error}" for one in self.backends if one.error)
        title = "Backends, in the order in which they are asked"
        return Table(title, ("backend", "runs on", "of"), rows, failed)

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
            for name, reason in route.related_refusals:
                short = f"{name}: {reason.splitlines()[0]}"  # whole in the JSON
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
                "; ".join(f"{name}: {reason}" for name, reason in route.related_refusals),
            )
            for route in routes
        )
        return Table(f"Other operations on {self.device}", ("operation", "backend", "why"), rows)


def _shortened(names: list[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _faster_ones(route: Route) -> tuple[str, ...]:
    """Return why the backends that are asked before the chosen one cannot, without formats.

    Whole reasons are in the JSON.
    """
    order = [backend.name for backend in backends()]
    end = order.index(route.backend) if route.backend in order else len(order)
    return tuple(
        f"{name} cannot: {re.sub(r' [(][^)]*/[^)]*[)]', '', reason)}"
        for name, reason in route.related_refusals
        if name in order[:end]
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
        *_plane_routes(chip, dtype),
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
        _backend_entries(),
    )

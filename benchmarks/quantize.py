"""Part `quantize`: amax, encode and decode beside a plain copy of the input, and the peers.

Encode and decode are measured twice: as the core's call into memory that is there already, with the
maximum of the tensor given (`kernel`), and as the operator that users reach, which also finds the
maximum and allocates its result (`op`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from timing import Case, Run

import hybridq
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format, names

NAME = "quantize"
COPY = "a copy of the input"


def spec(name: str, **options: Any) -> PlaneSpec:
    """Return a plane's spec."""
    return PlaneSpec(format(name), **options)


OVER = spec("nvfp4", four_over_six="mse", tensor_bound=256.0)
SQUARES_OVER = spec("nvfp4_16x16", four_over_six="mse", tensor_bound=256.0)

#: (label, rowwise, columnwise, largest time over a copy): the table of floors of the project.
ENCODE: tuple[tuple[str, PlaneSpec | None, PlaneSpec | None, float | None], ...] = (
    ("mxfp8 row", spec("mxfp8"), None, 1 / 0.6),
    ("fp8_e4m3 row", spec("fp8_e4m3"), None, 1 / 0.6),
    ("fp8_1x128 row", spec("fp8_1x128"), None, 1 / 0.6),
    ("nvfp4 row", spec("nvfp4"), None, 1 / 0.35),
    ("nvfp4 row stochastic", spec("nvfp4", stochastic=True), None, 1 / 0.25),
    ("nvfp4 row transform", spec("nvfp4", signs=DEFAULT_SIGNS), None, 1 / 0.25),
    ("mxfp8 column", None, spec("mxfp8"), None),
    ("nvfp4 column", None, spec("nvfp4"), None),
    ("nvfp4 column transform", None, spec("nvfp4", signs=DEFAULT_SIGNS), 1 / 0.25),
    ("mxfp8 both", spec("mxfp8"), spec("mxfp8"), 1 / 0.4),
    ("fp8_e4m3 both", spec("fp8_e4m3"), spec("fp8_e4m3"), None),
    ("fp8_1x128 both", spec("fp8_1x128"), spec("fp8_1x128"), None),
    ("nvfp4 both", spec("nvfp4"), spec("nvfp4"), None),
    ("nvfp4 by rows both", spec("nvfp4", row_scaled=True), spec("nvfp4", row_scaled=True), None),
    ("nvfp4 4over6 row", OVER, None, None),
    ("nvfp4 4over6 column", None, OVER, None),
    ("nvfp4 4over6 both", OVER, OVER, None),
    ("nvfp4_16x16 4over6 both", SQUARES_OVER, SQUARES_OVER, None),
    ("fp8_128x128 both", spec("fp8_128x128"), spec("fp8_128x128"), None),
    ("mxfp8 row + nvfp4 column", spec("mxfp8"), spec("nvfp4"), None),
    (
        "mxfp8 row + nvfp4 column transform",
        spec("mxfp8"),
        spec("nvfp4", signs=DEFAULT_SIGNS),
        None,
    ),
    (
        "nvfp4 gradient (both, stochastic, transform)",
        spec("nvfp4", stochastic=True),
        spec("nvfp4", stochastic=True, signs=DEFAULT_SIGNS),
        None,
    ),
)


class Kernels:
    """The core's calls on one input, into memory of their own."""

    def __init__(self, x: torch.Tensor, threads: int) -> None:
        backend: Any = import_module("hybridq.kernels.cpu.backend")
        self.core, self.spec = backend.core, lambda s: backend.core_spec(s)[0]
        self.x, self.threads = x, threads
        self.amax = x.abs().max().float().reshape(1)
        self.amax_of_lines = [x.abs().amax(1 - d).float() for d in (0, 1)]  # of rows, of columns
        self.view = (x.data_ptr(), backend.DTYPES[x.dtype], *x.shape, *x.stride())

    def plane(self, one: PlaneSpec | None, shape: tuple[int, int], stream: int) -> Any:
        """Return (buffers, the core's plane over them). `stream`: 0 rowwise, 1 columnwise."""
        if one is None:
            return None, None
        buffers = [torch.zeros(b.shape, dtype=b.dtype) for b in one.buffers(*shape)]
        amax = self.amax_of_lines[stream] if one.row_scaled else self.amax
        stat = amax.data_ptr() if one.needs_amax else 0
        addresses = [b.data_ptr() for b in buffers[:2]]
        return buffers, self.core.PlaneOut(self.spec(one), *addresses, stat, 7, 0, 0, stream)

    def encode(self, row: PlaneSpec | None, col: PlaneSpec | None) -> Run:
        """Return the call that writes one plane, or both."""
        rows, cols = self.x.shape
        row_memory, row_plane = self.plane(row, (rows, cols), 0)
        col_memory, col_plane = self.plane(col, (cols, rows), 1)

        def run(keep: object = (row_memory, col_memory)) -> None:
            self.core.encode(*self.view, row_plane, col_plane, self.threads)

        return run

    def decode(self, one: PlaneSpec, out: torch.Tensor) -> Run:
        """Return the call that decodes a plane of the input to `out`."""
        rows, cols = self.x.shape
        memory, plane = self.plane(one, (rows, cols), 0)
        self.core.encode(*self.view, plane, None, self.threads)
        arguments = (self.spec(one), *(b.data_ptr() for b in memory[:2]), self.amax.data_ptr())

        def run(keep: object = memory) -> None:
            self.core.decode(
                *arguments, rows, cols, out.data_ptr(), "bfloat16", False, self.threads
            )

        return run

    def find_amax(self, signs: int) -> Run:
        """Return the call that finds the maximum, after a transform if signs >= 0."""
        out = torch.zeros(1)
        return lambda: self.core.amax(*self.view, signs, out.data_ptr(), self.threads)


def peers(x: torch.Tensor, copy: Run) -> list[Case]:
    """Torch's own casts and, where it is installed, torchao in eager mode."""
    codes = x.to(torch.float8_e4m3fn)
    cases = [
        Case("torch cast to float8_e4m3fn", lambda: x.to(torch.float8_e4m3fn), copy, COPY),
        Case("torch cast from float8_e4m3fn", lambda: codes.to(torch.bfloat16), copy, COPY),
    ]
    try:
        mx: Any = import_module("torchao.prototype.mx_formats.mx_tensor").MXTensor
        nv: Any = import_module("torchao.prototype.mx_formats.nvfp4_tensor").NVFP4Tensor
    except ImportError:
        return cases
    return [
        *cases,
        Case("torchao mxfp8 eager", lambda: mx.to_mx(x, torch.float8_e4m3fn, 32), copy, COPY),
        Case("torchao nvfp4 eager", lambda: nv.to_nvfp4(x), copy, COPY),
    ]


def operators(x: torch.Tensor, copy: Run) -> list[Case]:
    """The same through `torch.ops.hybridq`: amaxes found, results allocated."""
    encode, decode = torch.ops.hybridq.encode, torch.ops.hybridq.decode
    seed = torch.tensor([1])
    cases = []
    for label, row, col, most in ENCODE:
        texts = [one.text if one is not None else "" for one in (row, col)]
        cases.append(
            Case(
                f"{label}, op",
                lambda t=texts: encode(x, *t, None, None, seed),  # type: ignore[misc]
                copy,
                COPY,
                most,
            )
        )
    for name in ("fp8_e4m3", "mxfp8", "nvfp4"):
        text = spec(name).text
        plane = encode(x, text, "")
        cases.append(
            Case(
                f"{name} decode, op",
                lambda p=plane, t=text: decode(p, t, *x.shape, torch.bfloat16),  # type: ignore[misc]
                copy,
                COPY,
                1 / 0.6,
            )
        )
    return cases


def ratios_of_pairs(kernels: Kernels) -> list[Case]:
    """Both planes beside one, and a hybrid pair beside its two planes."""
    mxfp8, nvfp4 = spec("mxfp8"), spec("nvfp4")
    transformed = spec("nvfp4", signs=DEFAULT_SIGNS)

    def two(row: PlaneSpec, col: PlaneSpec) -> Run:
        first, second = kernels.encode(row, None), kernels.encode(None, col)
        return lambda: (first(), second())

    cases = [
        Case(
            "mxfp8 both, kernel, of one plane",
            kernels.encode(mxfp8, mxfp8),
            kernels.encode(mxfp8, None),
            "mxfp8 row",
            1.6,
        )
    ]
    for label, row, col in (
        ("mxfp8 both", mxfp8, mxfp8),
        ("mxfp8 row + nvfp4 column", mxfp8, nvfp4),
        ("mxfp8 row + nvfp4 column transform", mxfp8, transformed),
        ("nvfp4 row + fp8_1x128 column", nvfp4, spec("fp8_1x128")),
    ):
        cases.append(
            Case(
                f"{label}, kernel, of two passes",
                kernels.encode(row, col),
                two(row, col),
                "its two planes one after the other",
                1.0,
            )
        )
    return cases


def cases(rows: int, cols: int, threads: int) -> list[Case]:
    """Return all lines of the part."""
    x = torch.randn(rows, cols, dtype=torch.bfloat16)
    into, out = torch.empty_like(x), torch.empty_like(x)
    copy: Run = lambda: into.copy_(x)  # noqa: E731
    kernels = Kernels(x, threads)
    found = [
        Case("amax", kernels.find_amax(-1), lambda: x.sum(), "a read-only pass (sum)", 1 / 0.9),
        Case("amax of the transform", kernels.find_amax(DEFAULT_SIGNS), copy, COPY),
    ]
    for label, row, col, most in ENCODE:
        found.append(Case(f"{label}, kernel", kernels.encode(row, col), copy, COPY, most))
    for name in names():
        if not format(name).is_identity:
            run = kernels.decode(spec(name), out)
            found.append(Case(f"{name} decode, kernel", run, copy, COPY, 1 / 0.6))
    return [*found, *ratios_of_pairs(kernels), *operators(x, copy), *peers(x, copy)]


def versions() -> dict[str, str]:
    """Return what the figures were made with."""
    core: Any = import_module("hybridq.kernels.cpu.backend").core
    return {
        "hybridq": hybridq.__version__,
        "torch": torch.__version__,
        "variant": core.variant() if core is not None else "none",
    }

"""A backend: functions for some of the operations, and its answer whether it can run one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from ...errors import names_in, suggestion
from ...formats import PlaneSpec
from ..inputs import Chip
from .query import OpQuery
from .results import with_checked_results

__all__ = ["OPERATIONS", "Backend", "BackendAnswer", "DeviceSupport"]

#: What a backend may have a function for, and what that returns; docs/guides/adding-a-backend.md
#: has their arguments. Those of the second part do several of the first in one call.
OPERATIONS: Final[Mapping[str, str]] = {
    "encode": "the buffers of one or both planes of a matrix",
    "decode": "the values of a plane",
    "operand": "the codes of a plane as a matrix, without the tensor's factor",
    "amax": "the statistic that a plane's scales are made of",
    "map": "the norm or activation of a matrix",
    "transpose": "packed codes, transposed",
    "round_stochastic": "FP32 values rounded to BF16 or FP16 with random bits",
    "sum_rows": "weighted sums over the rows that tokens have in a matrix",
    "spread_rows": "the gradient of `sum_rows`",
    "fold": "an MX plane as FP8 with FP32 scales",
    "swizzle": "block scales in cuBLASLt's tiles",
    "finish": "what follows a product in FP32 before its one rounding",
    "two_factors": "the factors of two planes of two levels",
    "clear_rest": "zeros behind the last group",
    "multiply_blocks": "a product for each group of FP8 codes with FP32 scales of 1x128",
    "multiply_pair": "the product of two matrices of such codes",
    "gemm": "the product of two planes",
    "grouped_gemm": "a product for each group of tokens",
    "map_encode": "the planes of a norm or activation of a matrix",
    "encode_many": "the planes of several matrices",
    "encode_ragged": "the planes of tokens sorted by group",
    "map_encode_ragged": "the planes of an activation of tokens sorted by group",
    "grouped_loop": "`grouped_gemm` of what is quantized by group, group ends read on the host",
    "skinny_gemm": "encode, decode and GEMM of few rows",
}


class DeviceSupport(NamedTuple):
    """The devices that a backend's functions run on.

    Args:
        kinds: types of devices, as torch names them; empty: all that hold data.
        min_capability: lowest compute capability of a `cuda` device. Such a device must be an
            NVIDIA GPU and known (`OpQuery.chip`); None: any, known or not.
        others: with no kinds: types of devices that they do not run on.
    """

    kinds: tuple[str, ...] = ()
    min_capability: tuple[int, int] | None = None
    others: tuple[str, ...] = ()

    def reason(self, kind: str, chip: Chip | None) -> str | None:
        """Return None if functions run on such a device, else why not.

        Args:
            kind: type of the device.
            chip: the device in more detail, or None.
        """
        least = self.min_capability
        if not self.takes(kind):
            if not self.kinds and kind == "meta":
                return f"needs data, got a {kind} tensor"
            if not self.kinds:
                return f"is for devices other than {' and '.join(self.others)}, got {kind}"
            is_nvidia = self.kinds == ("cuda",) and least is not None
            return f"runs on {'NVIDIA GPUs' if is_nvidia else self._tensors()}, got {kind}"
        if least is None or kind != "cuda":
            return None
        if chip is not None and chip.is_rocm:
            return "is written for NVIDIA GPUs, got ROCm"
        if chip is None or chip.capability is None:
            return "the GPU's compute capability is not known here; name one, as sm_90"
        if chip.capability < least:
            return f"needs compute capability {least[0]}.{least[1]}, got {chip}"
        return None

    def takes(self, kind: str) -> bool:
        """Return whether functions run on some devices of this kind."""
        return kind in self.kinds if self.kinds else kind not in ("meta", *self.others)

    def _tensors(self) -> str:
        return " and ".join(kind.upper() for kind in self.kinds) + " tensors"

    def __str__(self) -> str:
        if not self.kinds:
            return " but ".join(filter(None, ("any device", ", ".join(self.others))))
        least = self.min_capability
        text = ", ".join(self.kinds)
        return text if least is None else f"{text} from sm_{least[0]}{least[1]} on"


_ANY_DEVICE: Final = DeviceSupport()


@dataclass(frozen=True)
class Backend:
    """One implementation of some of the operations.

    Args:
        name: what `hybridq.backend(name)` takes.
        supports: returns None or the reason why it cannot run a query; asked only about operations
            that it has a function for, on devices that it runs on.
        ops: operation (a name in `OPERATIONS`) to function. Of a backend that is not hybridq's what
            `encode`, `decode`, `amax` and `gemm` return is held to shape and dtype in each call.
        devices: what its functions run on.
        op_devices: the same of operations that run on other devices than the rest.
        leaves: returns None or why it leaves a query that it can run to the backends after it; not
            asked where it is forced.
        priority: backends with a higher one are asked first. Those of hybridq have -10 to 60.
        op_priorities: the same for operations in which it has another place.
        is_native: False for the plain PyTorch reference, which is always the last resort.
        notes: returns how a query that it can run is run, one line each, for `explain`.
        finds_amax: its encode finds statistics that it is not given, in as few passes as it can.
        updates_amax: what its encoder returns also takes a `found` (see `EncodePlan`).
        encoder: returns, for `(row, col, dtype)`, what encodes such planes of such tensors and
            takes `(x, request)`; None where its `encode` has nothing to prepare.
        group_encoder: returns, for `(row, col, dtype)`, what encodes such planes for products of
            groups (`GroupEncoder`), with the bits of its `encode_ragged` and `encode_many`; None
            where it has none.
        decoder: returns, for `(spec, dtype, is_operand)`, what decodes such planes to that dtype:
            it takes `(buffers, rows, cols)` and returns what its `operand` does, or its `decode`.
            None where these have nothing to prepare.
        multiplier: returns, for `(a, b, dtype, is_alone, device)`, what multiplies operands of two
            specs, neither with an open dtype, as its `gemm` does where torch.autocast is off. None
            where its `gemm` has nothing to prepare.
        planner: returns, for a query about a GEMM on a GPU, what multiplies such operands as its
            `gemm` does where torch.autocast is off, or None where it has nothing to prepare; None
            where it never has. What it returned is kept for the query. An attribute `room` of it
            says how many bytes it takes in `GemmArgs.work`.
        group_planner: the same as `planner` for a grouped GEMM of planes without statistics, in any
            number of tokens. What it returns takes `(a, b, args)` as its `grouped_gemm` does.
        folder: returns, for `(spec, rows, cols)`, what folds such planes into memory that is given
            (`Folder`), with the bits of its `fold`; None where it has none.
        operand_decoder: returns, for `(spec, rows, cols, dtype)`, what decodes such planes into
            memory that is given (`OperandDecoder`), with the bits of its `operand`, or None for
            specs that it does not; None where it has none.
        finisher: returns, for `(rows, cols, dtype, bounds)`, what finishes products of one size
            (`Finisher`), with the bits of its `finish`; None where it has none.
        operands: returns, for the query of a GEMM that it runs, the specs of what it makes of the
            two operands before it multiplies, where an encode may make that at once
            (`operand_specs`); None where it takes planes as they are.
        stacks_lists: its `grouped_gemm` takes planes one by one (`GroupedOperand.is_list`) where
            there is a place for what it makes of them; else they are stacked before.
        takes_group_factors: its `grouped_gemm` takes operands whose statistics are of groups
            (`GroupedOperand.by_group`); else they come without, and factors follow in FP32.
        scratch_nbytes: temporary memory of its encode and decode, bytes per value at most.
        package: name and version of the package that it came from by an entry point; "" of
            hybridq's own and of those that `register_backend` was given.
        load_error: why it could not be had of its package; "" if it could.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: `ops`, `op_devices` or `op_priorities` has a name that no operation has, or
            torch knows no such device.
    """

    name: str
    supports: Callable[[OpQuery], str | None]
    ops: dict[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    devices: DeviceSupport = _ANY_DEVICE
    op_devices: Mapping[str, DeviceSupport] = field(default_factory=dict, hash=False)
    leaves: Callable[[OpQuery], str | None] | None = field(default=None, hash=False)
    priority: int = 0
    op_priorities: Mapping[str, int] = field(default_factory=dict, hash=False)
    is_native: bool = True
    notes: Callable[[OpQuery], tuple[str, ...]] | None = field(default=None, hash=False)
    finds_amax: bool = False
    updates_amax: bool = False
    encoder: Callable[..., Callable[..., Any]] | None = field(default=None, hash=False)
    group_encoder: Callable[..., Any] | None = field(default=None, hash=False)
    decoder: Callable[..., Callable[..., Any]] | None = field(default=None, hash=False)
    multiplier: Callable[..., Callable[..., Any]] | None = field(default=None, hash=False)
    planner: Callable[[OpQuery], Callable[..., Any] | None] | None = field(default=None, hash=False)
    group_planner: Callable[[OpQuery], Callable[..., Any] | None] | None = field(
        default=None, hash=False
    )
    folder: Callable[..., Any] | None = field(default=None, hash=False)
    operand_decoder: Callable[..., Any] | None = field(default=None, hash=False)
    finisher: Callable[..., Any] | None = field(default=None, hash=False)
    operands: Callable[[OpQuery], tuple[PlaneSpec, PlaneSpec]] | None = field(
        default=None, hash=False
    )
    stacks_lists: bool = False
    takes_group_factors: bool = False
    scratch_nbytes: int = 0
    package: str = ""
    load_error: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"Backend: name must be a text, got {self.name!r}")
        _check_callable("supports", self.supports)
        for field_name in ("ops", "op_devices", "op_priorities"):
            given = getattr(self, field_name)
            if not isinstance(given, Mapping):
                raise TypeError(
                    f"Backend: {field_name} must be by operation, got {type(given).__name__}"
                )
            unknown = sorted(map(str, set(given) - set(OPERATIONS)))
            if unknown:
                raise ValueError(
                    f"Backend: {field_name} must be among {', '.join(OPERATIONS)}, got "
                    f"{', '.join(unknown)}{suggestion(unknown[0], OPERATIONS)}"
                )
        for op, function in self.ops.items():
            _check_callable(f"the function for {op}", function)
        for priority in (self.priority, *self.op_priorities.values()):
            if isinstance(priority, bool) or not isinstance(priority, int | float):
                raise TypeError(f"Backend: a priority must be a number, got {priority!r}")
        for devices in (self.devices, *self.op_devices.values()):
            _check_devices(devices)
        object.__setattr__(self, "ops", with_checked_results(self.name, self.supports, self.ops))

    def place(self, op: str = "") -> tuple[bool, int, str]:
        """Return by what backends are sorted when they are asked for an operation."""
        return (not self.is_native, -self.op_priorities.get(op, self.priority), self.name)

    def answer(self, query: OpQuery, is_forced: bool = False) -> BackendAnswer:
        """Return whether this backend runs `query`, or why not.

        Args:
            query: the operation.
            is_forced: nobody else may run it, so that it leaves nothing to others.
        """
        if self.load_error:
            return BackendAnswer(self, self.load_error)
        if query.op not in self.ops:
            return BackendAnswer(self, f"has no {query.op}", lacks="operation")
        own = self.op_devices.get(query.op, self.devices)
        reason = own.reason(query.device, query.chip)
        if reason is not None:
            return BackendAnswer(self, reason, "" if own.takes(query.device) else "device")
        reason = self._said("supports", self.supports(query))
        if reason is None and self.leaves is not None and not is_forced:
            reason = self._said("leaves", self.leaves(query))
        return BackendAnswer(self, reason)

    def _said(self, what: str, reason: object) -> str | None:
        """Return what a function said: a bool would be taken for a reason."""
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        raise TypeError(
            f"backend {self.name!r}: {what} must return None or the reason why not, got {reason!r}"
        )


def _check_callable(what: str, given: object) -> None:
    if not callable(given):
        raise TypeError(f"Backend: {what} must be callable, got {given!r}")


def _check_devices(given: object) -> None:
    """Raise unless devices are a DeviceSupport of kinds that torch knows."""
    if not isinstance(given, DeviceSupport):
        raise TypeError(f"Backend: devices must be a DeviceSupport, got {given!r}")
    for kind in (
        *names_in("DeviceSupport: kinds", given.kinds),
        *names_in("DeviceSupport: others", given.others),
    ):
        try:
            torch.device(kind)
        except RuntimeError as error:
            raise ValueError(
                f"DeviceSupport: kinds must be types of torch's devices, as 'cpu', got {kind!r}"
            ) from error


@dataclass(frozen=True)
class BackendAnswer:
    """A backend beside what it says to a query.

    Args:
        backend: the backend.
        reason: None if it can run the query, else why not.
        lacks: what it is not made for at all: the `"operation"`, such a `"device"`, or `""`.
    """

    backend: Backend
    reason: str | None
    lacks: str = ""

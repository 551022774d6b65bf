"""`hybridq.gemm` and `hybridq.explain`: products of anything, and why they run as they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import settings
from ..direction import COLUMNWISE, DIRECTIONS, ROWWISE, Direction
from ..errors import must_be_one_of
from ..formats import PlaneSpec
from ..gemm import gemm_planes, grouped_planes
from ..kernels import (
    Chip,
    Decision,
    OpQuery,
    check_precision,
    chip_of,
    choose,
    described,
    together,
)
from ..kernels.inputs import refuse_tangents
from ..storage import Plane, RaggedTensor
from .table import is_quantized

__all__ = ["Explanation", "explain", "explain_query", "gemm", "grouped_gemm"]

_Operand = torch.Tensor | Plane


def _plane(operand: _Operand, where: str, name: str) -> Plane:
    """Return the plane of `operand` whose last axis is contracted."""
    if isinstance(operand, Plane):
        return operand
    if not isinstance(operand, torch.Tensor):
        raise TypeError(
            f"{where}: {name} must be a tensor or a Plane, got {type(operand).__name__}"
        )
    refuse_tangents(where, operand)
    if is_quantized(operand):
        if operand.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{where}: {name} is quantized and requires grad, which gemm does not pass on; use "
                "torch.matmul or hybridq.Linear, or call under torch.no_grad()"
            )
        if operand.dim() != 2:
            raise ValueError(f"{where}: {name} must be 2-D, got shape {tuple(operand.shape)}")
        operand.tensor_storage.check_values()  # type: ignore[attr-defined]
        return operand.tensor_storage.plane(ROWWISE)  # type: ignore[attr-defined]
    if operand.is_nested:
        raise ValueError(f"{where}: {name} must be a strided [rows, K] matrix, got a nested tensor")
    if operand.dim() != 2 or operand.layout != torch.strided:
        raise ValueError(
            f"{where}: {name} must be a strided [rows, K] matrix, got {operand.layout} "
            f"{tuple(operand.shape)}"
        )
    if operand.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"{where}: {name} must be float32, bfloat16 or float16, got {operand.dtype}"
        )
    return Plane.of(operand)


def gemm(
    a: _Operand,
    b: _Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return `a @ b.T (+ bias)` of quantized or plain matrices, any format with any other.

    Args:
        a: `[M, K]`: a QuantizedTensor (its rowwise plane is used), a Plane (its own matrix),
            or a plain tensor.
        b: `[N, K]`, the same.
        bias: `[N]`, floating point.
        out: `[M, N]` to write into.
        accumulate: add to `out` instead.
        out_dtype: dtype of the result; None: out's, else the nominal dtype of a tensor operand
            (the wider, if both are tensors), else BF16.
        precision: `"exact"`: operands exact, accumulation in FP32; `"fast"`: FP8 tensor cores may
            be used where their added error is below the rounding of a BF16 result; `"auto"`: the
            fastest of both; None: that of the recipe in force, else `"auto"`. On a CPU all are
            exact. See docs/reference/gemm.md.

    Raises:
        ValueError: shapes or devices do not fit, or `precision` is unknown.
        TypeError: a dtype is not float32, bfloat16 or float16.
        PlaneError: an operand lacks the plane and cannot derive it.

    Example:
        >>> import torch, hybridq
        >>> a = hybridq.quantize(torch.ones(2, 48), "mxfp8")
        >>> b = hybridq.quantize(torch.ones(3, 48), "nvfp4")
        >>> hybridq.gemm(a, b)
        tensor([[48., 48., 48.],
                [48., 48., 48.]])
    """
    left, right = _plane(a, "gemm", "a"), _plane(b, "gemm", "b")
    if out is None and out_dtype is None:
        nominal = [one.dtype for one in (a, b) if isinstance(one, torch.Tensor)]
        out_dtype = torch.bfloat16
        if nominal:
            out_dtype = nominal[0]
        if len(nominal) == 2:
            out_dtype = torch.promote_types(*nominal)
    return gemm_planes(
        left,
        right,
        bias=bias,
        out=out,
        accumulate=accumulate,
        out_dtype=out_dtype,
        precision=precision,
    )


def grouped_gemm(
    a: _Operand | RaggedTensor,
    b: _Operand | RaggedTensor | Sequence[_Operand],
    offsets: torch.Tensor | None = None,
    *,
    tokens: int | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return one product per group of tokens, any format with any other.

    Tokens are sorted by group; group g has the tokens from `offsets[g - 1]` to `offsets[g]`, none
    at all if both are equal. The offsets stay on their device.

    - b is a sequence (or a plain `[G, N, K]`): `y[t] = a[t] @ b[g].T (+ bias[g])`, the forward and
      the input gradient of experts. Tokens behind the last offset give zeros.
    - b is one tensor: `y[g] = a[:, group] @ b[:, group].T`, the weight gradient. A quantized
      operand is then padded, so that no block lies in two groups: what `quantize_grouped` makes, or
      a plane of `hybridq.kernels.ragged.pad_tokens(x, offsets)`.

    What `quantize_grouped` returns brings its offsets along, and of its planes the one that the
    product contracts.

    Args:
        a: `[T, K]`, or `[M, T]`: QuantizedTensor, Plane or plain tensor, as in `gemm`, or a
            RaggedTensor of T tokens.
        b: G times `[N, K]`, or one `[N, T]`; a RaggedTensor of T tokens counts as the latter.
        offsets: int32 `[G]`, ends of the groups, on the device of the operands; None: those of the
            RaggedTensor. Two of them must have the same groups.
        tokens: T, where both operands are padded planes.
        bias: `[G, N]`, where there is one b per group.
        out: `[T, N]` or `[G, M, N]` to write into.
        accumulate: add to `out` instead.
        out_dtype: dtype of the result; None: out's, else the nominal dtype of a tensor a, else
            BF16.
        precision: as in `gemm`.

    Raises:
        ValueError: shapes, devices or the number of groups do not fit.
        SpecError: the b of two groups differ in their specs.
        TypeError: a dtype is not float32, bfloat16 or float16.
        PlaneError: an operand lacks the plane.

    Example:
        >>> import torch, hybridq
        >>> ends = torch.tensor([2, 2, 4], dtype=torch.int32)
        >>> x = hybridq.quantize_grouped(torch.ones(5, 64), ends, "mxfp8")
        >>> experts = [hybridq.quantize(torch.full((3, 64), n), "nvfp4") for n in (1.0, 2.0, 4.0)]
        >>> hybridq.grouped_gemm(x, experts)[:, 0]
        tensor([ 64.,  64., 256., 256.,   0.])
        >>> hybridq.grouped_gemm(x, x)[:, 0, 0]
        tensor([2., 0., 2.])
    """
    offsets, tokens = _groups_of(a, b, offsets, tokens)
    is_one = isinstance(b, RaggedTensor | Plane) or (isinstance(b, torch.Tensor) and b.dim() != 3)
    one: Plane | torch.Tensor | list[Plane]
    if is_one:
        left = _ragged_plane(a, COLUMNWISE, "a")
        one = _ragged_plane(b, COLUMNWISE, "b")
    else:
        left = _ragged_plane(a, ROWWISE, "a")
        one = _stack(b)
    if out is None and out_dtype is None and isinstance(a, torch.Tensor | RaggedTensor):
        out_dtype = a.dtype
    return grouped_planes(
        left,
        one,
        offsets,
        tokens=tokens,
        bias=bias,
        out=out,
        accumulate=accumulate,
        out_dtype=out_dtype,
        precision=precision,
    )


def _ragged_plane(operand: object, direction: Direction, name: str) -> Plane:
    """Return the plane of an operand of a grouped product; `direction` of a RaggedTensor's."""
    if isinstance(operand, RaggedTensor):
        return operand.plane(direction)
    return _plane(operand, "grouped_gemm", name)  # type: ignore[arg-type]


def _stack(b: Any) -> torch.Tensor | list[Plane]:
    """Return one plane per group, or a plain `[G, N, K]` as it is."""
    if not isinstance(b, torch.Tensor | Sequence):
        raise TypeError(
            "grouped_gemm: b must be a tensor, a Plane, a RaggedTensor, or a sequence of tensors "
            f"and planes, got {type(b).__name__}"
        )
    if not isinstance(b, torch.Tensor) or is_quantized(b):
        return [_plane(each, "grouped_gemm", "b") for each in b]
    if b.layout != torch.strided:
        raise ValueError(f"grouped_gemm: b must be a strided [G, N, K], got {b.layout}")
    if b.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"grouped_gemm: b must be float32, bfloat16 or float16, got {b.dtype}")
    return b


def _groups_of(
    a: object, b: object, offsets: torch.Tensor | None, tokens: int | None
) -> tuple[torch.Tensor, int | None]:
    """Return the offsets and the number of tokens, given or those of the ragged operands."""
    found = [one for one in (a, b) if isinstance(one, RaggedTensor)]
    if not found:
        if offsets is None:
            raise TypeError(
                "grouped_gemm: offsets must be given, unless an operand is a RaggedTensor, got None"
            )
        return offsets, tokens
    if offsets is not None or tokens is not None:
        raise ValueError(
            "grouped_gemm: a RaggedTensor brings its own offsets and tokens; leave both out, got "
            f"tokens={tokens} and offsets {'None' if offsets is None else tuple(offsets.shape)}"
        )
    first, last = found[0], found[-1]
    if (first.groups, first.tokens) != (last.groups, last.tokens) or _differ(first, last):
        raise ValueError(
            "grouped_gemm: both operands must have the same groups of tokens, got "
            f"{first.tokens} tokens in {first.groups} groups and {last.tokens} in {last.groups}"
            + (" with other ends" if first.groups == last.groups else "")
        )
    return first.offsets, first.tokens


def _differ(a: RaggedTensor, b: RaggedTensor) -> bool:
    """Whether the groups end elsewhere; on a GPU, or in a trace, nobody looks."""
    if a.offsets is b.offsets or torch.compiler.is_compiling():
        return False
    if any(type(one.offsets) is not torch.Tensor or one.device.type != "cpu" for one in (a, b)):
        return False
    return not torch.equal(a.offsets, b.offsets)


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and why; `str()` is a table.

    Args:
        call: the operation with its formats, in words.
        chosen: name of the backend that runs it, or None; where two backends make the planes of an
            encode, both names, as `"cpu + reference"`.
        reasons: (backend, why not) pairs, None for one that can.
        notes: how the chosen backend does it.
        forced: name of the backend that is forced (`hybridq.backend`, `HYBRIDQ_BACKEND`), or None.
            One that does not have the operation leaves the choice to the others.
        error: what the call would raise, where no backend runs it; else "".
        unrelated: names of backends that lack the operation, or run on no such devices at all.
    """

    call: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]
    notes: tuple[str, ...] = ()
    forced: str | None = None
    error: str = ""
    unrelated: tuple[str, ...] = ()

    @property
    def op(self) -> str:
        """Name of the operation."""
        return self.call.partition(" ")[0]

    @property
    def _names(self) -> list[str]:
        return [] if self.chosen is None else self.chosen.split(" + ")

    def __str__(self) -> str:
        lines = [self.call]
        for name, reason in self.reasons:
            mark = "->" if name in self._names else "  "
            lines.append(f" {mark} {name:<10} {reason or 'can'}")
        lines += [f"    {note}" for note in self.notes]
        if self.forced is not None:
            is_used = self.forced in self._names or self.chosen is None
            what = "" if is_used else f", which has no {self.op}"
            lines.append(f"    forced backend: {self.forced}{what}")
        if self.error:
            lines.append(f"    raises: {self.error}")
        return "\n".join(lines)

    __repr__ = __str__


def _spec_of(
    operand: _Operand | str | PlaneSpec | None, name: str, dtype: torch.dtype
) -> PlaneSpec | None:
    """Return the operand's spec; an open identity dtype is that of its data, or else `dtype`."""
    if operand is None:
        return None
    if isinstance(operand, PlaneSpec):
        return operand.resolve(dtype)
    if isinstance(operand, str):
        return PlaneSpec.parse(operand).resolve(dtype)
    if is_quantized(operand):
        return operand.tensor_storage.first.spec  # type: ignore[union-attr]
    plane = _plane(operand, "explain", name)
    return plane.spec.resolve(plane.data.dtype) if plane.spec.format.is_identity else plane.spec


def explain(
    op: str,
    a: _Operand | str | PlaneSpec | None = None,
    b: _Operand | str | PlaneSpec | None = None,
    *,
    device: str | torch.device | Chip | None = None,
    dtype: torch.dtype = torch.bfloat16,
    precision: str | None = None,
    rows: int | None = None,
) -> Explanation:
    """Return which backend would run an operation, with every other backend's reason.

    Nothing runs and no device is started, so the device need not be there. A forced backend
    (`hybridq.backend`, `HYBRIDQ_BACKEND`) is obeyed as calls obey it.

    Args:
        op: `"gemm"`, `"grouped_gemm"`, `"encode"`, `"decode"`, `"amax"` or `"transpose"`.
        a: operand a of a gemm, or the rowwise plane: tensor, Plane, PlaneSpec or format name.
        b: operand b, or the columnwise plane.
        device: a device, or an NVIDIA architecture as `"sm_90"`; None: that of the first tensor
            given, else `"cpu"`.
        dtype: of the high-precision side.
        precision: of a gemm; None as in `gemm`.
        rows: M of a gemm; None: that of a, if it is a tensor or Plane, else many. Of a grouped
            gemm the tokens that a group has on average; None: many.

    Raises:
        ValueError: another operation, or a gemm without two operands.

    Example:
        >>> import hybridq
        >>> hybridq.explain("gemm", "mxfp8", "nvfp4").chosen
        'torch'
        >>> hybridq.explain("gemm", "mxfp8", "mxfp8", device="sm_100").chosen
        'native'
    """
    if op not in _OPS:
        raise ValueError(f"explain: op {must_be_one_of(_OPS, op)}")
    found = next(
        (one.device for one in (a, b) if isinstance(one, torch.Tensor | Plane)), torch.device("cpu")
    )
    chip = chip_of(found) if device is None else described(device)
    row, col = _spec_of(a, "a", dtype), _spec_of(b, "b", dtype)
    is_gemm = op in ("gemm", "grouped_gemm")
    if is_gemm and (row is None or col is None):
        raise ValueError(f"explain: a {op} has two operands, a and b")
    if not is_gemm:
        return explain_query(OpQuery(op, chip.kind, dtype, row, col, chip=chip))
    wanted = check_precision(precision or settings.precision(), "explain")
    sizes = _sizes(a, b, rows)
    average = None
    if op == "grouped_gemm":
        average = _MANY if rows is None else rows
    return explain_query(
        OpQuery(op, chip.kind, dtype, row, col, wanted, sizes, chip, tokens_per_group=average)
    )


_OPS = ("gemm", "grouped_gemm", "encode", "decode", "amax", "transpose")
_MANY = 1 << 14


def _sizes(
    a: _Operand | str | PlaneSpec | None, b: _Operand | str | PlaneSpec | None, rows: int | None
) -> tuple[int, int, int]:
    """Return (M, N, K) of the operands given, and sizes of training where they are not."""
    m, n, k = _MANY, 4096, 4096
    for position, one in enumerate((a, b)):
        if isinstance(one, torch.Tensor | Plane):
            # A vector is quantized as one row, a scalar as one value.
            own, k = (1, 1, *(one.matrix if isinstance(one, Plane) else one.shape))[-2:]
            m, n = (own, n) if position == 0 else (m, own)
    return (m if rows is None else rows, n, k)


def explain_query(query: OpQuery) -> Explanation:
    """Return which backend would run `query`, as `explain` does.

    Args:
        query: what a call asks.
    """
    text, parts, copied = str(query), query.parts(), _copied(query)
    if query.op == "encode" and len(parts) < 2:
        # Where a plane is a copy, only the other one is asked for.
        query, parts = (*parts, query)[0], ()
    decision = choose(query)
    chosen, error, notes = _name(decision), decision.error, decision.notes
    if parts:
        chosen, error, notes = _composite(query, parts)
    notes += copied
    reasons = tuple((answer.backend.name, answer.reason) for answer in decision.answers)
    unrelated = tuple(answer.backend.name for answer in decision.answers if answer.lacks)
    return Explanation(text, chosen, reasons, notes, decision.forced, error, unrelated)


def _copied(query: OpQuery) -> tuple[str, ...]:
    """Return what is to be said of planes that no backend is asked for."""
    specs = [spec for spec in (query.row, query.col) if spec is not None]
    if query.op not in ("encode", "decode") or not any(spec.format.is_identity for spec in specs):
        return ()
    return ("a plain plane is a copy, which torch makes whatever backend is chosen",)


def _name(decision: Decision) -> str | None:
    return None if decision.chosen is None else decision.chosen.name


def _composite(
    query: OpQuery, parts: tuple[OpQuery, ...]
) -> tuple[str | None, str, tuple[str, ...]]:
    """Return which backends run a call that stands for several, what it raises, and how it runs."""
    whole = together(query, parts)
    if whole.chosen is not None:
        return whole.chosen.name, "", whole.notes
    names = [_name(choose(part)) for part in parts]
    if None in names:
        return None, whole.error, ()
    ways = [part.op if part.op != "encode" else DIRECTIONS[part.row is None] for part in parts]
    notes = tuple(f"{way} by {name}" for way, name in zip(ways, names, strict=True))
    return " + ".join(dict.fromkeys(map(str, names))), "", notes

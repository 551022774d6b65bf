"""GPTQ of one matrix: columns rounded in order, each one's error taken up by those after it.

`error_in_output` is what it makes small: `||(W - Q) X||^2`, of the inputs that the Hessian is of.

Source: Frantar et al., GPTQ, arXiv:2210.17323, equations 2, 4 and 5 and algorithm 1; the
closed form of the update is Optimal Brain Quantization's, arXiv:2208.11580, equation 7.
"""

from __future__ import annotations

import torch

from ..direction import ROWWISE
from ..formats import Element, PlaneSpec
from ..kernels.inputs import wide, wide_device
from ..reference import (
    cast,
    decode_plane,
    encode_plane,
    matrix_scales,
    pack,
    tensor_amax,
)
from ..storage import Plane

__all__ = [
    "DAMPING",
    "Hessian",
    "check_damping",
    "check_spec",
    "error_in_output",
    "gptq_plane",
    "inverse_factor",
]

#: Share of the mean of the Hessian's diagonal that is added to it: 1% in the paper's section 3.3.
DAMPING = 0.01
#: Columns between two updates of all columns after them: the paper's lazy batches.
_BATCH = 128


class Hessian:
    """The matrix `H = 2 X X^T` of the inputs of a linear module, added up in parts.

    Products of a part are FP32, sums of parts FP64. The paper's X is `[cols, tokens]`.

    Args:
        cols: input features of the module.
        device: where the matrix is kept; the CPU in its place if it has no FP64.

    Attributes:
        matrix: FP64 `[cols, cols]`.
        tokens: rows of inputs that were added.

    Source: arXiv:2210.17323, section 3.1.
    """

    def __init__(self, cols: int, device: torch.device | str = "cpu") -> None:
        where = wide_device(torch.device(device))
        self.matrix = torch.zeros(cols, cols, dtype=torch.float64, device=where)
        self.tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """Add the inputs `x`.

        Args:
            x: `[..., cols]`, floating-point; its leading dimensions are tokens.

        Raises:
            ValueError: another number of columns, or an input that is no finite number.
        """
        if x.shape[-1:] != self.matrix.shape[:1]:
            raise ValueError(
                f"Hessian.add: inputs must have {self.matrix.shape[0]} columns, got {list(x.shape)}"
            )
        rows = (x if x.dim() > 1 else x[None]).detach().flatten(0, -2)
        rows = rows.to(self.matrix.device, torch.float32)
        product = rows.t() @ rows
        if not product.isfinite().all():
            raise ValueError(
                "Hessian.add: inputs must be finite, and so must the sums of their squares, got "
                f"{int((~rows.isfinite()).sum())} values that are not and a largest of "
                f"{rows.abs().max():g}"
            )
        self.matrix += 2.0 * product.to(torch.float64)
        self.tokens += rows.shape[0]


def check_spec(where: str, spec: PlaneSpec) -> None:
    """Raise where a plane of `spec` cannot be made column by column.

    Args:
        where: name of the function, for the error.
        spec: of the plane.

    Raises:
        ValueError: it stores values as they are, transforms them, or rounds stochastically.
    """
    if spec.format.is_identity or spec.stochastic or spec.signs is not None:
        raise ValueError(
            f"{where}: the spec must be of a quantized format, rounded to nearest and without a "
            f"transform, got {spec.short_text!r}"
        )


def check_damping(where: str, damping: float) -> None:
    """Raise where a share of a diagonal is none.

    Args:
        where: name of the function, for the error.
        damping: 0 or more.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not 0.0 <= damping < float("inf"):
        raise ValueError(f"{where}: damping must be finite and not negative, got {damping}")


def inverse_factor(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Return the upper triangular R with `R^T R = (H + lambda I)^-1`, lambda of the mean diagonal.

    Row j of R, divided by `R[j, j]`, is row j of the inverse Hessian of the columns from j on,
    divided by its first entry: what equation 4 needs of all steps.

    Args:
        hessian: FP64 `[cols, cols]`, symmetric, positive semidefinite.
        damping: lambda as a share of the mean of the diagonal.

    Returns:
        FP64 `[cols, cols]`. A column whose inputs were all zero has no part in it but lambda; of
        no inputs at all it is the identity.

    Raises:
        ValueError: damping; the matrix with its damping is not positive definite.

    Source: arXiv:2210.17323, section 3.3, steps 2 and 3. One factor of H with rows and columns
    reversed gives the same matrix without inverting H first.
    """
    check_damping("inverse_factor", damping)
    h = wide(hessian)
    mean = h.diagonal().mean()
    damped = h + torch.eye(h.shape[0], dtype=h.dtype, device=h.device) * (
        torch.where(mean == 0.0, 1.0, damping * mean)
    )
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if failed.any() or not lower.isfinite().all():
        raise ValueError(
            f"inverse_factor: the Hessian with damping {damping} must be positive definite; pass "
            "more inputs or a larger damping"
        )
    upper = lower.flip(0, 1)  # H = upper upper^T, so H^-1 = (upper^-1)^T upper^-1
    eye = torch.eye(h.shape[0], dtype=h.dtype, device=h.device)
    return torch.linalg.solve_triangular(upper, eye, upper=True)


def gptq_plane(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    spec: PlaneSpec,
    *,
    amax: torch.Tensor | None = None,
    damping: float = DAMPING,
) -> Plane:
    """Return the rowwise plane of `weight` whose codes GPTQ has chosen.

    Columns are rounded from first to last. The error of column j is divided by the inverse
    Hessian's diagonal and taken from the columns after it. The scale of a block is the one that
    the format's rule gives to the block as it is when its first column is reached; a scale of the
    whole tensor, and NVFP4's second level, are those of `weight` itself. Under four-over-six a
    block chooses its scale at that moment, too.

    Args:
        weight: `[rows, cols]` float32, bfloat16 or float16, finite.
        hessian: FP64 `[cols, cols]`, as `Hessian.matrix`.
        spec: of the plane: any quantized format, rounded to nearest, without a transform.
        amax: FP32 `[1]`, or `[rows]` if the spec is row-scaled: the amax to scale by where the
            weight shares it with others; None: its own. Formats that have none ignore it.
        damping: as `inverse_factor` takes it.

    Returns:
        The plane. With a diagonal Hessian it is the plane of plain rounding, byte for byte.

    Raises:
        ValueError: the spec, a weight that is not finite, shapes that do not fit, or a Hessian
            that is not positive definite.

    Source: arXiv:2210.17323, algorithm 1; the arithmetic is FP64, scales and codes are those of
    docs/reference/numerics.md.
    """
    check_spec("gptq_plane", spec)
    if weight.dim() != 2 or tuple(hessian.shape) != (weight.shape[1], weight.shape[1]):
        raise ValueError(
            "gptq_plane: weight must be [rows, cols] and hessian [cols, cols], got "
            f"{list(weight.shape)} and {list(hessian.shape)}"
        )
    if not weight.isfinite().all():
        raise ValueError("gptq_plane: weight must be finite, got an inf or a NaN")
    if spec.needs_amax:
        amax = tensor_amax(weight, spec) if amax is None else amax.detach().clone()
    if not weight.numel():
        return _plane(spec, weight, encode_plane(weight, spec, stat=amax))
    device, weight = weight.device, weight.to(wide_device(weight.device))
    amax = None if amax is None else amax.to(weight.device)
    chooser = _Chooser(spec, weight, amax)
    left = weight.detach().to(torch.float64, copy=True)
    factor = inverse_factor(hessian, damping)
    rows, cols = left.shape
    width = chooser.width
    batch = -(-_BATCH // width) * width
    for start in range(0, cols, batch):
        stop = min(start + batch, cols)
        errors = torch.empty(rows, stop - start, dtype=torch.float64, device=left.device)
        for column in range(start, stop):
            if column % width == 0:
                chooser.fix_scale(left[:, column : column + width])
            own = left[:, column]
            error = (own - chooser.choose(own)) / factor[column, column]
            errors[:, column - start] = error
            _take(left[:, column + 1 : stop], torch.outer(error, factor[column, column + 1 : stop]))
        _take(left[:, stop:], errors @ factor[start:stop, stop:])
    return _plane(spec, weight, [buffer.to(device) for buffer in chooser.buffers()])


def _plane(spec: PlaneSpec, weight: torch.Tensor, buffers: list[torch.Tensor]) -> Plane:
    """Return the rowwise plane that has these buffers."""
    named = zip((buffer.name for buffer in spec.buffers(1, 1)), buffers, strict=True)
    return Plane(spec, ROWWISE, weight.shape[0], weight.shape[1], named)


def _take(columns: torch.Tensor, update: torch.Tensor) -> None:
    """Subtract in place; what nothing is taken from keeps its bits, the sign of a zero too."""
    columns.copy_(torch.where(update == 0.0, columns, columns - update))


class _Chooser:
    """Rounds columns to a format's values and keeps their codes and scales.

    Args:
        spec: of the plane.
        weight: of the dtype that the plane's tensor has.
        amax: FP32, where the format needs one.
    """

    def __init__(self, spec: PlaneSpec, weight: torch.Tensor, amax: torch.Tensor | None) -> None:
        self.spec, self._amax = spec, amax
        self._rows = weight.shape[0]
        self._height, self.width = spec.format.block or (1, weight.shape[1])
        self._largest = torch.finfo(weight.dtype).max
        self._element: Element = spec.format.element  # type: ignore[assignment]
        self._codes: list[torch.Tensor] = []
        self._scales: list[torch.Tensor] = []
        self._multiplier = torch.empty(0, dtype=torch.float32, device="cpu")

    def fix_scale(self, block: torch.Tensor) -> None:
        """Fix the scales of the columns that follow: those of their values now, `[rows, width]`."""
        made = matrix_scales(block.to(torch.float32), self.spec, self._amax, self._largest)
        self._scales.append(made.stored)
        self._multiplier = self._per_row(made.multiplier)

    def choose(self, column: torch.Tensor) -> torch.Tensor:
        """Return the values `[rows]`, FP64, that the codes of the next column decode to."""
        codes = cast(column.to(torch.float32) * self._multiplier, self._element)
        self._codes.append(codes)
        one = [pack(codes[:, None], self._element), self._scales[-1], *self._statistic()]
        return decode_plane(one, self.spec, self._rows, 1, torch.float32)[:, 0].to(torch.float64)

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers of the plane of all columns, in the format's order."""
        data = pack(torch.stack(self._codes, 1), self._element).contiguous()
        scale = self._scales[0] if self.spec.format.block is None else torch.cat(self._scales, 1)
        return [data, scale, *self._statistic()]

    def _per_row(self, multiplier: torch.Tensor) -> torch.Tensor:
        if self.spec.format.block is None:
            return multiplier
        return multiplier[:, 0].repeat_interleave(self._height)[: self._rows]

    def _statistic(self) -> list[torch.Tensor]:
        """Return the amax buffer, where the format stores one."""
        stored = any(buffer.name == "amax" for buffer in self.spec.buffers(1, 1))
        return [self._amax] if stored and self._amax is not None else []


def error_in_output(
    weight: torch.Tensor, made: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Return `||(W - Q) X||^2`, FP64 of no dimension, of the inputs X of `hessian`.

    Args:
        weight: `[rows, cols]`, W.
        made: `[rows, cols]`, Q, the values of its plane.
        hessian: FP64 `[cols, cols]`, `2 X X^T`.

    Source: arXiv:2210.17323, equation 1.
    """
    gap = wide(weight) - wide(made)
    return ((gap @ hessian) * gap).sum() / 2.0

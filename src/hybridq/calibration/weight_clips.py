"""AWQ's search for clips of weights: how far the values of each group are cut off.

A group is what has a scale of its own: a block, or the whole matrix.
Its error is that of its part of the outputs, `||(W_g - Q(clip(W_g))) X_g||^2`, so groups are
searched by themselves, and of `X X^T` the blocks on the diagonal are enough.

Source: Lin et al., AWQ, arXiv:2306.00978, section 5.1 ("we further apply weight clipping by
minimizing the MSE error"); the grid, that groups are searched by themselves, and that queries and
keys are left out are what the authors' published program does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..formats import PlaneSpec
from ..kernels.inputs import wide, wide_device
from ..reference import tensor_amax
from ..storage import build_storage

__all__ = ["CLIPS", "BlockHessian", "ClippedMatrix", "check_clips", "clip_matrix"]

#: Clips that are tried, as parts of a group's largest magnitude: 1, 0.95, ..., 0.55.
CLIPS: Final = tuple((20 - step) / 20 for step in range(10))


class BlockHessian:
    """The blocks on the diagonal of `X X^T`, of the inputs of a linear module.

    Products of a part are FP32, sums of parts FP64.

    Args:
        cols: input features of the module.
        width: columns of a block; the last one may have fewer, and zeros for the others.
        device: where the matrices are kept; the CPU in its place if it has no FP64.

    Attributes:
        blocks: FP64 `[blocks, width, width]`.
        tokens: rows of inputs that were added.
    """

    def __init__(self, cols: int, width: int, device: torch.device | str = "cpu") -> None:
        self.cols = cols
        count = -(-cols // width)
        where = wide_device(torch.device(device))
        self.blocks = torch.zeros(count, width, width, dtype=torch.float64, device=where)
        self.tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """Add the inputs `x`.

        Args:
            x: `[tokens, cols]`, floating-point.

        Raises:
            ValueError: another number of columns, or an input that is no finite number.
        """
        if x.dim() != 2 or x.shape[1] != self.cols:
            raise ValueError(
                f"BlockHessian.add: inputs must be [tokens, {self.cols}], got {list(x.shape)}"
            )
        rows = x.detach().to(self.blocks.device, torch.float32)
        parts = _in_blocks(rows, self.blocks.shape[1]).transpose(0, 1)
        product = parts.transpose(1, 2) @ parts
        if not product.isfinite().all():
            raise ValueError(
                "BlockHessian.add: inputs must be finite, and so must the sums of their squares, "
                f"got a largest of {rows.abs().max():g}"
            )
        self.blocks += product.to(torch.float64)
        self.tokens += rows.shape[0]

    def outputs(self, weight: torch.Tensor) -> float:
        """Return `sum ||W_g X_g||^2` over the blocks of columns.

        Args:
            weight: `[rows, cols]`.
        """
        return float(self.of_rows(weight).sum())

    def of_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `||w_g X_g||^2` of each row and block of columns, FP64 `[rows, blocks]`.

        Args:
            weight: `[rows, cols]`.
        """
        parts = _in_blocks(wide(weight), self.blocks.shape[1]).transpose(0, 1)
        return ((parts @ self.blocks) * parts).sum(2).t()


@dataclass(frozen=True)
class ClippedMatrix:
    """What a search has found.

    Attributes:
        weight: `[rows, cols]`, the matrix with each group clipped.
        groups, clipped: how many groups there are, and how many of them are clipped.
        error, plain_error: the errors of all groups added up, with the clips and without.
    """

    weight: torch.Tensor
    groups: int
    clipped: int
    error: float
    plain_error: float


def check_clips(where: str, clips: Sequence[float]) -> None:
    """Raise where a clip is out of range, or there is none.

    Args:
        where: name of the function, for the error.
        clips: parts of a largest magnitude.

    Raises:
        ValueError: see above.
    """
    if not clips or not all(0.0 < one <= 1.0 for one in clips):
        raise ValueError(f"{where}: clips must be above 0 and at most 1, got {tuple(clips)}")


def clip_matrix(
    weight: torch.Tensor,
    hessian: BlockHessian,
    spec: PlaneSpec,
    clips: Sequence[float] = CLIPS,
) -> ClippedMatrix:
    """Return `weight` with each group clipped where its rounded values change the outputs least.

    Every group tries `clip * max|W_g|` for each clip; of equal errors the largest clip wins, and 1
    is tried always. Where a scale of the whole tensor (or row) stands above those of blocks, as in
    NVFP4, the blocks that hold the largest magnitude stay as they are: so that scale does, and
    what the search has seen is what plain rounding makes of the result.

    Args:
        weight: `[rows, cols]` float32, bfloat16 or float16, finite.
        hessian: of the inputs; its width is the block's, or all columns.
        spec: of the plane that the weight will have.
        clips: parts of the largest magnitude, above 0 and at most 1.

    Raises:
        ValueError: a clip is out of range, or there is none; shapes that do not fit.

    Source: arXiv:2306.00978, section 5.1, and the authors' program.
    """
    check_clips("clip_matrix", clips)
    device, weight = weight.device, weight.to(hessian.blocks.device)
    groups = _Groups.of(weight, spec)
    if weight.shape[1] != hessian.cols or groups.width != hessian.blocks.shape[1]:
        raise ValueError(
            f"clip_matrix: the Hessian must be of {weight.shape[1]} columns in blocks of "
            f"{groups.width}, got {hessian.cols} in blocks of {hessian.blocks.shape[1]}"
        )
    largest = groups.amax(weight)
    is_fixed = groups.hold_scale(largest)
    best, made = groups.error(weight, weight, hessian), weight
    plain = float(best.sum())
    chosen = torch.ones_like(largest)
    for clip in sorted({*clips} - {1.0}, reverse=True):
        bound = torch.where(is_fixed, largest, (largest.float() * clip).to(weight.dtype))
        limits = groups.spread(bound, weight)
        tried = weight.clamp(-limits, limits)
        error = groups.error(weight, tried, hessian)
        is_better = error < best
        best = torch.where(is_better, error, best)
        chosen = torch.where(is_better, clip, chosen)
        made = torch.where(groups.spread(is_better, weight), tried, made)
    clipped = int((chosen < 1.0).sum())
    return ClippedMatrix(made.to(device), chosen.numel(), clipped, float(best.sum()), plain)


@dataclass(frozen=True)
class _Groups:
    """The groups of a matrix `[rows, cols]` that have scales of their own.

    Args:
        spec: of the plane.
        height, width: of a group.
        scale_amax: where a scale of the tensor (or of rows) stands above blocks, the amax that it
            is made of, `[1]` or `[rows]`; else None.
    """

    spec: PlaneSpec
    height: int
    width: int
    scale_amax: torch.Tensor | None

    @staticmethod
    def of(weight: torch.Tensor, spec: PlaneSpec) -> _Groups:
        """Return the groups of a weight.

        Args:
            weight: `[rows, cols]`.
            spec: of its plane.
        """
        rows, cols = weight.shape
        if spec.format.block is None:
            return _Groups(spec, rows, cols, None)
        amax = tensor_amax(weight, spec) if spec.needs_amax else None
        return _Groups(spec, *spec.format.block, amax)

    def amax(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each group, `[groups down, groups across]`."""
        across = _in_blocks(weight.abs(), self.width).amax(2)
        return _in_blocks(across.t(), self.height).amax(2).t()

    def hold_scale(self, largest: torch.Tensor) -> torch.Tensor:
        """Return which groups hold the magnitude that a scale above them is made of."""
        if self.scale_amax is None:
            return torch.zeros_like(largest, dtype=torch.bool)
        return largest.float() == self.scale_amax.reshape(-1, 1)

    def spread(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return values of groups at each element, `[rows, cols]`."""
        rows, cols = weight.shape
        down = values.repeat_interleave(self.height, 0)[:rows]
        return down.repeat_interleave(self.width, 1)[:, :cols]

    def error(
        self, weight: torch.Tensor, tried: torch.Tensor, hessian: BlockHessian
    ) -> torch.Tensor:
        """Return the error of each group, FP64 `[groups down, groups across]`."""
        made = build_storage(tried.contiguous(), self.spec, None).first.dequantize()
        of_rows = hessian.of_rows(wide(weight) - wide(made))
        return _in_blocks(of_rows.t(), self.height).sum(2).t()


def _in_blocks(matrix: torch.Tensor, width: int) -> torch.Tensor:
    """Return a matrix's columns in blocks, `[rows, blocks, width]`; zeros where there are none."""
    lacking = -matrix.shape[1] % width
    padded = torch.nn.functional.pad(matrix, (0, lacking)) if lacking else matrix
    return padded.unflatten(1, (-1, width))

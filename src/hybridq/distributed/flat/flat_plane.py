"""A plane of a matrix of whose flattened values a rank has a range, wherever it begins and ends.

From the maxima of all blocks, which one reduction gives to every rank, follow all scales. The codes
of a range follow from its own values and those scales: where it cuts a block, the maximum of that
block stands in for the values that other ranks have.

Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from ...direction import ROWWISE, Direction
from ...formats import PlaneSpec
from ...kernels.choice import EncodeRequest
from ...reference import block_scales, one_nan, pack, unpack

__all__ = ["FlatPlane"]

_FP32_MAX: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class FlatPlane:
    """A plane of X `[rows, cols]`, made of ranges of X flattened row by row.

    Args:
        spec: of the plane; an identity's dtype is fixed.
        direction: of the plane.
        rows, cols: of X.
    """

    spec: PlaneSpec
    direction: Direction
    rows: int
    cols: int

    @property
    def problem(self) -> str | None:
        """Why codes do not follow from the maxima of blocks and a range of values, or None."""
        if self.spec.signs is not None:
            return "a Hadamard transform mixes values of several ranks"
        if self.spec.four_over_six is not None:
            return "four-over-six compares errors of values of several ranks"
        return None

    @cached_property
    def _block(self) -> tuple[int, int] | None:
        """Rows and columns of X that share a scale, or None."""
        block = self.spec.format.block
        return block if block is None or self.direction == ROWWISE else (block[1], block[0])

    @cached_property
    def _grid(self) -> tuple[int, int]:
        """How many blocks X has, downwards and across."""
        height, width = self._block or (1, 1)
        return -(-self.rows // height), -(-self.cols // width)

    @cached_property
    def num_maxima(self) -> int:
        """How many values `maxima` returns: one per block, one per tensor, or none."""
        if self.spec.format.is_identity:
            return 0
        return self._grid[0] * self._grid[1] if self._block is not None else 1

    @cached_property
    def code_bits(self) -> int:
        """Bits of a value's code."""
        element = self.spec.format.element
        if self.spec.format.is_identity or element is None:
            return (self.spec.format.storage_dtype or torch.float32).itemsize * 8
        return 8 // element.codes_per_byte

    def _window(self, values: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        """Return the rows of X whose blocks hold the values, zero elsewhere, and the first row.

        Args:
            values, start: as for `maxima`, at least one value.
        """
        height, cols = (self._block or (1, 1))[0], self.cols
        low = start // cols // height * height
        rows = -(-(start + values.numel()) // cols)
        high = min(-(-rows // height) * height, self.rows)
        if values.numel() == (high - low) * cols:
            return values.view(high - low, cols), low
        window = values.new_zeros(high - low, cols)
        window.view(-1)[start - low * cols :][: values.numel()] = values
        return window, low

    def maxima(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Return max|x| of the blocks, or of the tensor, over a range; 0 where it has no value.

        Args:
            values: FP32 `[n]`, contiguous; n may be 0.
            start: where they begin in X flattened.

        Returns:
            FP32 `[num_maxima]`, not negative, or NaN.
        """
        if self._block is None or not values.numel():
            found = values.new_zeros(self.num_maxima)
            if self.num_maxima and values.numel():
                found[0] = values.abs().amax().abs()
            return found
        (height, width), (window, low) = self._block, self._window(values, start)
        rows, cols = window.shape
        window = torch.nn.functional.pad(window, (0, -cols % width, 0, -rows % height))
        blocks = window.abs().view(window.shape[0] // height, height, -1, width)
        blocks = blocks.amax(1) if height > 1 else blocks[:, 0]
        while width % 2 == 0:  # torch reduces short last axes slowly
            width //= 2
            blocks = torch.maximum(blocks[..., :width], blocks[..., width:])
        grid = values.new_zeros(self._grid)
        # Once more abs: a NaN that amax makes may be negative, and lose as an integer.
        grid[low // height :][: blocks.shape[0]] = blocks.amax(-1).abs()
        return grid.view(-1)

    def statistic(self, maxima: torch.Tensor) -> torch.Tensor | None:
        """Return the amax of the tensor, `[1]`, or of the plane's rows, from those of all blocks.

        None if the plane needs none.

        Args:
            maxima: what `maxima` returned, reduced over all ranks.
        """
        if not self.spec.needs_amax:
            return None
        if self.spec.row_scaled:
            amax = maxima.view(self._grid).amax(1 if self.direction == ROWWISE else 0)
        elif maxima.numel():
            amax = maxima.amax().reshape(1)
        else:
            amax = maxima.new_zeros(1)
        return one_nan(amax.clamp(max=_FP32_MAX))

    def small_buffers(
        self, maxima: torch.Tensor, stat: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return all buffers of the plane of X but its codes.

        Args:
            maxima: of `maxima`, reduced over all ranks.
            stat: of `statistic`, or a given scale in its place.
        """
        if self.spec.format.is_identity:
            return {}
        if self._block is None and stat is not None:
            return {"scale": block_scales(stat, self.spec, stat, _FP32_MAX).stored}
        own = maxima.view(self._grid)
        own = own if self.direction == ROWWISE else own.t().contiguous()
        amax = stat[:, None] if self.spec.row_scaled and stat is not None else stat
        scales = block_scales(own, self.spec, amax, _FP32_MAX)
        made = {"scale": scales.stored.contiguous()}
        return made if stat is None else {**made, "amax": stat}

    def codes(
        self, values: torch.Tensor, start: int, maxima: torch.Tensor, stat: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the codes of a range, in its order.

        Args:
            values, start: as for `maxima`.
            maxima, stat: as for `small_buffers`.

        Returns:
            uint8 `[n]`, one code per byte; of an identity its values `[n]`.
        """
        if self.spec.format.is_identity:
            return values.to(self.spec.format.storage_dtype or values.dtype)
        if not values.numel():
            return values.new_zeros(0, dtype=torch.uint8)
        window, low = self._window(values, start)
        before = start - low * self.cols
        if self._block is not None and window.numel() != values.numel():
            self._stand_in(window, low, (before, before + values.numel()), maxima)
        if self.spec.row_scaled and self.direction == ROWWISE and stat is not None:
            stat = stat[low : low + window.shape[0]]
        is_row, text = self.direction == ROWWISE, self.spec.text
        pair = (text, "") if is_row else ("", text)
        request = EncodeRequest(*pair, stat if is_row else None, None if is_row else stat)
        data = torch.ops.hybridq.encode(window, *request.planes(), **request.options())[0]
        element = self.spec.format.element
        if element is not None:
            data = unpack(data, element, window.shape[1 if is_row else 0])
        matrix = data if is_row else data.t()
        return matrix.reshape(-1)[before : before + values.numel()]

    def _stand_in(
        self, window: torch.Tensor, low: int, own: tuple[int, int], maxima: torch.Tensor
    ) -> None:
        """Put the maximum of its block in the place of each value that a window lacks.

        Args:
            window: whole rows of blocks, from row `low` on.
            low: the first of them.
            own: the range of the window, flattened, that holds values.
            maxima: of all blocks.
        """
        (first, last), cols, flat = own, self.cols, window.view(-1)
        head, tail = -(-first // cols), last // cols
        flat[:first] = self._spread(maxima, low, low + head)[:first]
        rest = self._spread(maxima, low + tail, low + window.shape[0])
        flat[last:] = rest[last - tail * cols :]

    def _spread(self, maxima: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return the maximum of its block for each value of rows `[first, last)` of X, flat."""
        height, width = self._block or (1, 1)
        device, dtype = maxima.device, torch.int64
        down = torch.arange(first, last, dtype=dtype, device=device) // height
        across = torch.arange(self.cols, dtype=dtype, device=device) // width
        return maxima.view(self._grid)[down][:, across].reshape(-1)

    def data(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the `data` buffer of the plane of X.

        Args:
            codes: of all values, as `codes` returns those of a range.
        """
        matrix = codes.view(self.rows, self.cols)
        own = matrix if self.direction == ROWWISE else matrix.t()
        element = self.spec.format.element
        return own if element is None or self.spec.format.is_identity else pack(own, element)

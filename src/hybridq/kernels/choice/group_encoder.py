"""What is encoded for products of groups: their tokens, and their matrices as one stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .arguments import Groups
from .encode_request import EncodeRequest
from .placed import Place

__all__ = ["GroupEncoder"]


class GroupEncoder(Protocol):
    """Encodes planes of two specs, the rowwise one where it is told, of groups on a GPU.

    FP32 scales that a product reads from block to block lie so for all rows of a plane, or of a
    stack, and each column of them begins at a multiple of 16 bytes.
    """

    def places(self, offsets: torch.Tensor, tokens: int, stream: int) -> Groups:
        """Return where groups lie, by one launch into one allocation.

        Args:
            offsets: int32 `[G]` on the current device, what should be the ends of the groups.
            tokens: how many there are.
            stream: the device's current one.
        """

    def token_room(self, tokens: int, cols: int, groups: int) -> int:
        """Return the bytes of the rowwise plane of tokens, a multiple of `ALIGNMENT`."""

    def stack_room(self, count: int, rows: int, cols: int) -> int:
        """Return the bytes of the rowwise planes of `count` matrices, a multiple of `ALIGNMENT`."""

    def tokens(
        self, x: torch.Tensor, groups: Groups, request: EncodeRequest, place: Place
    ) -> list[torch.Tensor] | None:
        """Return the buffers of the planes of tokens, as a backend's `encode_ragged` does.

        Args:
            x: `[T, C]` on the current device, or what `request.row_index` takes its rows out of.
            groups: what `places` returned.
            request: without statistics and without a seed. Specs with one scale for a tensor have
                one for each group, which is found.
            place: of the rowwise plane; the columnwise plane has an allocation of its own.

        Returns:
            None, and nothing is launched, if no kernel reads such an x through the groups.
        """

    def stack(
        self, xs: Sequence[torch.Tensor], request: EncodeRequest, place: Place
    ) -> list[torch.Tensor] | None:
        """Return the buffers of the planes of all matrices, each `[G, ...]`.

        Args:
            xs: `[rows, cols]` of each group, on the current device.
            request: without statistics; its seed, if there is one, is `[G]`.
            place: of the rowwise planes; the columnwise ones have one allocation. An amax of both
                is one buffer, of the columnwise ones.

        Returns:
            None, and nothing is launched, if no kernel writes them all in these specs.
        """

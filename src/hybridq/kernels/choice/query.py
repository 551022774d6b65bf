"""What backends are asked: an operation, of planes of some specs, on one kind of device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from ...formats import PlaneSpec
from ..inputs import Chip

__all__ = ["OF_PLANES", "OpQuery"]

#: Operations that stand for the encode of each of their planes.
OF_PLANES: Final = (
    "encode",
    "map_encode",
    "encode_many",
    "encode_ragged",
    "map_encode_ragged",
)


@dataclass(frozen=True)
class OpQuery:
    """What a backend must know to say whether it can run an operation.

    A CPU has one way whatever the sizes, so a query about one drops sizes, groups and chip: one
    answer then serves all calls, and calls, `explain` and `doctor` ask the same.

    Args:
        op: `"encode"`, `"decode"`, `"amax"`, `"transpose"`, `"gemm"`, `"grouped_gemm"`, ...
        device: type of the tensors' device, `"cpu"`, `"cuda"`, ...
        dtype: dtype of the high-precision side: input of encode, output of decode and gemm.
        row: spec of the first plane (of operand a), or None.
        col: spec of the second plane (of operand b), or None.
        precision: of a GEMM: `"auto"`, `"exact"` or `"fast"`.
        sizes: (M, N, K) of a GEMM, or None where they are not known.
        chip: the device in more detail, or None where the kind is all that is known.
        is_alone: of a GEMM: neither a bias nor an accumulation follows the product.
        groups: of a grouped GEMM: how many there are, or None where it is not known.
        tokens_per_group: of a grouped GEMM of rows of tokens: how many a group has on average;
            None where the contraction runs over tokens, or where it is not known.
        is_biased: of a grouped GEMM: a bias of the result's dtype follows the product, and nothing
            else does.
    """

    op: str
    device: str
    dtype: torch.dtype
    row: PlaneSpec | None = None
    col: PlaneSpec | None = None
    precision: str = "auto"
    sizes: tuple[int, int, int] | None = None
    chip: Chip | None = None
    is_alone: bool = True
    groups: int | None = None
    tokens_per_group: int | None = None
    is_biased: bool = False

    def __post_init__(self) -> None:
        if self.device == "cpu":
            for name in ("sizes", "chip", "groups", "tokens_per_group"):
                object.__setattr__(self, name, None)

    def parts(self) -> tuple[OpQuery, ...]:
        """Return the operations that this one does in one call; empty where it stands for none.

        Of planes they are the encode of each; an identity plane is a copy, and has none.
        """
        if self.op == "grouped_loop":
            return (self.of_op("grouped_gemm"),)
        if self.op == "skinny_gemm":  # and the product of both, by the backend of products
            own = [replace(self, op="encode", row=spec, col=None) for spec in (self.row, self.col)]
            return (*own, *(replace(one, op="operand", dtype=torch.bfloat16) for one in own))
        if self.op not in OF_PLANES:
            return ()
        return tuple(
            replace(self, op="encode", row=row, col=col)
            for row, col in ((self.row, None), (None, self.col))
            if any(spec is not None and not spec.format.is_identity for spec in (row, col))
        )

    def of_op(self, op: str) -> OpQuery:
        """Return the same question about another operation."""
        return replace(self, op=op)

    def __str__(self) -> str:
        specs = " x ".join(str(spec) for spec in (self.row, self.col) if spec is not None)
        where = self.device if self.chip is None else self.chip
        text = f"{self.op} {specs} on {where} -> {self.dtype}"
        is_gemm = self.op in ("gemm", "grouped_gemm")
        return f"{text}, precision {self.precision}" if is_gemm else text

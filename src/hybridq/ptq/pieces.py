"""What the weights of a checkpoint are to a reader: matrices by name, and stacks of experts.

A stack of experts is one tensor, of gate and up together or of down. A layout that holds no stacks
has each expert's matrices under names of their own.

Source: transformers 5.23, the classes marked `use_experts_implementation`, and Llama 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from ..direction import COLUMNWISE, ROWWISE
from ..errors import CheckpointError
from ..kernels.inputs import HIGH_PRECISION
from ..layouts import GPT_OSS_MXFP4, TORCHAO, Layout
from .found import Weight
from .header import TORCH_DTYPES, Entry
from .source import Shard
from .views import DecodedRows, PlainView, PlaneView, View

__all__ = [
    "Piece",
    "bias_pieces",
    "expert_pieces",
    "is_expert_stack",
    "is_of_one_expert",
    "piece_of",
]

_GATE_UP: Final = "gate_up_proj"
_DOWN: Final = "down_proj"
#: What MLX calls the module of experts, whose gate and up are stacks of their own.
_OF_MLX: Final = "switch_mlp"
_GATE_AND_UP: Final = ("gate_proj", "up_proj")
#: Follows the name of a stack in that of its biases.
_BIAS: Final = "_bias"
#: Models that keep their experts as `[E, in, out]` whatever their sizes say.
_TRANSPOSED: Final = {"gpt_oss", "llama4", "llama4_text"}
#: Models in whose stacks gate and up alternate.
_INTERLEAVED: Final = {"gpt_oss"}


@dataclass(frozen=True)
class Piece:
    """A matrix, or a stack of matrices, that may be quantized.

    Args:
        entry: its name and shape, and the dtype of its values.
        view: where its values stand.
        weight: that it is, or is a part of, if it is quantized already; or None.
        is_transposed: its model keeps it as `[E, in, out]`; its shape here is `[E, out, in]`.
    """

    entry: Entry
    view: View
    weight: Weight | None = None
    is_transposed: bool = False

    @property
    def stored(self) -> PlaneView | None:
        """Its planes, if it is quantized already."""
        return self.view if isinstance(self.view, PlaneView) else None


def piece_of(shard: Shard, item: Entry | Weight) -> Piece:
    """Return a tensor of a file as it is.

    Args:
        shard: the file.
        item: the tensor.
    """
    if isinstance(item, Weight):
        return Piece(item.entry, item.view, item)
    return Piece(item, PlainView.of(shard, item))


def is_expert_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a stack of experts as transformers names them, or MLX.

    Args:
        name, shape: of the tensor.
    """
    *_, parent, last = ("", *name.removesuffix(".weight").split("."))
    known = {"experts": (_GATE_UP, _DOWN), _OF_MLX: (*_GATE_AND_UP, _DOWN)}
    return len(shape) == 3 and last in known.get(parent, ())


def is_of_one_expert(name: str) -> bool:
    """Return whether a weight is a matrix of one expert, under a name of its own.

    Args:
        name: of the weight.
    """
    parts = name.split(".")
    return any(a == "experts" and b.isdigit() for a, b in pairwise(parts))


def expert_pieces(
    shard: Shard, item: Entry | Weight, config: Mapping[str, Any], layout: Layout
) -> list[Piece]:
    """Return what a stack of experts becomes in a layout: itself, or each expert's matrices.

    Args:
        shard: the file that it is in.
        item: the stack.
        config: of the model.
        layout: of the new checkpoint.
    """
    piece = _upright(shard, item, config)
    if layout.holds_stacks:
        return [piece]
    name = piece.entry.name.removesuffix(".weight")
    parent, _, last = name.rpartition(".")
    if parent.endswith(_OF_MLX):
        parent = f"{parent.removesuffix(_OF_MLX)}experts"
    count, rows, cols = piece.entry.shape
    made = []
    for index in range(count):
        for own, first, step, height in _parts(last, rows, config):
            view = _rows_of(piece.view, index, first, step, height)
            entry = replace(
                piece.entry, name=f"{parent}.{index}.{own}.weight", shape=(height, cols)
            )
            made.append(Piece(entry, view, piece.weight, piece.is_transposed))
    return made


def _parts(last: str, rows: int, config: Mapping[str, Any]) -> list[tuple[str, int, int, int]]:
    """Return what an expert's rows are: names of projections, the first row, the step, how many."""
    if last != _GATE_UP:
        return [(last, 0, 1, rows)]
    half = rows // 2
    second = (1, 2) if _model_type(config) in _INTERLEAVED else (half, 1)
    return [("gate_proj", 0, second[1], half), ("up_proj", *second, half)]


def bias_pieces(shard: Shard, entry: Entry, config: Mapping[str, Any]) -> list[Piece]:
    """Return the biases `[1, out]` of each expert, by the names that its matrices' modules have.

    None of a tensor that is no stack of biases `[E, out]`.

    Args:
        shard: the file that it is in.
        entry: the tensor.
        config: of the model.
    """
    parent, _, last = entry.name.rpartition(".")
    stem = last.removesuffix(_BIAS)
    is_stack = len(entry.shape) == 2 and last.endswith(_BIAS) and stem in (_GATE_UP, _DOWN)
    dtype = TORCH_DTYPES.get(entry.dtype)
    if not is_stack or dtype not in HIGH_PRECISION or parent.split(".")[-1] != "experts":
        return []
    count, rows = entry.shape
    made = []
    for index in range(count):
        for own, first, step, height in _parts(stem, rows, config):
            begin = index * rows + first
            view = PlainView(shard, entry, (1, height), (1, step), 0, begin)
            named = replace(entry, name=f"{parent}.{index}.{own}.bias", shape=(1, height))
            made.append(Piece(named, view))
    return made


def _upright(shard: Shard, item: Entry | Weight, config: Mapping[str, Any]) -> Piece:
    """Return a stack as `[E, out, in]`."""
    piece = piece_of(shard, item)
    if piece.weight is not None and piece.weight.stored is not None:
        is_transposed = piece.weight.scheme in GPT_OSS_MXFP4.schemes
        if piece.weight.scheme in TORCHAO.others and _is_transposed(piece.entry, config):
            raise CheckpointError(
                f"export: a stack must be [experts, out, in], got {piece.entry.name!r} as "
                f"[experts, in, out], with scales along its last axis as {TORCHAO.name} has made "
                "them; export the checkpoint in bf16 or fp32 first"
            )
        return replace(piece, is_transposed=is_transposed)
    if not _is_transposed(piece.entry, config):
        return piece
    count, rows, cols = piece.entry.shape
    if piece.weight is not None:
        upright = _upright_planes(piece.weight)
        return replace(
            piece,
            entry=replace(piece.entry, shape=upright.shape),
            view=upright,
            is_transposed=True,
        )
    if not isinstance(piece.view, PlainView):
        return piece
    view = replace(piece.view, matrix=(cols, rows), strides=(1, cols))
    return Piece(replace(piece.entry, shape=(count, cols, rows)), view, None, True)


def _upright_planes(weight: Weight) -> PlaneView:
    """Return hybridq's own planes of a stack `[E, in, out]` as those of `[E, out, in]`.

    Its columnwise plane, which the forward takes, is the rowwise one of the transposed matrices.

    Raises:
        CheckpointError: it has no columnwise plane.
    """
    views = (weight.view, weight.other)
    view = next((one for one in views if one is not None and one.direction == COLUMNWISE), None)
    if view is None:
        raise CheckpointError(
            f"export: a stack [experts, in, out] must have the plane that its forward takes, the "
            f"columnwise one, got {weight.entry.name!r} with the rowwise one alone; export the "
            "model in bf16 or fp32 first"
        )
    count, rows, cols = view.shape
    return replace(view, direction=ROWWISE, shape=(count, cols, rows))


def _rows_of(view: View, index: int, first: int, step: int, height: int) -> View:
    """Return the view of some rows of one matrix of a stack."""
    if isinstance(view, PlaneView):
        if _are_cut(view, first, step, height):
            whole = replace(view, shape=view.shape[-2:], index=index)
            return DecodedRows(whole, first, step, height)
        return replace(view, shape=(height, view.shape[-1]), index=index, first=first, step=step)
    if not isinstance(view, PlainView):
        raise TypeError(f"export: takes rows of plain tensors and planes, got {view!r}")
    high, wide = view.strides
    return replace(
        view,
        matrix=(height, view.matrix[1]),
        strides=(high * step, wide),
        first=view.first + index * view.pitch + first * high,
        pitch=0,
    )


def _are_cut(view: PlaneView, first: int, step: int, height: int) -> bool:
    """Return whether rows of a quantized matrix are no blocks of their own."""
    rows, block = view.shape[-2], view.units[0]
    is_part = height != rows and view.direction == ROWWISE
    return is_part and block > 1 and (step > 1 or bool(first % block))


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", ""))


def _is_transposed(entry: Entry, config: Mapping[str, Any]) -> bool:
    """Return whether a stack is `[E, in, out]`: by its sizes, or else by its model."""
    _, rows, cols = entry.shape
    texts = [config, config.get("text_config") or {}]
    hidden = next((one["hidden_size"] for one in texts if "hidden_size" in one), None)
    is_down = entry.name.removesuffix(".weight").endswith(_DOWN)
    if hidden is not None and rows != cols and hidden in (rows, cols):
        return bool((cols if is_down else rows) == hidden)
    return any(str(one.get("model_type", "")) in _TRANSPOSED for one in texts)

"""What a step of each axis costs: `python costs_program.py RANK WORLD STORE NAME...`.

Counted by benchmarks/axes_steps.py, and held to formulas: of the shapes, of the sizes of formats,
and of what each axis has to exchange. A scenario's text is the number of layers.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from typing import Any

import torch.distributed as dist
from rank_program import main

from places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
warnings.simplefilter("ignore")

import axes_steps as steps  # noqa: E402

HIDDEN, INNER, VOCAB, TOKENS = 128, 256, 256, 8 * 64
#: Features of the inputs of q, k, v, o, gate, up, down, and of their outputs.
INPUTS = (*(HIDDEN,) * 6, INNER)
OUTPUTS = (*(HIDDEN,) * 4, INNER, INNER, HIDDEN)
LINEARS = len(INPUTS)
#: Of them, those that are cut by rows, in the order above; the others by columns.
BY_ROWS = (True, True, True, False, True, True, False)
WEIGHTS = sum(a * b for a, b in zip(INPUTS, OUTPUTS, strict=True))
#: Axes whose ranks have all weights, and sum gradients by DDP.
REPLICATED = ("DDP", "Ulysses and DDP", "Ulysses, `communication`", "ring attention and DDP")
#: Bytes of a value in planes forward and backward, beside scales of tensors.
SIZES = {"BF16": (2, 2), "MXFP8": (33 / 32, 33 / 32), "hybrid": (33 / 32, 9 / 16)}


class Want:
    """What a step must cost, put together from what its axis does."""

    def __init__(self, recipe: str, layers: int, world: int) -> None:
        self.recipe, self.layers, self.world = recipe, layers, world
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.encodes: Counter[str] = Counter(matrices=0, planes=0, values=0)
        self.rest = 2 * VOCAB * HIDDEN + HIDDEN  # parameters outside of layers
        self.norms = 2 * HIDDEN

    @property
    def num_params(self) -> int:
        return self.layers * (WEIGHTS + self.norms) + self.rest

    def move(self, kind: str, calls: int, nbytes: float) -> None:
        assert nbytes == int(nbytes), (kind, nbytes)
        self.calls[kind] += calls
        self.nbytes[kind] += calls * int(nbytes)

    def encode(self, calls: int, planes: int, values: int) -> None:
        """So many operations for each linear layer that make so many planes of so many values.

        Args:
            calls, planes: of each linear layer.
            values: of a plane of them all, in one layer.
        """
        if self.recipe != "BF16":
            self.encodes["matrices"] += self.layers * LINEARS * calls
            self.encodes["planes"] += self.layers * LINEARS * planes
            self.encodes["values"] += self.layers * planes * values

    def activations(self, tokens: int, times: int = 1) -> None:
        """Both planes of each input, and of each gradient, made at once."""
        for sizes in (INPUTS, OUTPUTS):
            self.encode(times, 2 * times, tokens * sum(sizes))

    def weights(self, values: int = WEIGHTS) -> None:
        """Both planes; the hybrid recipe's columnwise one is made of the decoded rowwise one."""
        self.encode(2 if self.recipe == "hybrid" else 1, 2, values)

    def sharded(self, ranks: int, parts: int = 1) -> None:
        """FSDP2: planes of the forward, then those of the backward, of each layer.

        The rowwise plane that the hybrid recipe's columnwise one needs is made again for the
        gather, and once more after the optimizer, where amaxes are reduced.
        """
        weights, row, col = WEIGHTS // parts, *SIZES[self.recipe]
        is_ours = self.recipe != "BF16"
        signature, amaxes = 16 * ranks * is_ours, 4 * ranks * LINEARS * (self.recipe == "hybrid")
        self.move("all_gather", self.layers, weights * row + self.norms * 2 + signature)
        self.move("all_gather", self.layers, weights * col + self.norms * 2 + signature + amaxes)
        self.move("all_gather", 1, self.rest * 2)
        self.move("reduce_scatter", self.layers, (weights + self.norms) * 2)
        self.move("reduce_scatter", 1, self.rest * 2)
        times = 4 if self.recipe == "hybrid" else 2
        self.encode(times, times, weights // ranks)
        if self.recipe == "hybrid":
            self.move("all_reduce", 1, 4 * LINEARS * self.layers)
            if parts > 1:  # over the tensor-parallel ranks too
                self.move("all_reduce", 1, 4 * LINEARS * self.layers)

    def tensor(self, tokens: int, parts: int, shares_tokens: bool, is_sharded: bool) -> None:
        """Tensor parallelism: sums of activations, and amaxes of what is cut under NVFP4."""
        hidden = 2 * tokens * HIDDEN
        if shares_tokens:
            # Each way and layer two; embedding and head, and the head's output.
            self.move("all_gather", 4 * self.layers + 2, hidden)
            self.move("all_gather", 1, 2 * tokens * VOCAB)
            self.move("reduce_scatter", 4 * self.layers + 2, hidden)
            self.move("all_reduce", 2 * self.layers + 1, 2 * HIDDEN)  # gradients of norms
        else:
            self.move("all_reduce", LINEARS * self.layers, hidden)
        if self.recipe == "hybrid":
            rows = sum(BY_ROWS)
            self.move("all_reduce", rows * self.layers, 8)  # both planes of a gradient
            self.move("all_reduce", (LINEARS - rows) * self.layers, 4)  # an input's columnwise one
            if not is_sharded:
                self.move("all_reduce", LINEARS * self.layers, 4)  # a weight's columnwise one
        for sizes, is_cut in ((INPUTS, False), (OUTPUTS, True)):
            own = [
                size // parts if by_rows is is_cut else size
                for size, by_rows in zip(sizes, BY_ROWS, strict=True)
            ]
            self.encode(1, 2, tokens * sum(own))
        if not is_sharded:
            self.weights(WEIGHTS // parts)

    def tensor_planes(self) -> None:
        """Tensor parallelism whose ranks share tokens, each layer's as planes: all is cut."""
        row, col = SIZES[self.recipe]
        hidden, rows = TOKENS * HIDDEN, sum(BY_ROWS)
        is_hybrid, ends = self.recipe == "hybrid", LINEARS - rows
        self.move("all_gather", rows * self.layers, hidden * row)  # inputs, forward
        self.move("all_gather", rows * self.layers, hidden * col)  # and backward
        self.move("all_gather", ends * self.layers, hidden * (col if is_hybrid else row) * 2)
        self.move("all_gather", 2, 2 * hidden)  # of the head's input, and the embedding's gradient
        self.move("all_gather", 1, 2 * TOKENS * VOCAB)
        self.move("reduce_scatter", LINEARS * self.layers + 2, 2 * hidden)
        self.move("all_reduce", 2 * self.layers + 1, 2 * HIDDEN)
        if is_hybrid:  # both planes of gradients; columnwise ones of inputs and of weights
            self.move("all_reduce", LINEARS * self.layers, 8)
            self.move("all_reduce", 2 * LINEARS * self.layers, 4)
            # A sequence by itself: random bits belong to places.
            more = ends * (steps.BATCH - 1) * self.layers
            self.encodes.update(matrices=more, planes=2 * more)
        self.activations(TOKENS // self.world)
        self.weights(WEIGHTS // self.world)

    def ring(self) -> None:
        """Ring attention: keys and values of all ranks each way, and FP32 gradients back."""
        own = TOKENS // self.world * 2 * HIDDEN
        self.move("all_gather", 2 * self.layers, self.world * own * 2)
        self.move("all_to_all", self.world * self.layers, own * 4)

    def exchanged(self, travels: bool) -> None:
        """Ulysses: of each layer q, k, v in one message each way, and attention's result."""
        tokens, size = TOKENS // self.world, SIZES[self.recipe if travels else "BF16"]
        for values in (3 * tokens * HIDDEN, tokens * HIDDEN):
            for number, each in enumerate(size):
                has_amax = travels and number == 1 and self.recipe == "hybrid"
                amaxes = 4 * self.world * has_amax
                self.move("all_to_all", self.layers, values * each + amaxes)
                if travels:  # a format with a scale for each message: one by one
                    messages = self.world if has_amax else 1
                    self.encodes["matrices"] += messages * self.layers
                    self.encodes["planes"] += messages * self.layers
                    self.encodes["values"] += values * self.layers


def want_of(axis: str, recipe: str, layers: int) -> Want:
    world = dist.get_world_size()
    made = Want(recipe, layers, world)
    if axis in REPLICATED:
        made.nbytes["all_reduce"] = made.num_params * 2
        made.weights()
        made.activations(TOKENS // world)
        if axis.startswith("Ulysses"):
            made.exchanged("communication" in axis)
        elif axis.startswith("ring"):
            made.ring()
    elif "planes" in axis:
        made.tensor_planes()
    elif axis == "FSDP2":
        made.sharded(world)
        made.activations(TOKENS // world)
    elif axis.startswith("pipeline"):
        count, own = steps.MICROBATCHES, Want(recipe, layers // world, world)
        values, travels = TOKENS // count * HIDDEN, "communication" in axis
        there, back = SIZES[recipe if travels else "BF16"]
        own.weights()
        own.activations(TOKENS // count, count)
        own.move("send", count, values * there)
        own.move("recv", count, values * back + 4 * (travels and recipe == "hybrid"))
        if travels:
            own.encodes.update(matrices=count, planes=count, values=count * values)
        return own
    else:
        is_sharded = "FSDP2" in axis
        parts, groups = (2, world // 2) if is_sharded else (world, 1)
        made.tensor(TOKENS // groups, parts, "Sequence" in axis, is_sharded)
        if is_sharded:
            made.sharded(groups, parts)
    return made


def check(axis: str, recipe: str, layers: int) -> dict[str, Any]:
    found, want = steps.cost(axis, recipe), want_of(axis, recipe, layers)
    if axis.startswith("pipeline") and dist.get_rank():
        return found  # another stage's
    what = (axis, recipe, found, want.calls, want.nbytes, want.encodes)
    assert found["encodes"] == dict(want.encodes), what
    if axis in REPLICATED:
        # Buckets are torch's; labels, lengths and positions of sequences are counted and compared.
        for kind, nbytes in found["bytes"].items():
            assert 0 <= nbytes - want.nbytes[kind] <= 1200, (kind, what)
        kinds = ["all_to_all"] if want.calls["all_to_all"] else []
    else:
        kinds = [*want.calls]
        assert set(found["collectives"]) == set(kinds), what
    for kind in kinds:
        assert found["collectives"][kind] == want.calls[kind], (kind, what)
        assert found["bytes"][kind] == want.nbytes[kind], (kind, what)
    return found


#: What the default suite runs: of axes that are alike one, with the most that is quantized.
SOME = (
    "FSDP2",
    "tensor, `SequenceParallel`",
    "Ulysses, `communication`",
    "pipeline, `communication`",
)


def some(layers: str) -> None:
    """The hybrid recipe on some axes."""
    steps.SIZES["num_hidden_layers"] = int(layers)
    for axis in SOME:
        check(axis, "hybrid", int(layers))


def kept(file: str) -> None:
    """All that the guide's tables show."""
    with open(file) as opened:
        by_axis = json.load(opened)["measured"][str(dist.get_world_size())]
    for axis, recipe in steps.cases(dist.get_world_size()):
        found = check(axis, recipe, steps.SIZES["num_hidden_layers"])
        if dist.get_rank() == 0:
            assert found == by_axis[axis][recipe], (axis, recipe, found, by_axis[axis][recipe])


if __name__ == "__main__":
    main(globals(), timeout=120.0)

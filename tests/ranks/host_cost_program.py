"""What gathers cost the host: `python host_cost_program.py RANK WORLD STORE NAME...`."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch
from rank_program import main
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq._torch_private import num_dispatch_modes
from hybridq.distributed import prepare_fsdp2
from hybridq.kernels.inputs import dispatch_bypass


class Operators(TorchDispatchMode):
    """Counts operators, unseen: what goes past the dispatcher where nobody watches does so here."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> Any:
        dispatch_bypass.num_dispatch_modes = lambda: 0  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        dispatch_bypass.num_dispatch_modes = num_dispatch_modes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def host_cost(
    rows: int,
    count: int,
    recipe: str | None,
    is_quantized: bool = False,
    is_compiled: bool = False,
) -> tuple[int, int]:
    """Return the calls, Python's and C's, and the operators of the gather of a unit of weights."""
    dtype = torch.bfloat16 if is_quantized else None
    with hybridq.quantized_model_init(recipe or "mxfp8", enabled=is_quantized and bool(recipe)):
        layers = [
            hybridq.Linear(64 if rows == 64 or not n else rows, rows, bias=False, dtype=dtype)
            for n in range(count)
        ]
    model = nn.Sequential(*layers)
    if recipe is not None:
        prepare_fsdp2(model)
        hybridq.update_scaling(model)  # what tells of steps
    if is_compiled:
        model.compile(backend="eager")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        calls = counted(model)
        with Operators() as operators:
            model.unshard()
            model.reshard()
    return calls, operators.count


def counted(model: Any) -> int:
    """Return the calls of a gather and of its end, after some that were alike."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(3):
        model.unshard()
        model.reshard()
    sys.setprofile(note)
    model.unshard()
    model.reshard()
    sys.setprofile(None)
    return calls


#: One of each way in which planes travel: alone, with a scale of the tensor, derived where a graph
#: wants both, and of two formats, the second made of the first.
#: And with histories, which costs most.
SOME = ("mxfp8", "nvfp4", "fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd", "fp8_delayed")


def calls(which: str) -> None:
    """What a gather costs the host beside plain FSDP2's: one weight, a unit of four or of eight.

    Of parameters in high precision and quantized ones, eager and compiled; `which` is "every"
    recipe and size, or "some": eight uneven shards, which cost most.
    """
    recipes = SOME if which == "some" else hybridq.recipes.names()
    sizes = ((65, 8),) if which == "some" else tuple(product((64, 65), (1, 4, 8)))
    for (rows, count), *kind in product(sizes, (False, True), (False, True)):
        plain = host_cost(rows, count, None, *kind)
        for recipe in recipes:
            own = host_cost(rows, count, recipe, *kind)
            what = (recipe, kind, rows, count, own, plain)
            assert own[0] <= 1.5 * plain[0], what
            # What FSDP2 is given are views, what is copied one operation: hardly more of a unit.
            assert own[1] <= plain[1] + 24, what
            assert own[1] <= (2.7 if count == 1 else 2.5) * plain[1], what


def stack_cost(groups: int, recipe: str | None, is_quantized: bool = False) -> int:
    """Return the calls, Python's and C's, of the gather of one weight of several matrices."""
    dtype = torch.bfloat16 if is_quantized else None
    with hybridq.quantized_model_init(recipe or "mxfp8", enabled=is_quantized and bool(recipe)):
        options = {"bias": False, "single_grouped_weight": True, "dtype": dtype}
        model = hybridq.GroupedLinear(groups, 64, 64, **options)
    if recipe is not None:
        prepare_fsdp2(model)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        return counted(model)


def calls_of_stacks() -> None:
    """Of matrices in one tensor: what is held takes as many calls however many there are."""
    for groups in (4, 5, 16):
        plain = stack_cost(groups, None)
        for recipe in ("mxfp8", "nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd"):
            for kind in (True, False):
                own = stack_cost(groups, recipe, kind)
                assert own <= (1.3 if kind else 1.5) * plain, (recipe, kind, groups, own, plain)


if __name__ == "__main__":
    main(globals())

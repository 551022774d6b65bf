"""Sums of sequence parallelism whose terms are quantized: `... RANK WORLD STORE NAME...`.

The oracle quantizes each rank's term by the public quantizer, and adds in the order of ranks.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq.distributed import ColwiseParallel, RowwiseParallel, quantize_token_sums
from hybridq.errors import SpecError
from hybridq.nn.autograd import group_sums
from hybridq.shards import token_gather

HIDDEN, INNER, TOKENS = 64, 128, 128
FORMATS = ("mxfp8", ("nvfp4", "mxfp8"), ("fp8_1x128", None), "recipe", None)


class Pair(nn.Module):
    """A column parallel layer, and a row parallel one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        ranks = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
        self.up = hybridq.Linear(HIDDEN, INNER, parallel_mode="column", **ranks)
        self.down = hybridq.Linear(INNER, HIDDEN, parallel_mode="row", bias=False, **ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Styled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = hybridq.Linear(HIDDEN, INNER)
        self.down = hybridq.Linear(INNER, HIDDEN, bias=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(self, mesh, plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def by_role(role: Any) -> Any:
    if role.tensor_type == "output_sum":
        return hybridq.quantizer("mxfp8")
    if role.tensor_type == "grad_input_sum":
        return hybridq.quantizer("fp8_1x128")
    return hybridq.MXFP8Quantizer()


@contextmanager
def seen() -> Any:
    """Give the terms of this rank, their formats, and what it found of their sums."""
    found: list[tuple[torch.Tensor, str, torch.Tensor]] = []
    plain = token_gather.send_sum

    class Waits:
        def __init__(self, x: Any, spec: str, flight: Any) -> None:
            self.given = x, spec, flight

        def wait(self) -> torch.Tensor:
            x, spec, flight = self.given
            made = flight.wait()
            found.append((x.detach().clone(), spec, made.detach().clone()))
            return made

    def send(x: torch.Tensor, world: int, group: str, spec: str = "") -> Any:
        return Waits(x, spec, plain(x, world, group, spec))

    token_gather.send_sum = group_sums.send_sum = send
    try:
        yield found
    finally:
        token_gather.send_sum = group_sums.send_sum = plain


def wanted(term: torch.Tensor, name: str | None) -> torch.Tensor:
    """Return this rank's rows of the sum of all ranks' terms."""
    world, rank = dist.get_world_size(), dist.get_rank()
    terms = [torch.empty_like(term) for _ in range(world)]
    dist.all_gather(terms, term)
    if name is None:
        return sum(terms[1:], terms[0]).chunk(world)[rank]
    options = {"row_scaled": True} if name == "nvfp4" else {}
    total = None
    for one in terms:
        own = hybridq.quantize(one.float(), name, columnwise=False, **options).dequantize()
        total = own if total is None else total + own
    return total.to(term.dtype).chunk(world)[rank]


def step(model: Any, x: torch.Tensor, recipe: Any) -> list[torch.Tensor]:
    own = x.clone().requires_grad_()
    model.zero_grad()
    if recipe is None:
        y = model(own)
    else:
        with hybridq.autocast(recipe=recipe):
            y = model(own)
    y.square().sum().backward()
    return [y.detach(), own.grad]


def near(a: torch.Tensor, b: torch.Tensor, what: Any, bound: float) -> None:
    error = float((a - b).norm() / b.norm().clamp(min=1e-12))
    assert error <= bound, (what, error)


def tokens(kind: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(10 + dist.get_rank())
    shape = (2, TOKENS, HIDDEN) if kind is Styled else (TOKENS, HIDDEN)
    return torch.randn(shape, dtype=dtype)


def sums() -> None:
    """Outputs and gradients of inputs are sums of quantized terms, to the bit."""
    for kind in (Pair, Styled):
        x = tokens(kind)
        for recipe in (None, "mxfp8", "mxfp8_fwd_nvfp4_bwd", hybridq.CustomRecipe(by_role)):
            if recipe is None and kind is Styled:
                continue  # torch scatters values itself
            plain = step(kind(), x, recipe)
            for formats in FORMATS:
                is_asked = formats == "recipe"
                if is_asked and not isinstance(recipe, hybridq.CustomRecipe):
                    continue
                model = quantize_token_sums(kind(), formats)
                with seen() as found:
                    made = step(model, x, recipe)
                pair = formats if isinstance(formats, tuple) else (formats, formats)
                names = ("mxfp8", "fp8_1x128") if is_asked else pair
                assert len(found) == 2, (kind, recipe, len(found))
                for (term, spec, own), name in zip(found, names, strict=True):
                    assert bool(spec) == (name is not None), (spec, name)
                    if name is None:
                        near(own, wanted(term, None), "values", 1e-6)
                    else:
                        assert torch.equal(own, wanted(term, name)), (kind, recipe, name)
                bound = 0.2 if "nvfp4" in str(formats) or "nvfp4" in str(recipe) else 0.07
                for a, b in zip(made, plain, strict=True):
                    near(a, b, (kind, recipe, formats), bound)


def messages() -> None:
    """In MXFP8 a sum moves 0.516 of BF16's bytes."""

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.nbytes: list[int] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if any(name in str(func) for name in ("all_to_all_single", "reduce_scatter_tensor")):
                self.nbytes.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    found = []
    for formats in (None, "mxfp8"):
        model = quantize_token_sums(Pair().bfloat16(), formats)
        x = tokens(Pair, torch.bfloat16)
        with Count() as count:
            step(model, x, "mxfp8")
        found.append(count.nbytes)
    assert len(found[0]) == 2
    assert [a / b for a, b in zip(found[1], found[0], strict=True)] == [33 / 64] * 2, found


def compiled() -> None:
    """Graphs have the bits of eager code."""
    for recipe in ("mxfp8", hybridq.CustomRecipe(by_role)):
        formats = "mxfp8" if isinstance(recipe, str) else "recipe"
        model = quantize_token_sums(Pair(), formats)
        x = tokens(Pair)
        eager = step(model, x, recipe)
        graph = step(torch.compile(model, fullgraph=True, backend="aot_eager"), x, recipe)
        for a, b in zip(eager, graph, strict=True):
            assert torch.equal(a, b), recipe


def refused() -> None:
    """Errors say what to do, on every rank."""
    rank = dist.get_rank()
    for kind, text, call in (
        (ValueError, "sequence_parallel=True", partial(quantize_token_sums, nn.Linear(4, 4), None)),
        (TypeError, "must be an nn.Module", partial(quantize_token_sums, 3, None)),
        (SpecError, "scales are of one row", partial(quantize_token_sums, Pair(), "fp8_e4m3")),
        (SpecError, "rounded to nearest", partial(quantize_token_sums, Pair(), "nvfp4;rows;sr")),
        (SpecError, "communication", partial(quantize_token_sums, Pair(), "mxfp9")),
        (TypeError, "communication", partial(quantize_token_sums, Pair(), 8)),
    ):
        try:
            call()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    try:
        quantize_token_sums(Pair(), "mxfp8" if rank else "nvfp4")
    except RuntimeError as error:
        assert "the formats of sums" in str(error), error
    else:
        raise AssertionError("ranks chose different formats")


if __name__ == "__main__":
    main(globals())

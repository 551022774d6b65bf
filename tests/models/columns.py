"""What must hold of every family: functions that raise where it does not, columns of the table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

import hybridq

from .checks import Run, converted, gemm_errors, run, same
from .families import Family
from .linear_flops import LinearFlops, linear_flops

__all__ = ["COLUMNS", "NotThere", "flops"]

_T = TypeVar("_T")
#: Kinds of models of which every linear product is reached but heads and routers.
_WHOLE = ("dense", "experts", "state space", "state space and experts", "state space and attention")


class NotThere(Exception):
    """The model itself does not have what is asked for; the text says what."""


def flops(family: Family) -> LinearFlops:
    """Return how the operations of a forward under `mxfp8` were counted."""
    model = converted(family)
    return linear_flops(model, family.batch(model), "mxfp8")


def same_bits(family: Family, _: Path) -> None:
    """Without a recipe: loss, every output (router logits too) and every gradient, bit for bit."""
    plain = family.build()
    batch = family.batch(plain)
    before = run(plain, batch)
    model = converted(family)
    assert list(model.state_dict()) == list(plain.state_dict())
    same(before, run(model, batch))


def gemms(family: Family, _: Path) -> None:
    """The three GEMMs of each linear module against FP64 of the same planes."""
    for name in ("mxfp8", "fp8_block"):
        model = converted(family)
        errors = gemm_errors(model, family.batch(model), hybridq.recipes.get(name))
        wrong = {where: error for where, error in errors.items() if not error < 3e-7}
        assert not wrong, (name, wrong)


def reached(family: Family, _: Path) -> None:
    """At least 95% of the linear operations are quantized, heads and routers apart."""
    if family.kind not in _WHOLE:
        raise NotThere("no decoder")
    counted = flops(family)
    assert counted.share >= 0.95, counted.plain_in.most_common(5)


def ten_steps(family: Family, _: Path) -> None:
    """Ten steps of AdamW under `mxfp8`: finite, and the loss falls."""
    model = converted(family).train()
    batch = family.batch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _step in range(10):
        losses.append(run(model, batch, "mxfp8").loss)
        optimizer.step()
    assert torch.stack(losses).isfinite().all()
    assert min(losses[5:]) < losses[0]


def recomputation(family: Family, _: Path) -> None:
    """Activation checkpointing: the same bits, with stochastic rounding too."""
    model = converted(family).train()
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise NotThere("no checkpointing")
    model.config.use_cache = False  # the two exclude each other
    batch = family.batch(model)
    before = run(model, batch, "mxfp8_fwd_nvfp4_bwd")
    model.gradient_checkpointing_enable()
    same(before, run(model, batch, "mxfp8_fwd_nvfp4_bwd"), summed=("shared.weight",))


def generates(family: Family, _: Path) -> None:
    """`generate` under `mxfp8`."""
    if not family.generates:
        raise NotThere("no generation")

    def made(model: nn.Module) -> torch.Tensor:
        batch = {name: one for name, one in family.batch(model).items() if name != "labels"}
        with hybridq.autocast(recipe="mxfp8"):
            return model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)

    tokens = _unless_plain_fails(family, made, converted(family), "the plain model fails too")
    assert tokens.shape[0] == 2 and tokens.shape[1] >= 4


def files(family: Family, folder: Path) -> None:
    """`save_pretrained` and `from_pretrained`: the same bits."""
    model = converted(family)
    batch = family.batch(model)
    before = run(model, batch, "mxfp8")
    model.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridq.HybridQWarning)
        again = hybridq.convert(
            type(model).from_pretrained(folder, attn_implementation=family.attention).eval()
        )
    for one, other in zip(again.parameters(), model.parameters(), strict=True):
        one.requires_grad_(other.requires_grad)
    same(before, run(again, batch, "mxfp8"))


def compiled(family: Family, _: Path) -> None:
    """`torch.compile` of the model, forward and backward; one graph where the plain one is."""

    def one_graph(model: nn.Module) -> Run:
        model.config.use_cache = False
        torch._dynamo.reset()
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        return run(whole, family.batch(model), "mxfp8")

    model = converted(family)
    before = run(model, family.batch(model), "mxfp8")
    after = _unless_plain_fails(family, one_graph, model, "the plain model is not one graph either")
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-3, atol=1e-4)


def lora(family: Family, _: Path) -> None:
    """PEFT's LoRA on all linear layers: the adapters train, and nothing else."""
    import peft

    def adapted(model: nn.Module) -> Run:
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        made = peft.get_peft_model(model.train(), config)
        return run(made, family.batch(model), "mxfp8")

    first = _unless_plain_fails(family, adapted, converted(family), "PEFT refuses the plain model")
    assert first.loss.isfinite()
    trained = {name for name, grad in first.grads.items() if grad is not None}
    assert trained and all("lora_" in name for name in trained)


def _unless_plain_fails(
    family: Family, function: Callable[[nn.Module], _T], model: nn.Module, reason: str
) -> _T:
    """Return what a function makes of a model; what it cannot make of the plain one is no fault."""
    try:
        return function(model)
    except Exception:
        try:
            function(family.build())
        except Exception as error:
            raise NotThere(reason) from error
        raise


#: In the order of the table.
COLUMNS: dict[str, Callable[[Family, Path], None]] = {
    "same bits": same_bits,
    "gemms": gemms,
    "reached": reached,
    "steps": ten_steps,
    "recomputation": recomputation,
    "generate": generates,
    "files": files,
    "compile": compiled,
    "lora": lora,
}

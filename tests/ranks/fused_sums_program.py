"""Products of fused modules over ranks: `python fused_sums_program.py RANK WORLD STORE NAME...`.

What a module over ranks returns is compared elsewhere with a whole module's, whose sums have
another order: a last bit that differs may round a code of the next product another way, so that
comparison holds the wiring. Here each product is held to its own operands: what ranks multiplied,
put together, is encoded as one matrix on one process, decoded, and multiplied in FP64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fused_style_program import BATCH, CASES, FEW, HIDDEN, INNER, MANY, mesh_of, own_part, recipe_of
from rank_program import main
from torch.distributed.tensor.parallel import parallelize_module

import hybridq
from hybridq.distributed import FusedParallel
from hybridq.nn.modules import attention_parts, layernorm_linear, layernorm_mlp, linear, linear_part
from hybridq.nn.modules.dealt_parameters import matrices_of
from hybridq.nn.modules.tensor_parallel import COLUMN

RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current", "fp8_block")
_CALLERS = (layernorm_linear, layernorm_mlp, linear, attention_parts)


class Product(NamedTuple):
    """One linear part in one forward, and what its backward made.

    Attributes:
        module, part, plan: what was computed.
        x, weight, bias, y: this rank's tensors.
        normed: what a norm in front was given, or None.
        grads: by name of these, their gradients.
    """

    module: Any
    part: str
    plan: Any
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    y: torch.Tensor
    normed: tuple[Any, torch.Tensor] | None
    grads: dict[str, torch.Tensor]


@contextmanager
def recorded() -> Iterator[list[Product]]:
    """Give all products of the block, a norm or an activation in front of each apart from it."""
    plain, found = linear_part.run_part, []

    def run_part(
        module: Any,
        part: str,
        recipe: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        first: Any = None,
        before: Any = None,
    ) -> torch.Tensor:
        plan, grads, normed = module.plan_of(recipe, part), {}, None
        if before is not None:
            given = x
            x = linear_part._prologue(module, plan, x, before)
            normed = (before.prologue, given.detach()) if before.gamma is not None else None
        x, weight = x.view_as(x), weight.view_as(weight)
        y = plain(module, part, recipe, x, weight, bias, first)
        for name, one in (("x", x), ("weight", weight), ("y", y)):
            one.register_hook(lambda grad, name=name: grads.update({name: grad.clone()}))
        tensors = (x.detach(), weight.detach(), None if bias is None else bias.detach(), y.detach())
        found.append(Product(module, part, plan, *tensors, normed, grads))
        return y

    for caller in _CALLERS:
        caller.run_part = run_part
    try:
        yield found
    finally:
        for caller in _CALLERS:
            caller.run_part = plain


def together(own: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return the tensors of all ranks side by side; or what all of them have, which is checked."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    if dim is None:
        assert all(torch.equal(one, own) for one in parts)
        return own
    return torch.cat(parts, dim)


def operands(x: torch.Tensor, slot: Any) -> list[torch.Tensor]:
    """Return what products take of both planes of a whole matrix, in FP64.

    Blocks that were transformed are multiplied as they are: both operands of a product have the
    same transform, which is orthogonal.
    """
    specs = (slot.row.spec, slot.col.spec)
    buffers = torch.ops.hybridq.encode(x, *specs, col_source=slot.col_source)
    made = []
    for text, shape in zip(specs, (x.shape, x.shape[::-1]), strict=True):
        spec = hybridq.formats.PlaneSpec.parse(text).resolve(x.dtype)
        own = [buffers.pop(0) for _ in spec.buffers(*shape)]
        spec = replace(spec, signs=None)
        made.append(torch.ops.hybridq.decode(own, spec.text, *shape, torch.float32).double())
    return [made[0], made[1].t()]


def check(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, plus: Any, what: Any) -> float:
    """Hold `a @ b + plus` to sums in FP32 in any order; return the largest share of the bound.

    A sum of n terms in FP32 is off by at most (n - 1) u of the sum of their magnitudes, u = 2^-24,
    plus u for each rounding behind it: of a rank's term, of the sum over ranks, of a bias.
    """
    n = a.shape[1] + dist.get_world_size() + 2
    magnitudes = a.abs() @ b.abs()
    wanted = a @ b
    if plus is not None:
        magnitudes, wanted = magnitudes + plus.abs(), wanted + plus
    error, bound = (found.double() - wanted).abs(), n * 2.0**-24 * magnitudes
    assert bool((error <= bound).all()), (*what, float((error / bound).nan_to_num().max()))
    return float((error / bound.clamp_min(1e-300)).max())


def check_product(one: Product, is_dealt: bool, what: Any) -> list[float]:
    """Compare a product and both of its gradients with those of the operands of all ranks."""
    is_column = one.module.parallel[one.part].mode == COLUMN
    tokens = 0 if is_dealt else None
    of_x, of_y = (tokens, -1) if is_column else (-1, tokens)

    def flat(own: torch.Tensor, dim: int | None) -> torch.Tensor:
        return together(own, dim).flatten(0, -2)

    x, y, dx = flat(one.x, of_x), flat(one.y, of_y), flat(one.grads["x"], of_x)
    dy, w = flat(one.grads["y"], of_y), together(one.weight, 0 if is_column else 1)
    dw = together(one.grads["weight"], 0 if is_column else 1)
    bias = one.bias
    if bias is not None:
        bias = together(bias, 0 if is_column else None).double()
    (x_row, x_col), (w_row, w_col) = operands(x, one.plan.input), operands(w, one.plan.weight)
    dy_row, dy_col = operands(dy, one.plan.grad_output)
    what = (*what, type(one.module).__name__, one.part)
    return [
        check(y, x_row, w_row.t(), bias, (*what, "y")),
        check(dx, dy_row, w_col, None, (*what, "dx")),
        check(dw, dy_col.t(), x_col, None, (*what, "dw")),
    ]


def check_parameters(one: Product, is_dealt: bool, what: Any) -> None:
    """Gradients of parameters: those of the products, and sums over all tokens."""
    module, prefix = one.module, f"{one.part}_" if one.part else ""
    names = matrices_of(module, f"{prefix}weight")
    own = [getattr(module, name).grad.to_local() for name in names]
    is_column = module.parallel[one.part].mode == COLUMN
    assert torch.equal(torch.cat(own), one.grads["weight"]), (*what, names)
    dim = 0 if is_dealt else None
    if one.bias is not None:
        names = matrices_of(module, f"{prefix}bias")
        made = torch.cat([getattr(module, name).grad.to_local() for name in names])
        dy = one.grads["y"] if is_column else together(one.grads["y"], dim)
        dy = dy.flatten(0, -2).double()
        bound = (dy.shape[0] + 8) * 2.0**-24 * dy.abs().sum(0)
        assert bool(((made.double() - dy.sum(0)).abs() <= bound).all()), (*what, names)
    if one.normed is not None:
        norm, given = one.normed
        x = together(given, dim).double()
        dy = together(one.grads["x"], dim).double()
        gamma = module.layer_norm_weight.full_tensor().detach().double().requires_grad_()
        beta = module.layer_norm_bias
        beta = None if beta is None else beta.full_tensor().detach().double()
        norm.plain(x, gamma, beta).backward(dy)
        error = (module.layer_norm_weight.grad.full_tensor().double() - gamma.grad).norm()
        assert error < 2e-6 * gamma.grad.norm(), (*what, "norm", float(error / gamma.grad.norm()))


def products(names: str) -> None:
    """Products, gradients of weights, of biases and of norms, each within its own bound."""
    mesh, largest = mesh_of(), [0.0, 0.0, 0.0]
    for name in names.split(","):
        for recipe_name in RECIPES:
            recipe = recipe_of("layer", recipe_name)
            for is_dealt, tokens in ((False, FEW), (True, FEW), (True, MANY)):
                torch.manual_seed(0)
                module = parallelize_module(
                    CASES[name](), mesh, FusedParallel(sequence_parallel=is_dealt)
                )
                torch.manual_seed(1)
                out = INNER if name == "norm" else HIDDEN
                x, dy = torch.randn(tokens, BATCH, HIDDEN), torch.randn(tokens, BATCH, out)
                own = own_part(x, 0) if is_dealt else x
                with recorded() as found, hybridq.autocast(recipe=recipe):
                    y = module(own.requires_grad_())
                if name == "norm":
                    dy = own_part(dy, -1)
                (y * (own_part(dy, 0) if is_dealt and name != "norm" else dy)).sum().backward()
                what = (name, recipe_name, is_dealt, tokens)
                assert found, what
                for one in found:
                    shares = check_product(one, is_dealt, what)
                    # Sums in another order are not the sum in FP64: something was compared.
                    assert max(shares) > 0, what
                    largest[:] = [max(pair) for pair in zip(largest, shares, strict=True)]
                    check_parameters(one, is_dealt, what)
    # Of bounds for the worst order of sums; the last bits of operands would be far beyond.
    assert max(largest) < 0.5, largest


if __name__ == "__main__":
    main(globals())

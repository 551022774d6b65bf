"""Second and forward-mode derivatives: right, or an error; never silently zero."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp, jvp

import hybridq
from hybridq.kernels.inputs.dispatch_bypass import can_bypass_dispatcher
from hybridq.kernels.operators.derivatives import StatedFunction
from module_matrix import CASES

ROOT = Path(inspect.getfile(hybridq)).parent
REFUSED = r"double backward is not supported|has no derivative"
NO_TRANSFORM = "transforms of torch.func are not supported"
NO_TANGENT = "forward-mode differentiation is not supported"
LAYERS = {name: case for name, case in CASES.items() if "decoder" not in name}


def under(module, recipe="mxfp8"):
    """The module under a recipe, as a function."""

    def call(x, *args):
        with hybridq.autocast(recipe=recipe):
            return module(x, *args)

    return call


def unused(outputs, inputs):
    return torch.autograd.grad(outputs, inputs, allow_unused=True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_second_derivative_of_a_module_is_an_error(name):
    """Whatever the second derivative is of: the input, where it came from, a weight, a factor."""
    module, (x, dy) = LAYERS[name].make(), LAYERS[name].data()
    call = under(module)
    with pytest.raises(RuntimeError, match=REFUSED):
        hvp(lambda x: call(x).square().sum(), x, torch.ones_like(x))
    with pytest.raises(RuntimeError, match=REFUSED):
        jvp(call, x, torch.ones_like(x))
    leaf, factor = x.clone().requires_grad_(), dy.clone().requires_grad_()
    middle = leaf * 2
    weights = [p for p in module.parameters() if p.dim() > 1]
    loss = (call(middle) * factor).sum()
    dx, *dw = torch.autograd.grad(loss, [middle, *weights], create_graph=True)
    for grad in (dx, *dw):
        others = [one for one in (middle, leaf, factor) if grad is not dx or one is factor]
        for one in others:
            with pytest.raises(RuntimeError, match=REFUSED):
                torch.autograd.grad(grad.sum(), one, allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(dx.sum(), weights[-1], allow_unused=True, retain_graph=True)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("use_reentrant", [None, False])
def test_hessians_of_a_linear_are_errors(rows, use_reentrant):
    """The fast path of few rows, the general path, and a recomputation."""
    layer = hybridq.Linear(8, 8)
    call = under(layer)
    if use_reentrant is not None:
        call = under(lambda x: hybridq.checkpoint(layer, x, use_reentrant=use_reentrant))
    for function in (hessian, lambda f, x: hvp(f, x, torch.ones_like(x))):
        with pytest.raises(RuntimeError, match=REFUSED):
            function(lambda x: call(x).square().sum(), torch.randn(rows, 8))


def test_a_quantized_gradient_has_no_derivative():
    layer, x = hybridq.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    factor = torch.ones(3, 8, requires_grad=True)
    with hybridq.autocast(recipe="mxfp8"):
        y = layer(x, fp8_grad=True)
    (dx,) = torch.autograd.grad((y * factor).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        unused(dx.dequantize().sum(), factor)


def test_a_gradient_that_is_never_differentiated_needs_no_second_one():
    """`create_graph=True` alone is no error, and its gradients are the ordinary ones."""
    layer, x = hybridq.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    call = under(layer)
    (want,) = torch.autograd.grad(call(x).sum(), x)
    (got,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    assert torch.equal(want, got) and got.requires_grad


@pytest.mark.parametrize("way", ["one", "many", "float8"])
def test_a_second_derivative_of_quantizing_is_that_of_the_identity(way):
    x, v = torch.randn(4, 64), torch.randn(4, 64)
    float8 = hybridq.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")
    ways = {
        "one": lambda x: hybridq.quantize(x, "mxfp8"),
        "many": lambda x: hybridq.multi_tensor_quantize([x], hybridq.MXFP8Quantizer())[0],
        "float8": float8,
    }
    # d/dx sum(q(x)^3) = 3 q(x)^2, and straight through q once more 6 q(x)
    decoded = ways[way](x).dequantize()
    got = hvp(lambda x: ways[way](x).dequantize().pow(3).sum(), x, v)[1]
    torch.testing.assert_close(got, 6 * decoded * v)
    rows = hvp(lambda x: ways[way](x).dequantize_rows([2]).pow(3).sum(), x, v)[1]
    torch.testing.assert_close(rows[2], (6 * decoded * v)[2])
    assert not rows[:2].any() and not rows[3:].any()


# ---- forward mode


def dual(x):
    return forward_ad.make_dual(x, torch.ones(x.shape, dtype=x.dtype))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_tangent_into_a_module_is_an_error(name, requires_grad):
    module, (x, _) = CASES[name].make(), CASES[name].data()
    module.requires_grad_(requires_grad)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=NO_TANGENT):
            under(module)(dual(x))
        if name == "Linear":  # without a recipe it is torch's
            assert forward_ad.unpack_dual(module(dual(x))).tangent is not None
    with pytest.raises((NotImplementedError, RuntimeError), match=f"{NO_TANGENT}|setup_context"):
        torch.func.jvp(under(module), (x,), (x,))


def test_a_tangent_of_a_weight_is_an_error_whatever_is_kept_of_it():
    x = torch.randn(4, 64)
    with hybridq.quantized_model_init("mxfp8"):
        given = hybridq.Linear(64, 64)
    for layer in (hybridq.Linear(64, 64), given):
        own = layer.weight
        with forward_ad.dual_level(), torch.no_grad():
            with hybridq.autocast(recipe="mxfp8"):
                layer(x, is_first_microbatch=True)
            del layer.weight
            layer.weight = dual(own.detach())
            with (
                hybridq.autocast(recipe="mxfp8"),
                pytest.raises(NotImplementedError, match=NO_TANGENT),
            ):
                layer(x, is_first_microbatch=False)


def _ragged(x):
    with torch.no_grad():
        return hybridq.quantize_grouped(x, torch.tensor([1, 4], dtype=torch.int32), "mxfp8")


def _updated(x):
    with torch.no_grad():  # a source that requires grad is refused for that, before all else
        return hybridq.quantize(torch.zeros(4, 64), "mxfp8").quantize_(x)


ENDS = torch.tensor([1, 4], dtype=torch.int32)
B = hybridq.quantize(torch.ones(2, 64), "mxfp8")
#: Functions of a plain tensor `[4, 64]` that leave autograd, or go through the operators.
FUNCTIONS = {
    "quantize": lambda x: hybridq.quantize(x, "mxfp8"),
    "update": _updated,
    "many": lambda x: hybridq.multi_tensor_quantize([x], hybridq.MXFP8Quantizer()),
    "float8": hybridq.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3"),
    "grouped": _ragged,
    "gemm": lambda x: hybridq.gemm(x, B),
    "gemm, b": lambda x: hybridq.gemm(B, x),
    "gemm, bias": lambda x: hybridq.gemm(B, B, bias=x[0, :2]),
    "gemm, out": lambda x: hybridq.gemm(x, B, out=torch.zeros(4, 2)),
    "grouped_gemm": lambda x: hybridq.grouped_gemm(x, [B, B], ENDS),
    "norm": lambda x: torch.ops.hybridq.norm(x, None, None, 1e-5, "RMSNorm", False),
    "amax": lambda x: torch.ops.hybridq.amax(x, "nvfp4", "rowwise"),
    "bias_grad": lambda x: torch.ops.hybridq.bias_grad(x),
    "round": lambda x: torch.ops.hybridq.round_stochastic(
        x, torch.zeros(1, dtype=torch.int64), torch.bfloat16
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tangent_into_a_function_is_an_error(name):
    call = FUNCTIONS[name]
    x = torch.randn(4, 64)
    with forward_ad.dual_level():
        for own in (x, x.clone().requires_grad_()):
            with pytest.raises(NotImplementedError, match=NO_TANGENT):
                call(dual(own))
    with pytest.raises(NotImplementedError, match=NO_TANGENT):
        torch.func.jvp(call, (x,), (x,))
    with pytest.raises((NotImplementedError, RuntimeError), match=f"{NO_TANGENT}|[Bb]atching"):
        torch.func.jacfwd(call)(x)


def test_a_tangent_of_a_quantized_tensor_reaches_torchs_operators_and_nothing_else():
    q, t = hybridq.quantize(torch.randn(4, 64), "mxfp8"), torch.randn(4, 64)
    with forward_ad.dual_level():
        own = forward_ad.make_dual(q, t)
        assert torch.equal(forward_ad.unpack_dual(own * 2).tangent, t * 2)
        for call in (
            own.dequantize,
            lambda: own.dequantize_rows([1]),
            lambda: hybridq.gemm(own, B),
            lambda: hybridq.quantize(own, "nvfp4"),
        ):
            with pytest.raises(NotImplementedError, match=NO_TANGENT):
                call()


def test_the_short_way_sees_forward_mode():
    with forward_ad.dual_level():
        assert not can_bypass_dispatcher()
    assert can_bypass_dispatcher()


# ---- transforms of torch.func


def _batched(call, x):
    x = x.clone().requires_grad_()
    y = call(x)
    return torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)


TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "vjp": torch.func.vjp,
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "vmap": lambda call, x: torch.vmap(call)(x[None]),
    "is_grads_batched": _batched,
}


@pytest.mark.parametrize("name", CASES)
def test_transforms_of_a_module_are_errors(name):
    module, (x, _) = CASES[name].make(), CASES[name].data()
    for transform in TRANSFORMS.values():
        with pytest.raises(NotImplementedError, match=NO_TRANSFORM):
            transform(under(module), x)


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name != "is_grads_batched"])
def test_transforms_of_quantizing_are_errors(name):
    with pytest.raises(NotImplementedError, match=f"quantize: {NO_TRANSFORM}"):
        TRANSFORMS[name](lambda x: hybridq.quantize(x, "mxfp8").dequantize(), torch.randn(4, 64))


@pytest.mark.parametrize("is_first", [True, False])
def test_plain_operands_of_a_product_that_are_mapped_are_errors(is_first):
    weight, x = hybridq.quantize(torch.randn(8, 64), "mxfp8"), torch.randn(2, 4, 64)
    with pytest.raises(NotImplementedError, match=f"gemm: {NO_TRANSFORM}"):
        torch.vmap(lambda x: hybridq.gemm(*((x, weight) if is_first else (weight, x))))(x)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=f"grouped_gemm: {NO_TRANSFORM}"):
        torch.vmap(lambda x: hybridq.grouped_gemm(x, [weight, weight], ends))(x)


def test_a_weight_that_requires_grad_inside_of_a_transform():
    layer, x = hybridq.Linear(64, 8), torch.randn(3, 64)
    with pytest.raises(NotImplementedError, match=NO_TRANSFORM):
        torch.func.grad(lambda scale: (under(layer)(x) * scale).sum())(torch.ones(()))
    with torch.no_grad():
        y = under(layer)(x)
    layer.requires_grad_(False)
    got = torch.func.grad(lambda scale: (under(layer)(x) * scale).sum())(torch.ones(()))
    torch.testing.assert_close(got, y.sum())


def test_the_ways_that_the_error_names():
    """Row i of the Jacobian is the gradient of output i."""
    layer, x = hybridq.Linear(64, 8), torch.randn(1, 64, requires_grad=True)
    call = under(layer)
    want = [torch.autograd.grad(call(x)[0, i], x)[0] for i in range(8)]
    got = torch.autograd.functional.jacobian(call, x, vectorize=False)
    assert torch.equal(got.reshape(8, 64), torch.cat(want))
    with pytest.raises(NotImplementedError, match=NO_TRANSFORM):
        torch.autograd.functional.jacobian(call, x, vectorize=True)


# ---- one door for all


def stated_functions():
    """(file, class) of every autograd function of the sources, imported or not."""
    for file in ROOT.rglob("*.py"):
        text = file.read_text()
        has_one = re.search(r"autograd\.Function|StatedFunction", text)
        for node in ast.walk(ast.parse(text)) if has_one else ():
            bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
            if any(base.endswith("autograd.Function") for base in bases):
                assert file.name == "derivatives.py", file  # nowhere but in the base class
            elif any(base.endswith("StatedFunction") for base in bases):
                yield file, node


def test_every_autograd_function_states_its_second_derivative():
    mine = list(stated_functions())
    assert {one.name for _, one in mine} >= {"_Linear", "_GroupedLinear", "Quantize"}
    for file, one in mine:
        text = ast.unparse(one)
        if "second = 'refused'" in text and one.name != "_NoDoubleBackward":
            assert "without_derivative(" in text, f"{file}: {one.name}"
    with pytest.raises(TypeError, match="second must be"):
        type("Silent", (StatedFunction,), {})


OPERATORS = sorted(
    {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("hybridq::")
    }
)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_an_answer_for_autograd(name):
    """A kernel of its own, through the library that refuses tangents."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"hybridq::{name}", "Autograd")


@pytest.mark.parametrize("grouped", [False, True])
def test_a_product_written_into_out_refuses_gradients(grouped):
    x = torch.randn(4, 64, requires_grad=True)
    out = torch.zeros(4, 2)
    with pytest.raises(RuntimeError, match=r"gemm_: it writes into an argument.*requires grad"):
        if grouped:
            hybridq.grouped_gemm(x, [B, B], ENDS, out=out)
        else:
            hybridq.gemm(x, B, out=out)
    assert not out.any()
    with torch.no_grad():
        hybridq.gemm(x, B, out=out)
    assert out.any()

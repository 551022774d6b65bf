"""Tensors that stay quantized between modules: fp8_output, fp8_grad, and their roles.

The oracle is the same pair of modules with a plain tensor between them: where both sides have equal
quantizers, every bit is the same; where not, it is the plain tensor of the decoded values.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq import QuantizedTensor, QuantizerRole, recipes
from hybridq.kernels.operators import encode_matrix as ops
from hybridq.recipes import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling
from linear_model import equal

#: A boundary keeps no history: tests/nn/delayed_scaling/test_delayed_linear.py.
QUANTIZING = tuple(
    name for name in recipes.names() if name not in ("bf16", "high_precision", "fp8_delayed")
)
DETERMINISTIC = tuple(
    name for name in QUANTIZING if not recipes.bind(recipes.get(name)).is_stochastic
)
#: Whose output slot has the quantizer of the input slot.
UNIFORM = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "nvfp4_1d_weight")
NEXT = QuantizerRole("linear", "input", "b")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def encodes(monkeypatch) -> list[int]:
    """The number of rows of everything that a backend encodes."""
    seen: list[int] = []
    run_encode = ops.run_encode

    def spy(x, *rest):
        seen.append(x.shape[0])
        return run_encode(x, *rest)

    monkeypatch.setattr(ops, "run_encode", spy)
    return seen


class Pair(nn.Module):
    """Two linear modules, one after the other."""

    def __init__(self, output=False, grad=False, dtype=torch.float32, sizes=(64, 96, 40)):
        super().__init__()
        self.a = hybridq.Linear(*sizes[:2], dtype=dtype, name="a")
        self.b = hybridq.Linear(*sizes[1:], dtype=dtype, name="b")
        self.flags = output, grad

    def between(self, x):
        return self.a(x, fp8_output=self.flags[0])

    def forward(self, x):
        return self.b(self.between(x), fp8_grad=self.flags[1])

    def but(self, output, grad=False):
        """The same weights with other flags."""
        twin = copy.deepcopy(self)
        twin.flags = output, grad
        return twin


def run(model, x, recipe, seed=3, **context):
    """[y, dx, *parameter gradients] of `model(x)` and the sum of squares."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    with hybridq.autocast(recipe=recipe, **context):
        y = model(x)
    torch.manual_seed(seed + 1)
    (y.float().square().sum() / 8).backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(37,), (3, 5), ()])
@pytest.mark.parametrize("recipe", UNIFORM)
def test_the_same_bits_as_with_a_plain_tensor_between(recipe, shape, dtype):
    plain = Pair(dtype=dtype)
    x = torch.randn(*shape, 64, dtype=dtype)
    assert equal(run(plain.but(True), x, recipe), run(plain, x, recipe))


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_with_the_role_of_the_next_input_every_recipe_has_the_same_bits(recipe):
    plain = Pair()
    x, quantized = torch.randn(37, 64), plain.but(True)
    quantized.a.output_quantizer_role = NEXT
    assert equal(run(quantized, x, recipe), run(plain, x, recipe))


@pytest.mark.parametrize("recipe", DETERMINISTIC)
def test_what_is_between_is_what_the_slots_quantizer_makes(recipe):
    model, x = Pair(True), torch.randn(3, 5, 64)
    with hybridq.autocast(recipe=recipe):
        made, plain = model.between(x), model.a(x)
        quantizer = recipes.get(recipe).quantizer(QuantizerRole("linear", "output", "a"))
        expected = quantizer(plain.detach())
    assert isinstance(made, QuantizedTensor) and made.requires_grad
    assert made.shape == (3, 5, 96) and made.dtype == x.dtype and made.quantizer == quantizer
    for one, other in zip(made.tensor_storage.planes, expected.tensor_storage.planes, strict=True):
        assert one.spec == other.spec and equal(one.tensors, other.tensors)


def test_planes_that_are_there_are_not_made_again(encodes):
    model, x = Pair(True), torch.randn(33, 64)
    with hybridq.autocast(recipe="mxfp8"):
        h = model.between(x)
        assert encodes == [33, 96, 33]
        model.b(h)
    assert encodes == [33, 96, 33, 40]  # of the second module the weight alone
    own = {buffer.data_ptr() for buffer in h.columnwise.tensors}
    seen = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t),
        hybridq.autocast(recipe="mxfp8"),
    ):
        model.b(h)
    assert own <= {t.data_ptr() for t in seen}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mxfp8", "nvfp4_fwd_mxfp8_bwd"),  # whose column is MXFP8 too, but of other values
        ("mxfp8", "fp8_block"),
        ("mxfp8", "bf16"),
        ("mxfp8", None),
        ("fp8_current", "nvfp4_fwd_mxfp8_bwd"),
        ("fp8_current", "fp8_block"),
        ("nvfp4", "high_precision_fwd_mxfp8_bwd"),
    ],
)
def test_other_planes_are_made_of_the_decoded_values(first, second):
    """Without a second recipe too: the values are what a plain module sees."""
    model, x = Pair(True), torch.randn(40, 64)
    with hybridq.autocast(recipe=first):
        h = model.between(x).detach()
    results = []
    for given in (h, h.dequantize()):
        given.requires_grad_()
        model.zero_grad()
        with hybridq.autocast(recipe=second, enabled=second is not None):
            y = model.b(given)
        y.square().sum().backward()
        results.append([y.detach(), given.grad, model.b.weight.grad.clone()])
    assert equal(*results)


def test_of_two_planes_the_one_that_is_there_is_taken():
    """An NVFP4 row as it is; the MXFP8 column of the decoded row, as its source says."""
    layer, x = hybridq.Linear(96, 32), torch.randn(40, 96)
    row_only = hybridq.NVFP4Quantizer(columnwise=False)(x).requires_grad_()
    plain = x.clone().requires_grad_()
    results = []
    for given in (row_only, plain):
        layer.zero_grad()
        with hybridq.autocast(recipe="nvfp4_fwd_mxfp8_bwd"):
            y = layer(given)
        y.square().sum().backward()
        results.append([y.detach(), given.grad, layer.weight.grad.clone()])
    assert equal(*results)
    with hybridq.autocast(recipe="nvfp4_fwd_mxfp8_bwd"), torch.no_grad():
        assert torch.equal(
            layer(hybridq.quantize(x, None, "nvfp4")),
            layer(hybridq.quantize(x, None, "nvfp4").dequantize()),
        )


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_current"])
def test_a_quantized_gradient_is_taken_as_it_is(recipe):
    """All but the bias, which is the sum of what came: that of the decoded gradient."""
    plain = Pair()
    x, quantized = torch.randn(37, 64), plain.but(False, True)
    quantized.b.grad_input_quantizer_role = QuantizerRole("linear", "grad_output", "a")
    y, dx, dw, bias, *others = run(quantized, x, recipe)
    expected = run(plain, x, recipe)
    assert equal([y, dx, dw, *others], [*expected[:3], *expected[4:]])
    dh = {}
    for model in (plain, quantized):
        with hybridq.autocast(recipe=recipe):
            h = model.between(x)
            h.retain_grad()
            y = model.b(h, fp8_grad=model.flags[1])
        (y.square().sum() / 8).backward()
        dh[model] = h.grad
    made = dh[quantized]
    assert isinstance(made, QuantizedTensor) and not isinstance(dh[plain], QuantizedTensor)
    quantizer = recipes.get(recipe).quantizer(QuantizerRole("linear", "grad_output", "a"))
    assert equal(made.rowwise.tensors, quantizer(dh[plain]).rowwise.tensors)
    assert equal(made.columnwise.tensors, quantizer(dh[plain]).columnwise.tensors)
    assert torch.equal(bias, made.dequantize().sum(0)) and not torch.equal(bias, expected[3])


@pytest.mark.parametrize("recipe", DETERMINISTIC)
def test_both_at_once(recipe):
    """A gradient that a quantized output hands on is the one that came."""
    one = Pair(False, True)
    two = one.but(True, True)
    two.a.output_quantizer_role = NEXT
    x = torch.randn(3, 7, 64)
    assert equal(run(two, x, recipe), run(one, x, recipe))


def test_the_first_gradient_may_stay_quantized():
    layer, x = hybridq.Linear(64, 32), torch.randn(8, 64, requires_grad=True)
    with hybridq.autocast(recipe="mxfp8"):
        y = layer(x, fp8_grad=True)
    y.sum().backward()
    assert isinstance(x.grad, QuantizedTensor) and x.grad.dtype == x.dtype


# ---- compiled, recomputed


@pytest.mark.thinned(1, "slow", few=3)
@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("recipe", DETERMINISTIC)
def test_compiled(recipe, flags):
    model, x = Pair(*flags), torch.randn(40, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert equal(run(compiled, x, recipe), run(model, x, recipe))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.more
def test_compiled_with_roles_and_names():
    seen = []

    def factory(role):
        seen.append(role)
        return hybridq.MXFP8Quantizer()

    model, x = Pair(True), torch.randn(40, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    recipe = CustomRecipe(factory)
    for role in (None, NEXT, None):
        model.a.output_quantizer_role = role
        assert equal(run(compiled, x, recipe), run(model, x, recipe))
    assert {QuantizerRole("linear", "output", "a"), NEXT} <= set(seen)
    assert not any(role.tensor_type == "grad_input" for role in seen)
    assert counters["stats"]["unique_graphs"] == 2


def test_without_gradients_it_may_leave_compiled_code():
    model, x = Pair(True).eval(), torch.randn(40, 64)
    compiled = torch.compile(model.between, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
        made = compiled(x)
        assert isinstance(made, QuantizedTensor)
        assert torch.equal(model.b(made), model(x))
        assert torch.equal(torch.compile(model.b, backend="aot_eager")(made), model(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4"])
def test_recomputed(recipe, use_reentrant):
    model, x = Pair(True), torch.randn(40, 64)
    expected = run(model, x, recipe)

    def forward(x):
        return model.b(checkpoint(model.between, x, use_reentrant=use_reentrant))

    forward.zero_grad, forward.parameters = model.zero_grad, model.parameters
    assert equal(run(forward, x, recipe), expected)


# ---- roles


def test_boundary_slots_are_asked_for_only_when_used():
    seen = []

    def factory(role):
        seen.append(role)
        return hybridq.MXFP8Quantizer()

    recipe, x = CustomRecipe(factory), torch.randn(8, 64)
    model = Pair()
    run(model, x, recipe)
    assert {role.tensor_type for role in seen} == {"input", "weight", "grad_output"}
    seen.clear()
    twin = model.but(True, True)
    for _ in range(3):
        run(twin, x, CustomRecipe(factory))
    boundary = [role for role in seen if role.tensor_type in ("output", "grad_input")]
    assert boundary == [
        QuantizerRole("linear", "output", "a"),
        QuantizerRole("linear", "grad_input", "b"),
    ]


def test_roles_may_be_set_and_take_effect_at_the_next_forward():
    def factory(role):
        wide = role.name == "wide"
        return hybridq.MXFP8Quantizer("e5m2" if wide else "e4m3")

    layer, x = hybridq.Linear(64, 32), torch.randn(8, 64)
    assert layer.output_quantizer_role is None and layer.grad_input_quantizer_role is None
    recipe, found = CustomRecipe(factory), []
    for role in (None, QuantizerRole("linear", "input", "wide"), None):
        layer.output_quantizer_role = role
        assert layer.output_quantizer_role == role and layer.grad_input_quantizer_role is None
        with hybridq.autocast(recipe=recipe):
            found.append(layer(x, fp8_output=True).rowwise.spec.format.element.name)
    assert found == ["e4m3", "e5m2", "e4m3"]
    layer.grad_input_quantizer_role = NEXT
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.grad_input_quantizer_role == NEXT and twin.output_quantizer_role is None
    assert list(layer.state_dict()) == ["weight", "bias"]
    model = hybridq.convert(nn.Sequential(nn.Linear(8, 8)))
    assert model[0].output_quantizer_role is None
    model[0].output_quantizer_role = NEXT
    assert model[0].output_quantizer_role == NEXT


@pytest.mark.parametrize("name", ["output_quantizer_role", "grad_input_quantizer_role"])
def test_what_is_no_role_is_refused(name):
    with pytest.raises(TypeError, match=f"{name}: must be a QuantizerRole or None, got str"):
        setattr(hybridq.Linear(4, 4), name, "output")


@pytest.mark.parametrize(("made", "error"), [(None, ValueError), ("mxfp8", TypeError)])
def test_a_factory_without_an_output_is_named(made, error):
    def factory(role):
        return made if role.tensor_type == "output" else hybridq.MXFP8Quantizer()

    layer, x = hybridq.Linear(64, 32, name="up"), torch.randn(8, 64)
    with hybridq.autocast(recipe=CustomRecipe(factory)):
        layer(x)
        with pytest.raises(error, match="'output' of up"):
            layer(x, fp8_output=True)


# ---- what else meets it


@pytest.mark.parametrize("context", [{"enabled": False}, {"recipe": "bf16"}])
def test_where_nothing_is_quantized_it_is_plain(context):
    model, x = Pair(True, True), torch.randn(8, 64, requires_grad=True)
    with hybridq.autocast(**context):
        y = model.between(x)
        model.b(y, fp8_grad=True).sum().backward()
    assert type(y) is torch.Tensor and type(x.grad) is torch.Tensor
    assert torch.equal(y, nn.functional.linear(x, model.a.weight, model.a.bias))


def test_a_plain_module_may_have_a_quantized_output():
    def factory(role):
        if role.tensor_type in ("output", "grad_input"):
            return hybridq.MXFP8Quantizer()
        return hybridq.IdentityQuantizer()

    model, x = Pair(True, True), torch.randn(8, 64)
    with hybridq.autocast(recipe=CustomRecipe(factory)):
        h = model.between(x)
        y = model.b(h)
    assert torch.equal(h, hybridq.MXFP8Quantizer()(model.a(x)))
    assert torch.equal(y, model.b(h.dequantize()))


def test_without_gradients_only_the_forwards_plane_is_made():
    model, x = Pair(True), torch.randn(8, 64)
    with hybridq.autocast(recipe="mxfp8"):
        assert model.between(x).columnwise is not None
        model.eval()
        assert model.between(x).columnwise is not None
        with torch.no_grad():
            h = model.between(x)
            assert h.columnwise is None and h.rowwise is not None
            assert torch.equal(model.b(h), model.but(False)(x))


@pytest.mark.parametrize("cls", [MXFP8BlockScaling, NVFP4BlockScaling])
def test_choices_of_the_backward(cls):
    """The output has no columnwise plane; what was never kept in high precision is decoded."""
    plain = Pair()
    x, quantized = torch.randn(37, 64), plain.but(True)
    with hybridq.autocast(recipe=cls(backward_override="dequantized")):
        assert quantized.between(x).columnwise is None
    expected = run(plain, x, cls(backward_override="dequantized"))
    assert equal(run(quantized, x, cls(backward_override="dequantized")), expected)
    y, _, dw, _, dw_b, _ = run(quantized, x, cls(backward_override="high_precision"))
    assert torch.equal(y, expected[0]) and torch.equal(dw_b, expected[4])
    high = run(plain, x, cls(backward_override="high_precision"))
    assert torch.equal(dw, high[2]) and not torch.equal(dw_b, high[4])
    source = cls(columnwise_source="rowwise_dequantized")
    assert equal(run(quantized, x, source), run(plain, x, source))


def test_torch_autocast():
    plain = Pair()
    x, quantized = torch.randn(37, 64), plain.but(True)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = run(quantized, x, "mxfp8"), run(plain, x, "mxfp8")
    assert got[0].dtype == torch.bfloat16 and equal(got, expected)


def test_an_activation_between_sees_the_values():
    model, x = Pair(True), torch.randn(8, 64)
    with hybridq.autocast(recipe="mxfp8"):
        h = model.between(x)
        assert torch.equal(nn.functional.gelu(h), nn.functional.gelu(h.dequantize()))


def test_what_is_no_tensor_is_refused():
    layer = hybridq.Linear(4, 4)
    with hybridq.autocast(recipe="mxfp8"), pytest.raises(TypeError, match="Tensor, got list"):
        layer([1.0], fp8_grad=True)


@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_double_backward_is_an_error(flags):
    model, x = Pair(*flags), torch.randn(8, 64, requires_grad=True)
    with hybridq.autocast(recipe="mxfp8"):
        y = model(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.dequantize().sum().backward() if isinstance(dx, QuantizedTensor) else dx.sum().backward()


def test_a_write_between_forward_and_backward_is_refused():
    model, x = Pair(True), torch.randn(8, 64)
    with hybridq.autocast(recipe="mxfp8"):
        h = model.between(x).detach()
        y = model.b(h)
    h.quantize_(torch.zeros(8, 96))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_quantized_parameters_are_taken_as_they_are(encodes):
    """A weight whose planes are the recipe's own is not decoded and rounded again."""
    layer, x = hybridq.Linear(64, 32), torch.randn(8, 64)
    quantizer = NVFP4BlockScaling().quantizer(QuantizerRole("linear", "weight"))
    expected = run(layer, x, "nvfp4")
    layer.weight = nn.Parameter(quantizer(layer.weight.detach()))
    encodes.clear()
    got = run(layer, x, "nvfp4")
    assert equal(got[:2], expected[:2]) and torch.equal(got[2], expected[2])
    assert encodes == [8, 8]  # input and gradient

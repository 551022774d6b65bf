"""torch.compile(fullgraph=True) on QuantizedTensor: input, output, intermediate, parameter."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import hybridq
from compilers import BACKENDS, BOTH_BACKENDS
from hybridq import QuantizedTensor
from tensor_tools import PAIRS, same_planes


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def one_graph() -> bool:
    return not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


def same(a, b) -> None:
    assert type(a) is type(b) and a.shape == b.shape
    if isinstance(a, QuantizedTensor):
        same_planes(a, b)
        assert a.quantizer == b.quantizer
    else:
        assert torch.equal(a, b)


READS = {
    "dequantize": lambda t: t.dequantize(),
    "arithmetic": lambda t: t + 1.0,
    "product": lambda t: torch.ones(3, 64) @ t,
    "linear": lambda t: nn.functional.linear(torch.ones(3, 64), t),
    "transpose": lambda t: t.mT,
    "view": lambda t: t.view(2, 32, 64),
    "flat": lambda t: t.view(-1),
    "clone": lambda t: t.clone(),
    "rows": lambda t: t[:32],
    "cut rows": lambda t: t[3:50],
    "split": lambda t: t.split(32)[1],
    "cat": lambda t: torch.cat(t.chunk(2)),
    "to": lambda t: t.to(torch.bfloat16),
    "new_zeros": lambda t: t.new_zeros(64, 64),
    "dequantize_rows": lambda t: t.dequantize_rows(slice(3, 9)),
    "embedding": lambda t: nn.functional.embedding(torch.tensor([5, 2]), t),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("kind", ["hybrid", "one scale", "identity", "square"])
def test_as_input_and_output(name, kind) -> None:
    t = hybridq.quantize(torch.randn(64, 64), **PAIRS[kind])
    function = READS[name]
    want = function(t)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the second call compiles nothing
        same(compiled(t), want)
    other = hybridq.quantize(torch.randn(64, 64), **PAIRS[kind])
    same(compiled(other), function(other))
    assert one_graph()


WRITES = {
    "add_": lambda t: t.add_(1.0),
    "copy_": lambda t: t.copy_(torch.ones(64, 64)),
    "rows": lambda t: t[16:48].fill_(2.0),
    "cut rows": lambda t: t[3:9].mul_(2.0),
    "quantize_": lambda t: t.quantize_(torch.ones(64, 64)),
    "foreach": lambda t: torch._foreach_mul_([t, t.clone()], 0.5),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["hybrid", "one scale", "uniform"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRITES)
def test_in_place(name, backend, kind) -> None:
    torch._dynamo.reset()
    t = hybridq.quantize(torch.randn(64, 64), **PAIRS[kind])
    twin = t.clone()
    pointer = t.data_ptr()
    compiled = torch.compile(WRITES[name], fullgraph=True, backend=backend)
    for _ in range(2):
        compiled(t)
        WRITES[name](twin)
        same(t, twin)
    assert t.data_ptr() == pointer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["hybrid", "one scale", "square", "columnwise only"])
def test_quantized_inside(kind, backend) -> None:
    x = torch.randn(32, 64)
    quantizer = hybridq.quantizer(**PAIRS[kind])

    def run(x):
        t = quantizer(x)
        return t, t.dequantize() + x, t[:16] * 2.0

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for _ in range(2):
        x = torch.randn(32, 64)
        for got, want in zip(compiled(x), run(x), strict=True):
            same(got, want)
    assert one_graph()


#: Quantizers that nothing has used before: the test runs in a process of its own.
UNUSED = """
import torch, hybridq
from hybridq.formats import Format, PlaneSpec, element
from torch._dynamo.utils import counters

fine = Format(element("e4m3"), (1, 32), element("e8m0"), "floor", "of_this_test")
made_outside = hybridq.Quantizer(PlaneSpec(fine), None)
cases = [
    lambda x: hybridq.quantize(x, "mxfp8"),
    lambda x: hybridq.quantize(x, "nvfp4", columnwise="mxfp8", hadamard=True),
    lambda x: hybridq.quantize(x, fine, columnwise="fp8"),
    lambda x: hybridq.quantizer("mxfp6_e2m3", scale_rule="even")(x),
    lambda x: hybridq.HybridQuantizer(
        rowwise_quantizer=hybridq.Float8BlockQuantizer(),
        columnwise_quantizer=hybridq.NVFP4Quantizer(with_rht=True),
    )(x),
    made_outside,
]
x = torch.randn(64, 96)
compiled = [torch.compile(case, fullgraph=True, backend="aot_eager") for case in cases]
first = [run(x) for run in compiled]
second = [run(x) for run in compiled]
for got, again, case in zip(first, second, cases):
    want = case(x)
    assert type(got) is type(want) and got.quantizer == want.quantizer == again.quantizer
    for a, b in zip(got.tensor_storage.planes, want.tensor_storage.planes, strict=True):
        assert a.spec == b.spec and all(map(torch.equal, a.tensors, b.tensors))
    assert torch.equal(again.dequantize(), want.dequantize())
assert counters["stats"]["unique_graphs"] == len(cases)
assert not counters["graph_break"]
"""


@pytest.mark.more
def test_quantizers_that_are_used_in_a_graph_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNUSED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_gradients_of_a_tensor_quantized_inside() -> None:
    quantizer = hybridq.quantizer("mxfp8", "nvfp4")
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)

    def run(x):
        return (quantizer(x).dequantize() * weight).sum()

    torch.compile(run, fullgraph=True, backend="aot_eager")(x).backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_a_parameter_that_trains(backend) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
        for layer in (made[0], made[2]):
            layer.weight = nn.Parameter(hybridq.quantize(layer.weight.detach(), "mxfp8", "nvfp4"))
        return made

    eager, compiled_model = model(), model()
    compiled = torch.compile(compiled_model, fullgraph=True, backend=backend)
    for step in range(3):
        x = torch.randn(4, 64)
        for run, m in ((eager, eager), (compiled, compiled_model)):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()
        for a, b in zip(eager.parameters(), compiled_model.parameters(), strict=True):
            assert isinstance(b, nn.Parameter) and type(a) is type(b), step
            assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert one_graph()


def test_another_kind_of_pair_is_another_graph_and_right() -> None:
    compiled = torch.compile(lambda t: t.dequantize() * 2, fullgraph=True, backend="aot_eager")
    ts = [hybridq.quantize(torch.randn(32, 64), name) for name in ("mxfp8", "nvfp4", "fp8_e4m3")]
    for t in ts * 2:
        assert torch.equal(compiled(t), t.dequantize() * 2)
    assert counters["stats"]["unique_graphs"] == 3


KINDS = {
    "linear": lambda: (hybridq.Linear(64, 96), ()),
    "groups": lambda: (hybridq.GroupedLinear(2, 64, 96), ([16, 16],)),
    "stack": lambda: (hybridq.GroupedLinear(2, 64, 96, single_grouped_weight=True), ([16, 16],)),
}


@pytest.mark.parametrize("backend", BOTH_BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_eager_forward_sees_what_compiled_code_wrote(kind, backend) -> None:
    """A compiled step of somebody else's optimizer: forwards of the new planes, not of kept ones.

    Machine code raises the version of the tensor alone, not of the buffers that it writes. The
    oracle is a copy of the module, whose planes are new.
    """
    with hybridq.quantized_model_init("mxfp8"):
        module, sizes = KINDS[kind]()
    weights = [one for one in module.parameters() if isinstance(one, QuantizedTensor)]
    x = torch.randn(32, 64, requires_grad=True)

    @torch.compile(fullgraph=True, dynamic=False, backend=backend)
    def write(weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.copy_(weight.float() - 0.1 * gradient.sign())

    def step() -> None:
        with torch.no_grad():
            for weight in weights:
                write(weight.detach(), weight.grad)

    def forward(one: nn.Module) -> torch.Tensor:
        with hybridq.autocast(recipe="mxfp8"):
            return one(x, *sizes)

    for _ in range(4):  # what a GEMM makes of a plane is kept from its second use on
        y = forward(module)
        with torch.no_grad():
            fresh = copy.deepcopy(module)
            assert torch.equal(y, forward(fresh))
        y.square().mean().backward()
        step()
    y = forward(module)
    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

"""What goes past torch's dispatcher, and everything that keeps a call from doing so."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.kernels.inputs.dispatch_bypass import can_bypass_dispatcher, can_cache

X = torch.randn(16, 32, dtype=torch.bfloat16)


class Counter(TorchDispatchMode):
    """Collects the names of hybridq's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hybridq":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def calls(run) -> tuple[list[str], list[str]]:
    """Return the names of the C functions, and the files of the Python functions, that it calls."""
    names: list[str] = []
    files: list[str] = []

    def seen(frame, event, argument) -> None:
        if event == "c_call":
            names.append(argument.__name__)
        elif event == "call":
            files.append(frame.f_code.co_filename)

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names, files


def planes_of(t: torch.Tensor) -> list[torch.Tensor]:
    """The buffers, rowwise first."""
    return [buffer for plane in t.tensor_storage.planes for buffer in plane.tensors]


def test_plain_tensors_are_not_watched() -> None:
    parameter = torch.nn.Parameter(torch.randn(2, 2))
    assert can_bypass_dispatcher() and can_bypass_dispatcher(X, None, X.t(), X[:, ::2], X[0])
    assert not can_bypass_dispatcher(parameter)
    with torch.no_grad():
        assert can_bypass_dispatcher(parameter)
        assert can_bypass_dispatcher(torch.randn(2, requires_grad=True))
    with torch.inference_mode():
        made = torch.empty(2)
        assert can_bypass_dispatcher(made, X) and can_cache(X) and not can_cache(made)
    assert can_cache(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # casts other operators' arguments, not ours
        assert can_bypass_dispatcher(X)


class Wrapped(torch.Tensor):
    """A subclass that says nothing."""


KINDS = {
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "subclass": lambda: torch.ones(2).as_subclass(Wrapped),
    "quantized": lambda: hybridq.quantize(X, "mxfp8"),
    "lazily negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "lazily zero": lambda: torch._efficientzerotensor((2,)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(2)),
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
    "csr": lambda: torch.ones(2, 2).to_sparse_csr(),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_more_than_memory_are_watched(kind: str) -> None:
    assert not can_bypass_dispatcher(KINDS[kind]())
    assert not can_bypass_dispatcher(X, KINDS[kind]())


def _answer_in_vmap() -> bool:
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(can_bypass_dispatcher(torch.ones(2))), x)[1])(torch.ones(3))
    return seen[0]


def _answer_in_grad() -> bool:
    seen: list[bool] = []
    torch.func.grad(lambda x: (seen.append(can_bypass_dispatcher(torch.ones(2))), x.sum())[1])(
        X.float()
    )
    return seen[0]


def _answer_in_functionalize() -> bool:
    seen: list[bool] = []
    torch.func.functionalize(lambda x: (seen.append(can_bypass_dispatcher(torch.ones(2))), x)[1])(X)
    return seen[0]


def _answer_in_make_fx() -> bool:
    seen: list[bool] = []
    make_fx(lambda x: (seen.append(can_bypass_dispatcher(torch.ones(2))), x + 1)[1])(torch.ones(2))
    return seen[0]


def _answer_in_compile() -> bool:
    return torch.compile(lambda x: (x, can_bypass_dispatcher(x)), backend="eager")(X)[1]


def _answer_in_jit_trace() -> bool:
    seen: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(can_bypass_dispatcher(torch.ones(2)))
        return x + 1

    torch.jit.trace(run, torch.ones(2), check_trace=False)
    return seen[0]


def _within(context) -> bool:
    with context:
        return can_bypass_dispatcher(X)


WATCHERS = {
    "dispatch mode": lambda: _within(Counter()),
    "fake mode": lambda: _within(FakeTensorMode()),
    "device as a context": lambda: _within(torch.device("meta")),
    "function mode": lambda: _within(torch.overrides.TorchFunctionMode()),
    "profiler": lambda: _within(torch.profiler.profile()),
    "autograd profiler": lambda: _within(torch.autograd.profiler.profile()),
    "forward AD": lambda: _within(forward_ad.dual_level()),
    "vmap": _answer_in_vmap,
    "func.grad": _answer_in_grad,
    "functionalize": _answer_in_functionalize,
    "make_fx": _answer_in_make_fx,
    "compile": _answer_in_compile,
    "jit.trace": _answer_in_jit_trace,
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_watchers_are_seen(watcher: str) -> None:
    assert can_bypass_dispatcher(X)
    assert not WATCHERS[watcher]()
    assert can_bypass_dispatcher(X)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_1x128", "bf16"])
@pytest.mark.parametrize("columnwise", [True, False, "mxfp8"])
def test_both_ways_give_the_same_bits(name: str, columnwise) -> None:
    x = torch.randn(37, 50)
    x[3, 4] = torch.inf
    direct = hybridq.quantize(x, name, columnwise)
    with Counter() as counter:
        watched = hybridq.quantize(x, name, columnwise)
    assert ("encode" in counter.names) == ((name, columnwise) != ("bf16", True))
    for ours, theirs in zip(planes_of(direct), planes_of(watched), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert type(direct) is type(watched) and direct.quantizer == watched.quantizer


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_both_ways_draw_the_same_numbers(source: str) -> None:
    x = torch.randn(20, 48)
    quantizer = hybridq.quantizers.quantizer(
        "nvfp4", "mxfp8", columnwise_source=source, stochastic=True
    )
    generator = torch.get_rng_state()
    direct, after = quantizer(x), torch.get_rng_state()
    torch.set_rng_state(generator)
    with Counter():
        watched = quantizer(x)
    assert torch.equal(after, torch.get_rng_state())
    assert all(map(torch.equal, planes_of(direct), planes_of(watched)))


def test_a_profiler_sees_the_operators() -> None:
    layer = hybridq.Linear(32, 16, dtype=torch.bfloat16)
    with torch.profiler.profile() as profile, hybridq.autocast(recipe="mxfp8"):
        layer(X)
        hybridq.quantize(X, "mxfp8")
    names = {event.name for event in profile.events()}
    assert {"hybridq::encode", "hybridq::gemm"} <= names


def test_lazily_negated_input_is_what_it_means() -> None:
    negated = torch.complex(torch.randn(4, 32), torch.randn(4, 32)).conj().imag
    assert negated.is_neg()
    want = hybridq.quantize(negated.clone(), "mxfp8")
    assert all(map(torch.equal, planes_of(hybridq.quantize(negated, "mxfp8")), planes_of(want)))


def test_a_default_device_does_not_move_results() -> None:
    want = hybridq.quantize(X, "nvfp4")
    with torch.device("meta"):
        made = hybridq.quantize(X, "nvfp4")
        values = made.dequantize()
    assert values.device.type == "cpu" and torch.equal(values, want.dequantize())


def test_a_small_quantize_is_one_call_of_the_core() -> None:
    """Counted, since time cannot be: one allocation per buffer, one call, no operator."""
    for name, buffers in (("mxfp8", 4), ("nvfp4", 6), ("fp8_e4m3", 4)):
        quantizer = hybridq.quantizers.quantizer(name)
        quantizer.quantize(X)
        names, files = calls(lambda q=quantizer: q.quantize(X))
        assert names.count("empty") == buffers
        assert names.count("encode_from_scratch") == 1
        assert names.count("_make_wrapper_subclass") == 1
        assert not {"detach", "reshape", "to", "copy_", "amax"} & set(names)
        assert not [file for file in files if file.endswith(("_ops.py", "dataclasses.py"))]
        assert len(files) <= 30, f"{len(files)} calls of Python functions"
    by_name, _ = calls(lambda: hybridq.quantize(X, "mxfp8"))
    assert by_name.count("encode_from_scratch") == 1 and len(by_name) <= 60


def test_a_linear_runs_no_operator_past_the_dispatcher() -> None:
    layer = hybridq.Linear(32, 16, dtype=torch.bfloat16)
    x = X.clone().requires_grad_()

    def step() -> None:
        layer(x).sum().backward()

    with hybridq.autocast(recipe="mxfp8"):
        step()
        names, files = calls(step)
    assert names.count("encode_from_scratch") == 3  # input, weight and gradient, both planes each
    assert not [file for file in files if file.endswith("torch/_ops.py")]


def test_errors_are_those_of_the_operator() -> None:
    q = hybridq.MXFP8Quantizer()
    with pytest.raises(TypeError, match=r"dtype must be .* or float16, got torch\.in"):
        q.quantize(torch.ones(2, 2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"input must be a torch\.Tensor, got NoneType"):
        q.quantize(None)
    with pytest.raises(ValueError, match=r"seed must be int64 with one value"):
        q.quantize(X, seed=torch.zeros(2))
    drawn = hybridq.quantizer("mxfp8", stochastic=True)
    ends = torch.tensor([len(X)], dtype=torch.int32)
    for x in (X, X.clone().requires_grad_()):  # past the dispatcher, and through it
        with pytest.raises(TypeError, match=r"seed must be an int64 tensor .* got int; torch\.te"):
            drawn.quantize(x, seed=3)
    with pytest.raises(TypeError, match=r"encode: seed must be an int64 tensor .* got str$"):
        drawn.update_quantized(X, drawn(X), seed="3")
    with pytest.raises(TypeError, match=r"quantize_grouped: seed must be an int64 tensor .* int"):
        hybridq.quantize_grouped(X, ends, drawn, seed=3)
    with pytest.raises(TypeError, match="dtype must be"):
        q.quantize(X, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x must be \[rows, cols\]"):
        q.encode(torch.ones(2, 2, 2))


def test_the_cores_one_call_refuses_wrong_arguments() -> None:
    core = backend_cpu.core
    spec = backend_cpu.core_spec(hybridq.PlaneSpec.parse("nvfp4"))[0]
    plain = backend_cpu.core_spec(hybridq.PlaneSpec.parse("mxfp8"))[0]
    noisy = backend_cpu.core_spec(hybridq.PlaneSpec.parse("mxfp8;sr"))[0]
    good = (plain, 1, 1, 0, 0, 0, 0, 0)
    head = (1, "float32", 1, 1, 1, 1)
    for arguments, text in (
        ((*head, None, None, False, False), "row or col must be given"),
        ((*head, good, None, True, False), "only a plane that needs a stat"),
        ((*head, (noisy, 1, 1, 0, 0, 0, 0, 0), None, False, False), "seed must not be null"),
        ((*head, (spec, 1, 1, 0, 0, 0, 0, 0), None, False, False), "stat must not be null"),
        ((*head, (plain, 0, 1, 0, 0, 0, 0, 0), None, False, False), "data must not be null"),
        ((*head, (None, 1, 1, 0, 0, 0, 0, 0), None, False, False), "needs a spec"),
        ((1, "int8", 1, 1, 1, 1, good, None, False, False), "dtype"),
    ):
        with pytest.raises(ValueError, match=text):
            core.encode_from_scratch(*arguments)

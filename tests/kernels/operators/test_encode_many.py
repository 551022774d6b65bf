"""`multi_tensor_quantize` and its operator: the bits, draws and gradients of single calls."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import hybridq
from tensor_tools import PAIRS, same_planes, sharing

ops = torch.ops.hybridq
SHAPES = ((128, 64), (3, 5, 40), (1, 33), (0, 16), (7,), (), (64, 0), (96, 160))


def some(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Tensors of many shapes, a view among them, with a NaN and an infinity."""
    made = [torch.randn(shape).to(dtype) for shape in SHAPES]
    made[0][3, 3], made[1][0, 0, 0] = float("nan"), float("inf")
    return [*made, made[-1].t(), made[-1][::2, 1:33]]


def same_as_singles(tensors, quantizers, made) -> None:
    assert len(made) == len(tensors)
    for tensor, quantizer, one in zip(tensors, quantizers, made, strict=True):
        want = quantizer(tensor)
        assert type(one) is type(want) and one.quantizer == quantizer
        assert one.shape == tensor.shape and one.dtype == tensor.dtype
        same_bytes(one, want)


def same_bytes(one, want) -> None:
    """As same_planes, where a NaN is equal to itself."""
    for direction in ("rowwise", "columnwise"):
        first, second = getattr(one, direction), getattr(want, direction)
        assert (first is None) == (second is None)
        if first is None:
            continue
        assert first.spec == second.spec and first.matrix == second.matrix
        for name, buffer in first.buffers.items():
            left, right = (
                b.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
                for b in (buffer, second.buffers[name])
            )
            assert torch.equal(left, right), (direction, name)


@pytest.mark.parametrize("pair", sorted(PAIRS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_many_tensors_have_the_bits_of_single_calls(backend, pair, dtype) -> None:
    quantizer = hybridq.quantizer(**PAIRS[pair])
    tensors = some(dtype)
    made = hybridq.multi_tensor_quantize(tensors, quantizer)
    same_as_singles(tensors, [quantizer] * len(tensors), made)
    assert [sharing(one) for one in made] == [sharing(quantizer(t)) for t in tensors]


def test_every_tensor_may_have_its_own_quantizer_dtype_and_usage(backend) -> None:
    quantizers = [
        hybridq.MXFP8Quantizer(),
        hybridq.NVFP4Quantizer(with_2d_quantization=True),
        hybridq.MXFP8Quantizer().with_usage(columnwise=False),
        hybridq.MXFP8Quantizer(),
        hybridq.quantizer("mxfp8", "nvfp4", columnwise_source="rowwise_dequantized").with_usage(
            rowwise=False
        ),
        hybridq.IdentityQuantizer(),
        hybridq.NVFP4Quantizer(row_scaled_nvfp4=True),
        hybridq.quantizer("mxfp8", "bf16", columnwise_source="rowwise_dequantized"),
    ]
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    tensors = [torch.randn(32, 16 + i).to(dtypes[i % 4]) for i in range(len(quantizers))]
    made = hybridq.multi_tensor_quantize(tensors, quantizers)
    same_as_singles(tensors, quantizers, made)
    same_as_singles(
        tensors, quantizers, hybridq.multi_tensor_quantize(tuple(tensors), tuple(quantizers))
    )


def test_quantized_tensors_and_iterators_are_taken() -> None:
    quantizer = hybridq.NVFP4Quantizer()
    tensors = [torch.randn(16, 32), hybridq.quantize(torch.randn(16, 32), "mxfp8")]
    made = hybridq.multi_tensor_quantize(iter(tensors), quantizer)
    same_as_singles(tensors, [quantizer] * 2, made)
    layer = torch.nn.Linear(32, 16)
    assert len(hybridq.multi_tensor_quantize(layer.parameters(), quantizer)) == 2
    assert hybridq.multi_tensor_quantize([], quantizer) == []
    assert hybridq.multi_tensor_quantize([], []) == []


def test_no_memory_is_shared_between_tensors() -> None:
    """Saving or freeing one of them must not keep or touch another."""
    x = torch.randn(16, 32)
    for name in ("nvfp4", "fp8_e4m3", "bf16"):
        made = hybridq.multi_tensor_quantize([x, x], hybridq.quantizer(name))
        first, second = (
            {b.untyped_storage().data_ptr() for p in t.tensor_storage.planes for b in p.tensors}
            for t in made
        )
        assert not first & second and x.data_ptr() not in first | second


# --- random numbers


def test_seeds_are_drawn_as_by_single_calls(backend) -> None:
    """In the order given, whatever group a tensor is in, and only where something is random."""
    random, plain = hybridq.NVFP4Quantizer(stochastic_rounding=True), hybridq.MXFP8Quantizer()
    other = hybridq.quantizer("mxfp8", "nvfp4", stochastic=True, hadamard=True)
    quantizers = [random, plain, other, random, plain, other]
    tensors = [torch.randn(24, 40) for _ in quantizers]
    torch.manual_seed(9)
    made = hybridq.multi_tensor_quantize(tensors, quantizers)
    after = torch.rand(1)
    torch.manual_seed(9)
    want = [quantizer(tensor) for tensor, quantizer in zip(tensors, quantizers, strict=True)]
    assert torch.equal(after, torch.rand(1))
    for one, single in zip(made, want, strict=True):
        same_planes(one, single)
    assert not torch.equal(made[0].rowwise.data, made[3].rowwise.data)


def test_seeds_may_be_given(backend) -> None:
    quantizer = hybridq.quantizer("nvfp4", stochastic=True)
    tensors = [torch.randn(24, 40) for _ in range(3)]
    seeds = torch.tensor([5, -7, 2**62])
    made = hybridq.multi_tensor_quantize(tensors, quantizer, seeds=seeds)
    for i, one in enumerate(made):
        same_planes(one, quantizer.quantize(tensors[i], seed=seeds[i : i + 1]))
    # One for each tensor, also for those that are not random.
    mixed = [hybridq.MXFP8Quantizer(), quantizer, hybridq.MXFP8Quantizer()]
    made = hybridq.multi_tensor_quantize(tensors, mixed, seeds=seeds)
    same_planes(made[1], quantizer.quantize(tensors[1], seed=seeds[1:2]))


# --- gradients


def test_gradients_pass_straight_through_to_each_tensor_by_itself() -> None:
    tensors = [torch.randn(8, 32, requires_grad=i != 1, dtype=dtype) for i, dtype in enumerate(
        (torch.float32, torch.float32, torch.bfloat16)
    )]  # fmt: skip
    made = hybridq.multi_tensor_quantize(tensors, hybridq.MXFP8Quantizer())
    assert [one.requires_grad for one in made] == [True, False, True]
    assert made[0].grad_fn is not made[2].grad_fn
    # The first one's backward needs nothing of the others'.
    (grad,) = torch.autograd.grad((3 * made[0]).sum(), [tensors[0]])
    assert torch.equal(grad, torch.full((8, 32), 3.0))
    factor = torch.randn(8, 32, dtype=torch.bfloat16)
    (made[2] * factor).sum().backward()
    assert torch.equal(tensors[2].grad, factor) and tensors[0].grad is None
    with torch.no_grad():
        assert not hybridq.multi_tensor_quantize(tensors, hybridq.MXFP8Quantizer())[0].requires_grad


def test_the_operator_has_no_silent_derivative() -> None:
    x = [torch.randn(4, 32, requires_grad=True), torch.randn(4, 32)]
    made = ops.encode_many(x, "fp8_e4m3", "")
    with pytest.raises(RuntimeError, match=r"hybridq::encode_many: has no derivative"):
        made[1].sum().backward()


# --- torch.compile


@pytest.fixture
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.thinned(1, few=1)
@pytest.mark.parametrize(
    "pair", ["from decoded", "uniform", "hybrid", "half identity", "one scale"]
)
def test_compiled_code_has_eager_bits(_fresh, pair) -> None:
    quantizer = hybridq.quantizer(**PAIRS[pair])

    def run(*tensors: torch.Tensor):
        made = hybridq.multi_tensor_quantize([2 * t for t in tensors], quantizer)
        return [*made, *(one.dequantize() for one in made)]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for n in (24, 56):
            tensors = [torch.randn(n, 40), torch.randn(3, n, 16), torch.randn(n, 24)]
            got, want = compiled(*tensors), run(*tensors)
            for i in range(3):
                same_planes(got[i], want[i])
                assert torch.equal(got[3 + i], want[3 + i])


def test_compiled_code_trains_and_takes_a_quantizer_for_each(_fresh) -> None:
    quantizers = [hybridq.MXFP8Quantizer(), hybridq.NVFP4Quantizer(), hybridq.MXFP8Quantizer()]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        made = hybridq.multi_tensor_quantize(tensors, quantizers)
        return sum((i + 1) * one.dequantize().sum() for i, one in enumerate(made))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    tensors = [torch.randn(8, 32, requires_grad=True) for _ in quantizers]
    got = compiled(*tensors)
    got.backward()
    assert torch.equal(got, run(*tensors)) and not counters["graph_break"]
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor.grad, torch.full((8, 32), i + 1.0))


def test_a_graph_has_one_operation_for_all(_fresh) -> None:
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        made = hybridq.multi_tensor_quantize(tensors, hybridq.MXFP8Quantizer())
        return [one.dequantize() for one in made]

    tensors = [torch.randn(8 * (1 + i), 32) for i in range(5)]
    torch.compile(run, fullgraph=True, backend=backend)(*tensors)
    assert sum("encode" in target for target in seen) == 1


def test_compiled_code_draws_anew_at_every_call(_fresh) -> None:
    quantizer = hybridq.NVFP4Quantizer(stochastic_rounding=True)
    tensors = [torch.randn(24, 40) for _ in range(2)]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t.dequantize() for t in hybridq.multi_tensor_quantize(list(tensors), quantizer)]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    first, second = compiled(*tensors), compiled(*tensors)
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[0], first[1])


# --- the operator

_SPECS = ("mxfp8", "nvfp4", "fp8_e4m3", "nvfp4;rows", "mxfp8;sr", "bf16")


@pytest.mark.parametrize("spec", _SPECS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(spec, requires_grad) -> None:
    xs = [torch.randn(6, 40, requires_grad=requires_grad), torch.randn(3, 16), torch.randn(0, 8)]
    args = (xs, spec, "mxfp8", None, None, torch.tensor([3, 4, 5]))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    if not requires_grad:
        tests = (*tests, "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.encode_many.default, args, test_utils=tests)


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("keep_row", [True, False])
@pytest.mark.parametrize("row,col", [("nvfp4", "mxfp8;sr"), ("bf16", "nvfp4"), ("nvfp4", "fp32")])
def test_the_operator_returns_what_encode_does(backend, source, keep_row, row, col) -> None:
    xs = [torch.randn(24, 40), torch.randn(5, 16)]
    seeds = torch.tensor([3, 4])
    options = {"col_source": source, "keep_row": keep_row, "row_stream": 6, "col_stream": 7}
    got = ops.encode_many(xs, row, col, None, None, seeds, **options)
    want = [
        buffer
        for i, x in enumerate(xs)
        for buffer in ops.encode(x, row, col, None, None, seeds[i : i + 1], **options)
    ]
    assert len(got) == len(want)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_amaxes_may_be_given(backend) -> None:
    xs = [torch.randn(24, 40), torch.randn(5, 16)]
    row, col = torch.tensor([9.0, float("inf")]), torch.tensor([7.0, 8.0])
    got = ops.encode_many(xs, "nvfp4", "fp8_e4m3", row, col)
    for i, x in enumerate(xs):
        want = ops.encode(x, "nvfp4", "fp8_e4m3", row[i : i + 1], col[i : i + 1])
        assert all(torch.equal(g, w) for g, w in zip(got[5 * i : 5 * i + 5], want, strict=True))
    assert got[7] == torch.finfo(torch.float32).max


# --- what is refused


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda q, x: ([q], q), TypeError, "input must be a torch.Tensor"),
        (lambda q, x: (x, q), TypeError, "tensors must be a sequence of tensors, got Tensor"),
        (lambda q, x: (5, q), TypeError, "tensors must be a sequence of tensors, got int"),
        (lambda q, x: ([x.int()], q), TypeError, "dtype must be"),
        (lambda q, x: ([x], "mxfp8"), TypeError, "a Quantizer or a sequence of them, got str"),
        (lambda q, x: ([x], None), TypeError, "a Quantizer or a sequence of them, got NoneType"),
        (lambda q, x: ([x, x], [q]), ValueError, "one for each of 2, got 1"),
        (lambda q, x: ([x], []), ValueError, "one for each of 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(call, error, message) -> None:
    args = call(hybridq.MXFP8Quantizer(), torch.randn(4, 32))
    with pytest.raises(error, match=f"multi_tensor_quantize: .*{message}"):
        hybridq.multi_tensor_quantize(*args)


def test_seeds_and_usages_are_checked() -> None:
    x, quantizer = torch.randn(4, 32), hybridq.MXFP8Quantizer()
    for wrong in (torch.tensor([1]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])):
        with pytest.raises(ValueError, match=r"multi_tensor_quantize: seeds must be int64 \[2\]"):
            hybridq.multi_tensor_quantize([x, x], quantizer, seeds=wrong)
    with pytest.raises(TypeError, match=r"seeds must be an int64 tensor \[2\], got list"):
        hybridq.multi_tensor_quantize([x, x], quantizer, seeds=[1, 2])
    with pytest.raises(hybridq.PlaneError, match="both usages are off"):
        hybridq.multi_tensor_quantize([x], quantizer.with_usage(False, False))


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda x: ((x, x[0]), "mxfp8", ""), ValueError, r"x must be \[rows, cols\]"),
        (lambda x: ((x, x.half()), "mxfp8", ""), ValueError, "one dtype and one device"),
        (lambda x: ((x, x.to("meta")), "mxfp8", ""), ValueError, "one dtype and one device"),
        (lambda x: ((x,), "mxfp8;sr", ""), ValueError, "needs seeds, got None"),
        (lambda x: ((x,), "mxfp8", "", None, None, torch.ones(2)), ValueError, "seeds must be"),
        (lambda x: ((x, x), "nvfp4", "", torch.ones(1)), ValueError, r"row_stats must be .* \[2\]"),
        (lambda x: ((x,), "", "nvfp4", None, torch.ones(1).double()), ValueError, "col_stats must"),
        (lambda x: ((x,), "nvfp4;rows", "", torch.ones(1)), ValueError, "an amax for each row"),
        (
            lambda x: ((x,), "nvfp4", "", torch.ones(1, device="meta")),
            ValueError,
            "must be on one device, got cpu and meta for row_stats",
        ),
    ],
)
def test_the_operator_refuses_what_it_cannot_take(call, error, message) -> None:
    with pytest.raises(error, match=f"encode_many: .*{message}"):
        ops.encode_many(*call(torch.randn(4, 32)))


def test_the_operator_refuses_a_wrong_source_and_streams() -> None:
    x = [torch.randn(4, 32)]
    with pytest.raises(ValueError, match="encode_many: col_source must be"):
        ops.encode_many(x, "mxfp8", "mxfp8", col_source="else")
    with pytest.raises(hybridq.SpecError, match="needs a row spec"):
        ops.encode_many(x, "", "mxfp8", col_source="rowwise_dequantized")
    with pytest.raises(ValueError, match="encode_many: a stream"):
        ops.encode_many(x, "mxfp8", "mxfp8", row_stream=-1)
    with pytest.raises(hybridq.BackendError), hybridq.backend("nothing"):
        ops.encode_many(x, "mxfp8", "")


def test_specs_are_resolved_by_the_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        made = ops.encode_many([torch.randn(4, 32).to(dtype)] * 2, "identity", "")
        assert [one.dtype for one in made] == [dtype] * 2

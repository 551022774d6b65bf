"""What a Linear asks of a GPU, counted without one (table: docs/reference/gpu-status.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import hybridq
from cuda_costs import Costs, backward, counted, fake_gpu
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.operators import dense, run_encode

ROWS, WIDTH, OUT = 16384, 4096, 16384

#: recipe -> of the forward and of the backward: device operations beside the products, with a call
#: of the core as one; tensors with new memory; bytes that operations of torch move after a product,
#: for each element of the output. A bias adds nothing to a forward.
TABLE = {
    "mxfp8": ((2, 5, 0.0), (1, 4, 0.0)),
    "fp8_current": ((2, 5, 0.0), (1, 4, 0.0)),
    "fp8_block": ((2, 5, 0.0), (1, 4, 0.0)),
    "nvfp4": ((5, 6, 0.0), (5, 4, 0.0)),
}
#: Frames of Python in hybridq: of the forward and of the backward, with room for other versions.
FRAMES = {
    "mxfp8": (49, 59),
    "fp8_current": (45, 53),
    "fp8_block": (49, 59),
    "nvfp4": (57, 79),
}


@pytest.fixture
def costs(monkeypatch) -> Iterator[list[Costs]]:
    """A Hopper that is not there."""
    with fake_gpu(monkeypatch) as made:
        yield made


def step(costs: list[Costs], recipe: object, has_bias: bool) -> tuple[Costs, Costs]:
    """Return what forward and backward cost once caches know the shapes."""
    layer = hybridq.Linear(WIDTH, OUT, bias=has_bias, device="meta", dtype=torch.bfloat16)
    for name, parameter in list(layer.named_parameters()):
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
        setattr(layer, name, torch.nn.Parameter(made))
    x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for _ in range(2):
        with hybridq.autocast(recipe=recipe):
            y, forward = counted(costs, lambda: layer(x))
        costs.append(Costs())
        dy = torch.empty(y.shape, dtype=y.dtype, device="cuda")
        grads, back = counted(costs, lambda dy=dy: backward(dy))
    assert y.shape == (ROWS, OUT) and [grad.shape for grad in grads[:2]] == [x.shape, (OUT, WIDTH)]
    return forward, back


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("recipe", TABLE)
def test_costs_of_a_linear(costs, recipe: str, has_bias: bool) -> None:
    found = step(costs, recipe, has_bias)
    for costed, (operations, tensors, nbytes), products in zip(
        found, TABLE[recipe], (1, 2), strict=True
    ):
        if has_bias and costed is found[1]:  # the sum of dy
            operations, tensors, nbytes = operations + 1, tensors + 1, nbytes + 2.0
        assert sum(costed.products.values()) == products
        assert costed.launches - products <= operations, costed
        assert costed.allocations <= tensors, costed
        assert costed.nbytes / (ROWS * OUT) <= nbytes + 0.01, costed
    frames = [one.frames for one in found]
    assert all(got <= most for got, most in zip(frames, FRAMES[recipe], strict=True)), frames


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_an_operand_is_one_launch(costs, recipe: str) -> None:
    """Encode folds what it writes, and lays scales as the product reads them."""
    forward, back = step(costs, recipe, has_bias=False)
    assert not forward.others and not back.others
    assert dict(forward.kernels) == {"encode": 2} and dict(back.kernels) == {"encode": 1}
    assert forward.launches + back.launches == 6


def test_blackwell_has_nothing_between_encode_and_product(monkeypatch) -> None:
    with fake_gpu(monkeypatch, (10, 0)) as costs:
        # NVFP4's weight has squares of 16x16, and one kernel divides both amaxes of a product.
        for recipe, tensors, factors in (("mxfp8", (5, 4), 0), ("nvfp4", (6, 4), 1)):
            forward, back = step(costs, recipe, has_bias=False)
            assert forward.allocations <= tensors[0] and back.allocations <= tensors[1]
            assert forward.frames <= 58 and back.frames <= 82, (forward.frames, back.frames)
            assert forward.kernels == Counter(encode=2, two_factors=factors)
            assert back.kernels == Counter(encode=1, two_factors=2 * factors)
            assert set(forward.others) <= {"randint"} and not back.others


def test_products_with_block_scales_add_the_bias_themselves(costs) -> None:
    """An FP32 product, an addition and a cast would be 16 bytes for each element more."""
    for recipe in ("mxfp8", "fp8_block"):
        forward, _ = step(costs, recipe, has_bias=True)
        assert dict(forward.products) == {"scaled_mm bfloat16": 1}
        assert not {"add", "_to_copy"} & set(forward.others)


def test_factors_of_a_product_are_in_an_operand(costs) -> None:
    """Nothing follows the product, which rounds to BF16 and adds the bias itself."""
    forward, back = step(costs, "nvfp4", has_bias=True)
    assert dict(forward.kernels) == {"encode": 2, "decode": 2}
    assert dict(back.kernels) == {"encode": 1, "decode": 4}
    assert dict(forward.products) == {"addmm bfloat16": 1}
    assert dict(back.products) == {"mm bfloat16": 2}


def test_a_product_in_fp32_is_finished_by_one_kernel(costs) -> None:
    recipe = hybridq.recipes.get("nvfp4").with_precision("exact")
    forward, back = step(costs, recipe, has_bias=True)
    assert forward.kernels["finish"] == 1 and back.kernels["finish"] == 2
    assert dict(forward.others) == {"randint": 1}  # a seed; of amaxes the kernel makes factors
    assert set(back.others) <= {"sum"}


def test_what_is_added_in_place_is_not_copied(costs) -> None:
    """`main_grad` in FP32: 12 bytes for each of its elements, by the kernel alone."""
    spec = str(PlaneSpec.parse("nvfp4"))
    given: list[object] = [torch.empty(ROWS, OUT, device="cuda")]
    for rows in (ROWS, OUT):
        x = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
        given += [run_encode(x, EncodeRequest(spec, "")), spec, rows]
    # Behind the operator, of which fake tensors have a shape only.
    _, found = counted(costs, lambda: dense._gemm_into(*given, WIDTH, accumulate=True))
    assert found.kernels["finish"] == 1 and not {"copy_", "add"} & set(found.others)


def test_what_is_counted_is_noticed(costs) -> None:
    def run() -> None:
        x = torch.empty(64, 32, device="cuda")
        torch.ops.aten.add.Tensor(x, x)
        x.view(-1)

    _, found = counted(costs, run)
    assert dict(found.others) == {"add": 1} and found.allocations == 2
    assert found.nbytes == 3 * 64 * 32 * 4 and found.launches == 1

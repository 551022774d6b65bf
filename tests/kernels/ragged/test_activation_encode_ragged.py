"""`activation_encode_ragged`: the planes of an activation of tokens, by group and not.

The oracle is `activation`, and then `encode_ragged`, both on the reference.
"""

from __future__ import annotations

import pytest
import torch

import hybridq
import kernel_cases as cases
from hybridq.kernels import cpu
from hybridq.reference import ACTIVATIONS
from ragged_cases import PAIRS, SIZES, ends, same, text

ops = torch.ops.hybridq


def case(number: int, cols: int, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.Tensor]:
    sizes, rest = SIZES[number]
    return sizes, cases.matrix(sum(sizes) + rest, cols, dtype, number, cases.SPECIALS[number % 5])


def check(x: torch.Tensor, sizes: tuple[int, ...], kind: str, name: str, **options) -> None:
    row, col = PAIRS[name]
    seed = torch.arange(7, 7 + len(sizes)) if options.get("by_group") else torch.tensor([7])
    args = (text(row), text(col), None, None, seed)
    with hybridq.backend("reference"):
        want = ops.encode_ragged(ops.activation(x, kind), ends(sizes), *args, **options)
    got = ops.activation_encode_ragged(x, ends(sizes), kind, *args, **options)
    same(got, want, f"{kind} {name} {sizes} {x.dtype}")


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_has_the_bits_of_two_steps(name: str) -> None:
    for number in range(len(SIZES)):
        sizes, x = case(number, 144 if number else 42, cases.DTYPES[number % 3])
        check(x, sizes, "swiglu", name, by_group=True)
    check(x, sizes, "swiglu", name, by_group=False)


@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_every_activation(kind: str) -> None:
    for variant in cpu.core.build_info()["tables"]:
        before = cpu.core.variant()
        try:
            cpu.core.set_variant(variant)
            for name in ("mxfp8", "nvfp4 rht"):
                sizes, x = case(0, 96, torch.bfloat16)
                check(x, sizes, kind, name, by_group=True)
        finally:
            cpu.core.set_variant(before)


@pytest.mark.parametrize("keep_row", [True, False])
def test_columns_of_what_the_rows_decode_to(keep_row: bool) -> None:
    sizes, x = case(0, 96, torch.bfloat16)
    options = {"col_source": "rowwise_dequantized", "keep_row": keep_row}
    check(x, sizes, "geglu", "mxfp8 | nvfp4", by_group=True, **options)


def test_statistics_can_be_given() -> None:
    sizes, x = case(0, 64, torch.bfloat16)
    stat = torch.linspace(1.0, 9.0, len(sizes)).view(-1, 1)
    args = (ends(sizes), "fp8_e4m3", "nvfp4", stat, stat)
    want = ops.encode_ragged(ops.activation(x, "gelu"), *args, by_group=True)
    got = ops.activation_encode_ragged(x, args[0], "gelu", *args[1:], by_group=True)
    same(got, want, "given")


def test_opcheck() -> None:
    args = (torch.randn(6, 40), ends((2, 0, 3)), "swiglu", "mxfp8", "nvfp4")
    torch.library.opcheck(ops.activation_encode_ragged.default, args, {"by_group": True})


@pytest.mark.parametrize(
    "x,kind,message",
    [
        (torch.randn(4, 64), "swish", "activation_encode_ragged: kind must be"),
        (torch.randn(4, 63), "swiglu", "takes an even number of columns, got 63"),
        (torch.randn(64), "gelu", "activation_encode_ragged: x must be \\[rows, cols\\]"),
    ],
)
def test_bad_calls_say_why(x: torch.Tensor, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.activation_encode_ragged(x, ends((2,)), kind, "mxfp8", "")

"""torch's own table of operators, run with quantized arguments beside their decoded values."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

import hybridq
from hybridq import QuantizedTensor

if importlib.util.find_spec("expecttest") is None:  # torch's table imports it, and needs it not
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stand_in

from torch.testing._internal.common_methods_invocations import op_db

__all__ = ["OPERATORS", "TWO_WRITES", "Refused", "in_place", "out_of_place"]

#: Every operator of torch that takes FP32 on a CPU, by name.
OPERATORS = {op.formatted_name: op for op in op_db if op.supports_dtype(torch.float32, "cpu")}
#: In place they write twice, and so round twice.
TWO_WRITES = ("alpha_dropout",)
#: Their results are whatever was in memory.
_UNINITIALIZED = ("empty", "new_empty", "resize_", "resize_as_", "as_strided_partial_views")


class Refused(list):
    """The errors that an operator gave instead of a result."""


def _samples(op: Any, count: int) -> Iterator[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from islice(op.sample_inputs("cpu", torch.float32), count)


def _quantizes(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.dtype == torch.float32
        and value.layout == torch.strided
        and not value.is_nested
        and value.numel() > 0
    )


def _pairs(sample: Any, quantizer: Any, with_others: bool) -> tuple[Any, Any] | None:
    """Return the arguments with quantized tensors, and with their values; None: there are none."""
    made: dict[int, QuantizedTensor] = {}

    def quantized(value: Any) -> Any:
        if not _quantizes(value):
            return value
        return made.setdefault(id(value), quantizer(value.detach()))

    def decoded(value: Any) -> Any:
        if isinstance(value, QuantizedTensor):
            return value.dequantize()
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    first = tree_map(quantized, sample.input)
    if not made:
        return None
    rest = (sample.args, sample.kwargs)
    rest = tree_map(quantized, rest) if with_others else rest
    given = (first, rest[0], rest[1])
    return given, tree_map(decoded, given)


def _call(function: Any, given: Any) -> Any:
    first, args, kwargs = given
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(first, *args, **kwargs)


def _plain(value: Any) -> Any:
    is_ours = isinstance(value, QuantizedTensor | hybridq.tensor.DecodedPart)
    return value.dequantize() if is_ours else value


def _compare(op: Any, got: Any, expected: Any, quantizer: Any, where: str) -> None:
    """Raise unless the values are the expected ones; of what is quantized still, quantized."""
    if isinstance(got, QuantizedTensor) and not torch.equal(got.dequantize(), expected):
        expected = quantizer(expected).dequantize()  # a copy that was written in place
    ours = tree_flatten(tree_map(_plain, got))[0]
    theirs = tree_flatten(expected)[0]
    assert len(ours) == len(theirs), where
    for one, other in zip(ours, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other or (one != one and other != other), where
            continue
        assert one.shape == other.shape and one.dtype == other.dtype, where
        if not any(name in op.name for name in _UNINITIALIZED):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m: f"{where}: {m}"
            )


def out_of_place(op: Any, quantizer: Any, with_others: bool, count: int) -> Refused:
    """Run samples of an operator on quantized tensors; its results are those of the values.

    Args:
        op: of `OPERATORS`.
        quantizer: of the first argument, and of the others.
        with_others: whether the others are quantized.
        count: how many samples.

    Returns:
        The errors of calls that were refused.

    Raises:
        AssertionError: a call gave another result than the decoded tensors give.
    """
    refused = Refused()
    for position, sample in enumerate(_samples(op, count)):
        pair = _pairs(sample, quantizer, with_others)
        if pair is None:
            continue
        try:
            expected = _call(op.op, pair[1])
        except Exception:
            continue  # the values are none that it takes
        try:
            got = _call(op.op, pair[0])
        except Exception as error:
            refused.append(error)
            continue
        _compare(op, got, expected, quantizer, f"{op.formatted_name} {position}")
    return refused


def in_place(op: Any, quantizer: Any, with_others: bool, count: int) -> Refused:
    """Run the in-place variant: the tensor is then what quantizing the result gives.

    Args:
        op, quantizer, with_others, count: as for `out_of_place`.

    Returns:
        The errors of calls that were refused.

    Raises:
        AssertionError: a call left other values, or changed them and then was refused.
    """
    refused = Refused()
    for position, sample in enumerate(_samples(op, count)):
        pair = _pairs(sample, quantizer, with_others)
        if pair is None or not isinstance(pair[0][0], QuantizedTensor):
            continue
        tensor, where = pair[0][0], f"{op.formatted_name}_ {position}"
        before = tensor.dequantize()
        try:
            _call(op.inplace_variant, pair[1])
        except Exception:
            continue
        try:
            _call(op.inplace_variant, pair[0])
        except Exception as error:
            refused.append(error)
            assert torch.equal(tensor.dequantize(), before), f"{where}: refused, but has written"
            continue
        _compare(op, tensor, quantizer(pair[1][0]).dequantize(), quantizer, where)
    return refused

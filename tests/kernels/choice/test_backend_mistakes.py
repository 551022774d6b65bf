"""Mistakes in a backend of somebody else's: said by its name, in place of a wrong result."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import reference
from hybridq.kernels import Backend, DeviceSupport, register_backend, unregister_backend
from hybridq.kernels.reference_backend import REFERENCE

CPU_ONLY = DeviceSupport(("cpu",))


def any_query(query: object) -> str | None:
    return None


def nothing(*args: object) -> None:
    return None


@pytest.fixture
def registered():
    """Registers a backend for one test."""
    names = []

    def register(ops, supports=any_query, priority=99) -> str:
        names.append(f"mistaken{len(names)}")
        register_backend(Backend(names[-1], supports, ops, devices=CPU_ONLY, priority=priority))
        return names[-1]

    yield register
    for name in names:
        unregister_backend(name)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"name": ""}, TypeError, "name must be a text, got ''"),
        ({"supports": None}, TypeError, "supports must be callable, got None"),
        ({"ops": [nothing]}, TypeError, "ops must be by operation, got list"),
        (
            {"ops": {"gem": nothing}},
            ValueError,
            "ops must be among .* got gem; did you mean 'gemm'",
        ),
        ({"ops": {"gemm": 3}}, TypeError, "the function for gemm must be callable, got 3"),
        ({"op_priorities": {"gem": 3}}, ValueError, "op_priorities must be among .* got gem"),
        ({"op_devices": {"gem": CPU_ONLY}}, ValueError, "op_devices must be among .* got gem"),
        ({"priority": "high"}, TypeError, "a priority must be a number, got 'high'"),
        ({"devices": "cpu"}, TypeError, "devices must be a DeviceSupport, got 'cpu'"),
        ({"devices": DeviceSupport("cpu")}, TypeError, "kinds must be a collection of texts"),
        ({"devices": DeviceSupport(("cup",))}, ValueError, "types of torch's devices.*got 'cup'"),
        ({"op_devices": {"gemm": "cpu"}}, TypeError, "devices must be a DeviceSupport"),
    ],
)
def test_what_it_says_of_itself(arguments, kind, text) -> None:
    whole = {"name": "mistaken", "supports": any_query, "ops": {"gemm": nothing}}
    with pytest.raises(kind, match=text):
        Backend(**whole | arguments)


def test_only_backends_join() -> None:
    with pytest.raises(TypeError, match="register_backend: takes a Backend, got str"):
        register_backend("abacus")


@pytest.mark.parametrize("said", [True, False, 3, ""])
def test_an_answer_is_none_or_a_reason(said, registered) -> None:
    """True and False were both taken for "it cannot"."""
    name = registered({"gemm": nothing}, lambda query: said)
    with pytest.raises(TypeError, match=f"backend '{name}': supports must return None or"):
        hybridq.gemm(torch.randn(4, 64), torch.randn(8, 64))


def wrong(value):
    return lambda *args: value


@pytest.mark.parametrize(
    ("op", "value", "text"),
    [
        ("gemm", None, r"float32\[4, 8\], got NoneType"),
        ("gemm", torch.zeros(8, 4), r"float32\[4, 8\], got float32\[8, 4\]"),
        ("gemm", torch.zeros(4, 8).double(), r"float32\[4, 8\], got float64\[4, 8\]"),
        ("decode", torch.zeros(4, 32), r"float32\[4, 64\], got float32\[4, 32\]"),
        ("amax", torch.tensor(3.0), r"float32\[1\], got float32\[\]"),
        ("encode", None, r"the buffers uint8\[4, 32\], .*got NoneType"),
        ("encode", [torch.zeros(4, 32).byte()], r"uint8\[4, 4\], float32\[1\], .*, got uint8\[4, "),
        ("encode", [torch.zeros(1)] * 6, r"the buffers .*, got float32\[1\]"),
    ],
)
def test_results_are_those_of_the_table(op, value, text, registered) -> None:
    ops = {"encode": REFERENCE.ops["encode"]} if op == "amax" else {}  # asks for it
    name = registered({**ops, op: wrong(value)})
    with pytest.raises((TypeError, ValueError), match=f"backend '{name}': its {op} must .*{text}"):
        x = hybridq.quantize(torch.randn(4, 64), "nvfp4", columnwise="nvfp4")
        x.dequantize()
        hybridq.gemm(x, hybridq.quantize(torch.randn(8, 64), "nvfp4"), out_dtype=torch.float32)


@pytest.mark.parametrize("recipe", hybridq.recipes.names())
def test_right_results_pass(recipe, registered) -> None:
    """The reference's functions under another name: every recipe, with its bits."""
    results = []
    for name in ("reference", registered({**REFERENCE.ops}, priority=0)):
        torch.manual_seed(0)
        layer = hybridq.Linear(72, 40)
        x = torch.randn(24, 72, requires_grad=True)
        with hybridq.backend(name), hybridq.autocast(recipe=recipe):
            layer(x).square().sum().backward()
        results.append([x.grad, layer.weight.grad, layer.bias.grad])
    for own, other in zip(*results, strict=True):
        assert torch.equal(own, other)


def test_functions_keep_what_they_say_of_themselves(registered) -> None:
    """Whoever asks for a backend gets an equal one, whose functions have their attributes."""
    name = registered({"gemm": reference.decode_plane})
    (found,) = [one for one in hybridq.kernels.backends() if one.name == name]
    assert found.ops == {"gemm": reference.decode_plane}
    assert found.ops["gemm"].__name__ == "decode_plane"

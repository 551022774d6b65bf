"""The library of `torch.ops.hybridq.*`, and how an operator joins it: all of it, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._torch_private import after_autograd, any_requires_grad, below_autograd
from ..choice import EncodeRequest
from ..inputs import Library

__all__ = ["encode_operator", "operator", "refuse"]

_LIBRARY = Library("hybridq", "DEF")


def refuse(name: str) -> Callable[..., Any]:
    """Return a backward that says that the operator `name` has none, by a RuntimeError."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{name}: has no derivative; quantize through a Quantizer (straight-through "
            "gradient), use hybridq.Linear, or detach the input"
        )

    return backward


def _refuse_gradients(name: str) -> None:
    """Have the operator `name`, which writes into an argument, refuse tensors that require grad.

    It then raises a RuntimeError, as torch's own functions do with `out=`: what is written has no
    gradient.
    """
    overload = getattr(torch.ops.hybridq, name).default

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(*args, **kwargs):
            raise RuntimeError(
                f"hybridq::{name}: it writes into an argument, and so has no derivative, got a "
                "tensor that requires grad; call it under torch.no_grad(), or take the result "
                "instead of out="
            )
        with below_autograd():
            return overload.redispatch(keyset & after_autograd, *args, **kwargs)

    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def operator(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> None:
    """Define an operator: what it does, what it returns of fake tensors, and its derivative.

    Args:
        schema: its name and arguments, as torch writes them.
        implementation: runs it, on any device.
        fake: returns tensors of the right shapes and dtypes.
        backward: its derivative; None: it has none, and says so. One that writes into an argument
            has none in any case.
        setup: what saves tensors for `backward`, or None.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    full = f"hybridq::{name}"
    torch.library.register_fake(full, fake, lib=_LIBRARY)
    if "!" in schema:
        _refuse_gradients(name)
        return
    derivative = backward or refuse(full)
    torch.library.register_autograd(full, derivative, setup_context=setup, lib=_LIBRARY)


def encode_operator(
    name: str,
    leading: str,
    run: Callable[..., list[torch.Tensor]],
    fake: Callable[..., list[torch.Tensor]],
    *,
    plural: str = "",
    tensor: str = "",
    place: str = "",
    more: str = "",
    backward: Callable[..., Any] | None = None,
) -> None:
    """Define an operator that encodes: what every one of them takes is an `EncodeRequest`.

    Args:
        name: of the operator.
        leading: its arguments before the request, as a schema writes them.
        run: returns buffers for the leading arguments and the request.
        fake: the same of fake tensors.
        plural: ends the names of statistics and seeds that are of several matrices.
        tensor: field of the request that is one more tensor or None behind the seeds, or "".
        place: more options before the streams, as a schema writes them.
        more: more options behind the streams.
        backward: what refuses a derivative in other words, or None.
    """
    schema = (
        f"{name}({leading}, str row, str col, Tensor? row_stat{plural}=None, "
        f"Tensor? col_stat{plural}=None, Tensor? seed{plural}=None, "
        f"{f'Tensor? {tensor}=None, ' if tensor else ''}*, "
        f"str col_source='original', bool keep_row=True, {place}int row_stream=0, "
        f"int col_stream=1{more}) -> Tensor[]"
    )
    count = leading.count(",") + 1

    last = count + 5  # row to seed

    def requested(args: tuple[Any, ...], options: dict[str, Any]) -> EncodeRequest:
        if len(args) > last:
            options[tensor] = args[last]
        return EncodeRequest(*args[count:last], **options)

    def implementation(*args: Any, **options: Any) -> list[torch.Tensor]:
        return run(*args[:count], requested(args, options))

    def faked(*args: Any, **options: Any) -> list[torch.Tensor]:
        return fake(*args[:count], requested(args, options))

    operator(schema, implementation, faked, backward)

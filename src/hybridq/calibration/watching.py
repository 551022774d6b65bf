"""Hooks that show functions of the caller the rows of each product of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ..nn import QuantizedModule
from ..nn.modules import patches
from ..tensor import is_quantized
from .expert_rows import ExpertCall, given_tokens
from .products import Product

__all__ = ["MatrixObserver", "watch"]


class MatrixObserver(Protocol):
    """What sees the matrices of one product, one for each call of its module.

    Any function of a matrix is one. It must not change what it is given, nor keep it: copy it.
    """

    def __call__(self, rows: torch.Tensor, /) -> object:
        """See a matrix.

        Args:
            rows: `[tokens, features]`, in the dtype in which the model has it; at least one row.
        """


#: Of a product what sees its matrices; None: nobody wants to.
Makes = Callable[[Product], MatrixObserver | None]


@contextmanager
def watch(
    of: Iterable[Product],
    inputs: Makes,
    outputs: Makes | None = None,
    *,
    all_experts: bool = False,
) -> Iterator[None]:
    """Show the rows of each product to an observer of its own, while the model is called inside.

    The model computes what it does otherwise, and has no hooks afterwards, after an error neither.
    What experts in a stack multiply by their second matrix is computed again for it, and what
    hybridq's fused modules multiply: the module's own forward stays what runs.

    Args:
        of: products of one model, as `hybridq.calibration.products` gives them.
        inputs: called once for each product; what it returns is given the rows of every input.
        outputs: the same of results, `[tokens, out_features]`, but of fused modules; None: nobody
            sees them.
        all_experts: each expert in a stack is shown every token of its layer, also those that the
            router sends to others. The results of the layer stay those of the router's choice.

    Example:
        >>> import torch
        >>> from hybridq.calibration import products, watch
        >>> model, grams = torch.nn.Sequential(torch.nn.Linear(8, 8)), {}
        >>> def gram(product):
        ...     total = grams[product.name] = torch.zeros(8, 8)
        ...     return lambda rows: total.add_(rows.T @ rows)
        >>> with watch(products(model), gram), torch.no_grad():
        ...     y = model(torch.ones(3, 8))
        >>> grams["0"][0, :2]
        tensor([3., 3.])
    """
    handles: list[Any] = []
    try:
        experts: dict[int, list[Product]] = {}
        fused: dict[int, list[Product]] = {}
        for product in of:
            if product.is_fused:
                fused.setdefault(id(product.module), []).append(product)
                continue
            if product.layout is not None:
                experts.setdefault(id(product.module), []).append(product)
                continue
            see, seen = inputs(product), None if outputs is None else outputs(product)
            if see is not None:
                handles.append(_before(product.module, see))
            if seen is not None:
                handles.append(_after(product.module, seen))
        for group in experts.values():
            sees = _by_stack(group, inputs)
            results = _by_stack(group, outputs)
            handles.append(
                _at_experts(group[0], ExpertCall(sees, results, all_experts, group[0].reads))
            )
        handles += [_at_fused(group, inputs) for group in fused.values()]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_stack(
    group: Sequence[Product], make: Makes | None
) -> dict[str, list[MatrixObserver | None]]:
    """Return the observers of a module's experts, by the stack's name and in order."""
    made: dict[str, list[MatrixObserver | None]] = {}
    for product in group:
        made.setdefault(product.parameter, []).append(None if make is None else make(product))
    return made


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return the first argument of a call."""
    return args[0] if args else kwargs[name]


def _rows(x: Any, kernel: tuple[int, ...] | None) -> torch.Tensor:
    """Return a matrix of rows: of what a linear layer or a convolution of patches is given."""
    values: Any = x.dequantize() if is_quantized(x) else x
    values = values.detach()
    if hasattr(values, "full_tensor"):  # a DTensor, of which all ranks have parts
        values = values.full_tensor()
    if kernel is not None:
        values = patches(values, kernel)
    made: torch.Tensor = values.reshape(-1, values.shape[-1])
    return made


def _kernel(module: Any) -> tuple[int, ...] | None:
    """Return the size of the patches of a convolution; None of anything else."""
    is_conv = isinstance(module, nn.modules.conv._ConvNd)
    return tuple(module.kernel_size) if is_conv else None


def _before(module: nn.Module, see: MatrixObserver) -> Any:
    """Show the input of a linear layer."""
    name, kernel = next(iter(inspect.signature(module.forward).parameters)), _kernel(module)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        rows = _rows(_argument(args, kwargs, name), kernel)
        if isinstance(module, QuantizedModule):
            rows = module.whole_inputs("", rows)
        if rows.shape[0]:
            see(rows)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: nn.Module, see: MatrixObserver) -> Any:
    """Show the result of a linear layer."""
    kernel = _kernel(module)

    def hook(module: nn.Module, args: Any, result: Any) -> None:
        y = result[0] if isinstance(result, tuple) else result  # with its bias beside it
        y = y if kernel is None else y.movedim(-1 - len(kernel), -1)
        rows = _whole(module, _rows(y, None))
        if rows.shape[0]:
            see(rows)

    return module.register_forward_hook(hook)


def _whole(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return all features of a layer's result, of which this rank may have made some."""
    if isinstance(module, QuantizedModule):
        rows = module.whole_outputs("", rows)
    weight: Any = getattr(module, "weight", None)
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.ndim != 1 or rows.shape[-1] == weight.shape[0]:
        return rows
    from torch.distributed.tensor import DTensor, Shard  # not every build of torch has it

    size, strides = (rows.shape[0], weight.shape[0]), (weight.shape[0], 1)
    made: Any = DTensor.from_local(rows, mesh, [Shard(1)], shape=torch.Size(size), stride=strides)
    whole: torch.Tensor = made.full_tensor()
    return whole


def _at_fused(group: Sequence[Product], make: Makes) -> Any:
    """Show what a module multiplies that makes it itself; its results are not shown."""
    sees = {(one.parameter, one.expert): make(one) for one in group}

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for place, values in module.product_inputs(*args, **kwargs).items():
                see, rows = sees.get(place), _rows(values, None)
                if see is not None and rows.shape[0]:
                    see(rows)

    return group[0].module.register_forward_pre_hook(hook, with_kwargs=True)


def _at_experts(first: Product, call: ExpertCall) -> Any:
    """Show what experts in stacks multiply."""
    layout: Any = first.layout
    own = getattr(first.module, "own_arguments", ())
    names = own or tuple(inspect.signature(first.module.forward).parameters)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            call.show(module, layout, given_tokens(module, layout, names, args, kwargs))

    return first.module.register_forward_pre_hook(hook, with_kwargs=True)

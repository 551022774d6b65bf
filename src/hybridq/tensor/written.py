"""What an operator writes into: by its schema, and by its name where the schema does not say."""

from __future__ import annotations

from typing import Any

from .._torch_private import tree_flatten

__all__ = ["check_collective", "is_collective", "written"]

_COLLECTIVES = ("c10d::", "_c10d_functional::")


def is_collective(func: Any) -> bool:
    """Return whether an operator sends tensors between ranks."""
    return func._schema.name.startswith(_COLLECTIVES)


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return what is in the arguments that `func` writes into.

    Schemas of `c10d` do not say it: those that write have a name that ends in an underscore, and
    write into their first argument.

    Args:
        func: an operator.
        args, kwargs: of its call.
    """
    schema, found = func._schema, []
    by_name = schema.name.startswith("c10d::") and schema.name.endswith("_")
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if (by_name and position == 0) or (info is not None and info.is_write):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tree_flatten(value)[0]
    return found


def check_collective(func: Any, targets: list[Any]) -> None:
    """Raise if a collective writes into quantized tensors.

    What it writes comes later, on some ranks only; the planes that each rank would quantize of it
    need not be those of another rank.

    Args:
        func: the collective.
        targets: the quantized tensors that it writes into.

    Raises:
        RuntimeError: there is one.
    """
    if targets:
        raise RuntimeError(
            f"{func.overloadpacket.__name__}: torch.distributed cannot write into a quantized "
            f"tensor, got one of shape {tuple(targets[0].shape)}; give it values = t.dequantize() "
            "and call t.copy_(values) on every rank afterwards, or send what is in "
            "t.tensor_storage.flatten()[0], or use hybridq.distributed or DistributedDataParallel"
        )

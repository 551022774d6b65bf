"""What others read of a module's parameters: attributes by which Megatron's programs know them.

What replaces a parameter (`fully_shard`, `to_empty` of the meta device,
`load_state_dict(assign=True)`) takes no attributes along, so the module remembers them, and sets
them again where its parameters get their initial values.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

__all__ = ["mark_again", "mark_parameter", "marked"]

_MARKS: Final = "marks_of_parameters"


def mark_parameter(module: nn.Module, name: str, **attributes: Any) -> None:
    """Set attributes of a parameter, and remember them.

    Args:
        module: that has it; one that it does not have is not marked.
        name: of the parameter.
        attributes: plain values, by name.
    """
    given = module._parameters.get(name)
    if given is None:
        return
    module.__dict__.setdefault(_MARKS, {}).setdefault(name, {}).update(attributes)
    for attribute, value in attributes.items():
        setattr(given, attribute, value)


def mark_again(module: nn.Module) -> None:
    """Set the attributes that parameters of a module were given, on those that it has now.

    Args:
        module: whose children are left as they are.
    """
    for name, attributes in module.__dict__.get(_MARKS, {}).items():
        mark_parameter(module, name, **attributes)


def marked(module: nn.Module, attribute: str) -> list[str]:
    """Return the names of a module's parameters that were given an attribute, in order.

    Args:
        module: whose children are left out.
        attribute: its name.
    """
    return [name for name, given in module.__dict__.get(_MARKS, {}).items() if attribute in given]

"""Constructors and forwards with Transformer Engine's arguments, by a table of its signature.

An argument that the module of hybridq takes is passed on, whatever its value. Another one may have
its default value, or one that changes nothing here; a value that asks for what is not there raises.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch

from .meta_device import GetsMemory

__all__ = [
    "by_name",
    "constructor",
    "forward",
    "only_defaults",
    "options",
    "prepare",
    "with_arguments",
]

_C = TypeVar("_C", bound=type)

_REQUIRED: Final = inspect.Parameter.empty
#: Arguments that change no result, whatever they are: layouts, warm-up, names of buffers, how a
#: kernel shares out its work.
_IDLE: Final = frozenset(
    {
        *("fuse_qkv_params", "layer_number", "seq_length", "micro_batch_size", "ub_name"),
        *("get_rng_state_tracker", "rng_tracker_name", "fast_zero_fill", "pad_between_seqs"),
        *("max_seqlen_q", "max_seqlen_kv", "sm_margin", "use_grouped_tensor"),
        *("num_splits",),
    }
)


def options(text: str) -> dict[str, Any]:
    """Return names and defaults of a signature, `"a, b, *, c=None"`, in its order.

    Args:
        text: defaults are literals; of what is required there is `inspect.Parameter.empty`.
    """
    found = {}
    for part in text.replace("*,", "").split(","):
        name, has_default, default = part.strip().partition("=")
        found[name] = ast.literal_eval(default) if has_default else _REQUIRED
    return found


def _name(module: Any) -> str:
    """Return how a script calls a module's class: `te.Linear`, `te.ops.Linear`."""
    room = type(module).__module__.rpartition(".")[2]
    return f"te.{'ops.' if room == 'ops' else ''}{type(module).__name__}"


def _by_place(text: str) -> int:
    """Return how many arguments of a signature may be given by their places."""
    before, star, _ = text.partition("*,")
    return len(options(before.rstrip(", ") if star else text)) if before else 0


def _signature(known: Mapping[str, Any], count: int) -> inspect.Signature:
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for i, (name, value) in enumerate(known.items()):
        kind = own[0].kind if i < count else inspect.Parameter.KEYWORD_ONLY
        own.append(inspect.Parameter(name, kind, default=value))
    return inspect.Signature(own)


def only_defaults(
    where: str, given: Mapping[str, Any], table: Mapping[str, Any], reason: str = ""
) -> None:
    """Raise for an argument whose value asks for what is not there.

    Args:
        where: what is called.
        given: arguments, by name.
        table: default values, by name, as `options` returns them.
        reason: stands behind the default in the message.

    Raises:
        NotImplementedError: a value is not the default.
    """
    for name, value in given.items():
        default = table[name]
        if not (value is default or (type(value) is type(default) and value == default)):
            raise NotImplementedError(f"{where}: {name} must be {default!r}{reason}, got {value!r}")


def by_name(
    where: str, table: Mapping[str, Any], count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name; `count` may be given by their places.

    Raises:
        TypeError: there are too many, or one that there is not, or one twice.
    """
    if len(args) > count:
        raise TypeError(f"{where}: takes at most {count} arguments by place, got {len(args)}")
    given = dict(zip(table, args, strict=False))
    for name, value in kwargs.items():
        if name not in table:
            raise TypeError(f"{where}: unknown argument, got {name}={value!r}")
        if name in given:
            raise TypeError(f"{where}: {name} must be given once, got it twice")
        given[name] = value
    return given


def _taken(
    where: str, table: Mapping[str, Any], known: frozenset[str], given: dict[str, Any]
) -> dict[str, Any]:
    """Return what a function of hybridq takes of the arguments.

    Raises:
        NotImplementedError: another one has a value that asks for something.
    """
    others = {name: given[name] for name in given if name not in known | _IDLE}
    only_defaults(where, others, table, ", since hybridq has nothing like it")
    return {name: value for name, value in given.items() if name in known}


def constructor(
    base: type,
    text: str,
    prepare: Callable[[dict[str, Any]], None] | None = None,
    finish: Callable[[Any], None] | None = None,
    kept: Mapping[str, str] | None = None,
    idle: frozenset[str] = frozenset(),
) -> Callable[..., None]:
    """Return an `__init__` with Transformer Engine's arguments that calls that of `base`.

    Args:
        base: a class of hybridq, which knows arguments by the same names.
        text: the signature, as for `options`.
        prepare: changes the arguments, all of them by name, before they are passed on.
        finish: is given the module that was made.
        kept: arguments that the module itself keeps, and its attributes for them.
        idle: arguments that change no result here, besides those that change none anywhere.
    """
    table, count, own = options(text), _by_place(text), dict(kept or {})
    known = frozenset(inspect.signature(base).parameters)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        where = _name(self)
        given = {**table, **by_name(where, table, count, args, kwargs)}
        missing = [name for name, value in given.items() if value is _REQUIRED]
        if missing:
            raise TypeError(f"{where}: {missing[0]} must be given")
        attributes = {attribute: given[name] for name, attribute in own.items()}
        told = dict(given)
        if prepare is not None:
            prepare(given)
        passed = {n: given[n] for n in given if n in known or n not in own.keys() | idle}
        with GetsMemory.later(self):
            base.__init__(self, **_taken(where, table, known, passed))  # type: ignore[misc]
        for attribute, value in attributes.items():
            setattr(self, attribute, value)
        if hasattr(self, "take_arguments"):
            self.take_arguments(told)
        if finish is not None:
            finish(self)

    __init__.__signature__ = _signature(table, count)  # type: ignore[attr-defined]
    __init__.__doc__ = _sorted_arguments(table, known | set(own), idle)
    return __init__


def _sorted_arguments(
    table: Mapping[str, Any], known: frozenset[str], idle: frozenset[str] = frozenset()
) -> str:
    """Return a docstring's Args: which are passed on, which change nothing, which are refused."""
    kinds: dict[str, list[str]] = {"as hybridq's class takes them": []}
    kinds["without effect"], kinds["at their defaults only"] = [], []
    for name in table:
        place = 0 if name in known else 1 if name in _IDLE | idle else 2
        list(kinds.values())[place].append(name)
    lines = [f"    {', '.join(names)}: {kind}." for kind, names in kinds.items() if names]
    return "Args:\n" + "\n".join(lines)


def with_arguments(cls: _C) -> _C:
    """Return the class, whose docstring says what becomes of each argument.

    Args:
        cls: whose `__init__` is a `constructor`.
    """
    of = inspect.cleandoc(cls.__doc__ or "").split("\n\nExample:")
    own = cls.__init__  # type: ignore[misc]
    cls.__doc__ = "\n\nExample:".join([f"{of[0]}\n\n{own.__doc__}", *of[1:]])
    own.__doc__ = None
    return cls


def forward(
    base: type,
    text: str,
    renamed: Mapping[str, str] | None = None,
    prepare: Callable[[Any, dict[str, Any]], None] | None = None,
) -> Callable[..., Any]:
    """Return a `forward` with Transformer Engine's arguments that calls that of `base`.

    Args:
        base, text: as for `constructor`.
        renamed: arguments that have another name in hybridq, by theirs.
        prepare: is given the module, and changes the arguments before they are passed on.
    """
    table, names = options(text), dict(renamed or {})
    known = frozenset(inspect.signature(base.forward).parameters)  # type: ignore[attr-defined]
    known |= set(names)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        where = f"{_name(self)}.forward"
        given = by_name(where, table, len(table), args, kwargs)
        if prepare is not None:
            prepare(self, given)
        taken = _taken(where, table, known, given)
        own = {names.get(name, name): value for name, value in taken.items()}
        return base.forward(self, **own)  # type: ignore[attr-defined]

    forward.__doc__ = (
        f"Return what `forward` of hybridq's class does.\n\n{_sorted_arguments(table, known)}"
    )
    forward.__signature__ = _signature(table, len(table))  # type: ignore[attr-defined]
    return forward


def _normal(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def prepare(given: dict[str, Any]) -> None:
    """Fill in what Transformer Engine's constructors do where nothing is said.

    Args:
        given: arguments of a module, by name; changed.
    """
    for name in ("init_method", "output_layer_init_method"):
        if name in given and given[name] is None:
            given[name] = _normal
    if given.get("tp_group") is None and given.get("tp_size") == 1:
        given["sequence_parallel"] = False  # there is nobody to share the tokens with
    if given.get("fuse_qkv_params") is False:
        given["qkv_weight_interleaved"] = False
    if given.get("ub_tp_comm_overlap") is False:  # what it would overlap says nothing then
        defaults = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": False}
        given.update(defaults, ub_bulk_dgrad=True, ub_bulk_wgrad=True)

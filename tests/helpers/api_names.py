"""Every public name of hybridq: what the API pages must show and the tests must find documented.

As a program it holds the built pages to that: `python api_names.py build/docs/html/objects.inv`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import hybridq

#: Programs, not an API: their documentation is `--help`.
PROGRAMS = ("cli", "demo")


@dataclass(frozen=True)
class PublicName:
    """A name in the `__all__` of a public module, or a public member of a class there."""

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.name}" if self.name else self.module


def is_public_module(value: Any) -> bool:
    """Return whether `value` is a module of ours written in Python."""
    return inspect.ismodule(value) and hasattr(value, "__all__")


def modules() -> Iterator[ModuleType]:
    """Yield hybridq, its public modules, and the modules that those name in `__all__`."""
    names = [one.name for one in pkgutil.iter_modules(hybridq.__path__)]
    public = [name for name in names if not name.startswith("_") and name not in PROGRAMS]
    found = {"hybridq": hybridq}
    waiting = [importlib.import_module(f"hybridq.{name}") for name in public]
    while waiting:
        module = waiting.pop(0)
        if module.__name__ not in found:
            found[module.__name__] = module
            named = (getattr(module, name) for name in module.__all__)
            waiting.extend(value for value in named if is_public_module(value))
    yield from found.values()


def names() -> Iterator[PublicName]:
    """Yield the modules and the names in their `__all__`, modules among these left out."""
    for module in modules():
        yield PublicName(module.__name__, "", module)
        for name in module.__all__:
            value = getattr(module, name)
            if not is_public_module(value):
                yield PublicName(module.__name__, name, value)


def members(owner: PublicName) -> Iterator[PublicName]:
    """Yield the public methods and properties that a class of ours defines itself."""
    for name, value in vars(owner.value).items():
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        is_shown = inspect.isfunction(value) or isinstance(value, property | cached_property)
        if is_shown and not name.startswith("_"):
            yield PublicName(owner.module, f"{owner.name}.{name}", value)


def inventory(path: Path) -> set[str]:
    """Return the Python names in a Sphinx inventory: four lines of text, then compressed ones."""
    with path.open("rb") as file:
        for _ in range(4):
            file.readline()
        lines = zlib.decompress(file.read()).decode().splitlines()
    return {line.split(" ", 2)[0] for line in lines if line.split(" ", 2)[1].startswith("py:")}


def missing(shown: set[str]) -> list[str]:
    """Return the public names that `shown` has under no path of the same thing.

    A package's names may be shown where its modules define them.
    """
    paths: dict[tuple[int, str], list[str]] = {}
    for one in names():
        own = [path for path in shown if path.startswith(f"{one.module}.")]
        same = [path for path in own if path.endswith(f".{one.name}")] if one.name else own
        paths.setdefault((id(one.value), one.name), [one.path]).extend((one.path, *same))
    return [same[0] for same in paths.values() if not shown.intersection(same)]


def main() -> None:
    """Stop with the names that the built pages lack."""
    if len(sys.argv) != 2:
        sys.exit(f"api_names: needs the path of an objects.inv, got {sys.argv[1:]}")
    absent = missing(inventory(Path(sys.argv[1])))
    if absent:
        sys.exit(f"api_names: the API pages lack {', '.join(absent)}")
    print(f"api_names: the API pages have all {sum(1 for _ in names())} public names")


if __name__ == "__main__":
    main()

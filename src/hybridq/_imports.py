"""A module of hybridq that is imported as soon as another library has been, in either order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import local
from types import ModuleType
from typing import Any

from .errors import warn_once

__all__ = ["after_import"]


def after_import(library: str, name: str) -> None:
    """Import a module of hybridq once a library has been imported: now, or in the end of that.

    A library that is never imported costs nothing, and neither is the module imported then.

    Args:
        library: name of a package of others.
        name: the module, which sees to the library's classes. Where it raises ImportError, as of a
            version of the library that is not known to work, a warning says so.
    """
    found = sys.modules.get(library)
    if found is None:
        sys.meta_path.insert(0, _Finder(library, lambda: _enter(library, name)))
    elif not getattr(found.__spec__, "_initializing", False):
        _enter(library, name)


def _enter(library: str, name: str) -> None:
    try:
        import_module(name)
    except ImportError as error:
        warn_once(f"import {library}", f"{name}: modules of {library} stay its own: {error}")


class _Finder(MetaPathFinder):
    """Finds one library by what stands behind it in `sys.meta_path`, with a loader that tells.

    Args:
        library: its name.
        then: called when it has been imported.
    """

    def __init__(self, library: str, then: Callable[[], None]) -> None:
        self._library, self._then, self._inside = library, then, local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the library's spec, of others None."""
        if fullname != self._library or getattr(self._inside, "asked", False):
            return None
        self._inside.asked = True
        try:
            spec = find_spec(fullname)
        finally:
            self._inside.asked = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._done)
        return spec

    def _done(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


class _Loader(Loader):
    """A loader that tells when its module has been made; what is asked of it otherwise is the own.

    Args:
        own: the loader of the library.
        then: called afterwards.
    """

    def __init__(self, own: Any, then: Callable[[], None]) -> None:
        self._own, self._then = own, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return what the own loader makes."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module under its own loader's name."""
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

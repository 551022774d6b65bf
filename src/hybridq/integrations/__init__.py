"""Doors for other libraries: one module each, imported by its user, so that hybridq needs none.

`hybridq.integrations.transformers` and its neighbours ask `require` first; nothing else in hybridq
imports these libraries.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final

__all__ = ["NEEDED", "require"]

#: Versions that a library may have; the extra that installs it has its name.
NEEDED: Final = {
    "transformers": ">=5.23,<6",
    "accelerate": ">=1.15,<2",
    "peft": ">=0.21,<1",
    "lm_eval": ">=0.4.13,<0.5",
}


def require(library: str) -> None:
    """Raise where a library is not installed, or has a version that is not known to work.

    Args:
        library: its name, of `NEEDED`.

    Raises:
        ImportError: with the version that was found, those that are needed, and what installs one.
    """
    needed = NEEDED[library]
    fix = f"pip install 'hybridq[{library}]'"
    door = f"hybridq.integrations.{library}"
    try:
        found = version(library)
    except PackageNotFoundError:
        raise ImportError(f"{door}: needs {library} {needed}, which is missing: {fix}") from None
    specifiers = import_module("packaging.specifiers")  # each of these libraries depends on it
    if not specifiers.SpecifierSet(needed).contains(found, prereleases=True):
        raise ImportError(f"{door}: needs {library} {needed}, got version {found}: {fix}")

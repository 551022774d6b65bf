"""Kinds of modules: which slots a recipe is asked for, and which planes of them are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ..direction import DIRECTIONS, Direction
from ..errors import must_be_one_of
from ..gemm import CONTRACT, Gemm
from .roles import LINEAR, SLOTS

__all__ = ["ModuleType", "module_type", "register_module_type"]


@dataclass(frozen=True)
class ModuleType:
    """A kind of modules, as roles name it.

    Args:
        name: `role.module_type` of its slots.
        gemms: that its modules run, each between a plane of two slots; a linear layer's are three.
        reads: planes that its modules read otherwise: slot and direction. An embedding, which runs
            no GEMM, reads the rowwise plane of its weight.

    Raises:
        TypeError: a GEMM is none.
        ValueError: it reads a slot or a direction that there is not.

    Example:
        >>> from hybridq.recipes import ModuleType
        >>> ModuleType("lookup", gemms=(), reads=(("weight", "rowwise"),)).slots
        ('weight',)
    """

    name: str
    gemms: tuple[Gemm, ...] = CONTRACT
    reads: tuple[tuple[str, Direction], ...] = ()

    def __post_init__(self) -> None:
        others = [one for one in self.gemms if not isinstance(one, Gemm)]
        if others:
            raise TypeError(
                f"ModuleType: gemms of {self.name!r} must be hybridq.gemm.Gemm, such as those of "
                f"CONTRACT there, got {others[0]!r}"
            )
        wrong = [of for _, _, of in self.needs if of not in DIRECTIONS]
        if wrong:
            raise ValueError(
                f"ModuleType: a direction of {self.name!r} {must_be_one_of(DIRECTIONS, wrong[0])}"
            )
        unknown = [slot for _, slot, _ in self.needs if slot not in SLOTS]
        if unknown:
            raise ValueError(
                f"ModuleType: a slot of {self.name!r} {must_be_one_of(SLOTS, unknown[0])}"
            )

    @cached_property
    def needs(self) -> tuple[tuple[str, str, Direction], ...]:
        """The planes that are read: by what, of which slot, in which direction."""
        found = []
        for gemm in self.gemms:
            pair = f"{gemm.name} ({gemm.a}.{gemm.a_direction} @ {gemm.b}.{gemm.b_direction}.T)"
            found.append((pair, gemm.a, gemm.a_direction))
            found.append((pair, gemm.b, gemm.b_direction))
        return (*found, *((f"a read of {slot}.{of}", slot, of) for slot, of in self.reads))

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The slots that a recipe is asked for, in the order in which it is."""
        return tuple(slot for slot in SLOTS if any(slot == one for _, one, _ in self.needs))


_types: Final[dict[str, ModuleType]] = {}


def register_module_type(kind: ModuleType) -> ModuleType:
    """Let modules that name `kind` as theirs bind recipes by its table; return it.

    Args:
        kind: of modules.

    Raises:
        ValueError: another kind has its name.
    """
    known = _types.setdefault(kind.name, kind)
    if known != kind:
        raise ValueError(
            f"register_module_type: {kind.name!r} must be registered once, got another one with "
            f"the GEMMs {[gemm.name for gemm in kind.gemms]} and the reads {list(kind.reads)}"
        )
    return kind


def module_type(name: str) -> ModuleType:
    """Return the kind of modules of a name; one that nobody registered has a linear layer's GEMMs.

    Args:
        name: as roles have it.
    """
    return _types.get(name) or ModuleType(name)


register_module_type(ModuleType(LINEAR))

"""Mutation check: rules of the numerics page broken one at a time, each to be caught by a test.

`make mutants`. A mutant is one small textual edit of a copy of the tree, made to break exactly one
rule; a rule that lives in the Python reference and in the C++ core has a mutant in both. A mutant
that no test notices (a survivor) means that a test is missing.
"""

from .core import CORE
from .core_maps import CORE_MAPS
from .core_more import CORE_MORE
from .experts import EXPERTS
from .modules import MODULES
from .over_ranks import OVER_RANKS
from .products import PRODUCTS
from .record import Mutant
from .reference import REFERENCE

__all__ = ["ALL", "Mutant"]

#: The core's come last: they need a build each, the others share the first one.
ALL: tuple[Mutant, ...] = (
    *REFERENCE,
    *PRODUCTS,
    *MODULES,
    *OVER_RANKS,
    *EXPERTS,
    *CORE,
    *CORE_MAPS,
    *CORE_MORE,
)

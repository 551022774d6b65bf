"""How ranks see that they run the same: before the first gather, and in each one."""

from __future__ import annotations

from .fingerprint import (
    DIGEST_NBYTES,
    Fingerprint,
    check_ranks,
    compare,
    flat_group,
    gathered_values,
    pipeline_fingerprint,
)
from .fsdp2_groups import prepared_groups
from .recipe_agreement import (
    ExpectedRecipe,
    Note,
    Prepared,
    check_trailers,
    expected_recipe,
    expected_stack_recipe,
    read_arrived,
    trailer,
)

__all__ = [
    "DIGEST_NBYTES",
    "ExpectedRecipe",
    "Fingerprint",
    "Note",
    "Prepared",
    "check_ranks",
    "check_trailers",
    "compare",
    "expected_recipe",
    "expected_stack_recipe",
    "flat_group",
    "gathered_values",
    "pipeline_fingerprint",
    "prepared_groups",
    "read_arrived",
    "trailer",
]

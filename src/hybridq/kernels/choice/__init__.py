"""What a backend is asked, and which one answers: calls, arguments, precision, the registry."""

from __future__ import annotations

from .arguments import (
    BlockSide,
    GemmArgs,
    GroupedArgs,
    GroupedOperand,
    Groups,
    Operand,
)
from .backend import OPERATIONS, Backend, BackendAnswer, DeviceSupport
from .encode_request import DECODED, ORIGINAL, EncodeRequest, encode_decoded, given_scale
from .group_encoder import GroupEncoder
from .operand_specs import operand_specs
from .placed import ALIGNMENT, Place, PlacedEncoder
from .precision import FOLD_LIMIT, PRECISIONS, added_error, check_precision
from .prologue import Prologue
from .query import OpQuery
from .registry import (
    Decision,
    backends,
    cached_choice,
    choose,
    fallbacks,
    forget_choices,
    is_unforced_native,
    load_backends,
    operation,
    register_backend,
    select,
    together,
    unforced,
    unregister_backend,
)

__all__ = [
    "ALIGNMENT",
    "DECODED",
    "FOLD_LIMIT",
    "OPERATIONS",
    "ORIGINAL",
    "PRECISIONS",
    "Backend",
    "BackendAnswer",
    "BlockSide",
    "Decision",
    "DeviceSupport",
    "EncodeRequest",
    "GemmArgs",
    "GroupEncoder",
    "GroupedArgs",
    "GroupedOperand",
    "Groups",
    "OpQuery",
    "Operand",
    "Place",
    "PlacedEncoder",
    "Prologue",
    "added_error",
    "backends",
    "cached_choice",
    "check_precision",
    "choose",
    "encode_decoded",
    "fallbacks",
    "forget_choices",
    "given_scale",
    "is_unforced_native",
    "load_backends",
    "operand_specs",
    "operation",
    "register_backend",
    "select",
    "together",
    "unforced",
    "unregister_backend",
]

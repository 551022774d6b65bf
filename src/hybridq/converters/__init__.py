"""Conversion of models: a table of converters, which modules they turn, which not, and why."""

from __future__ import annotations

from .conversion import Conversion, conversion, kind_of, report_of
from .convert import convert, default_filter
from .converter import Converter
from .exclusions import LEAST_WIDTH, adapted, keeps_precision, reason_by_name
from .experts import register_experts
from .not_converted import (
    LEFT_ALONE,
    NO_PRODUCT,
    UNKNOWN,
    NotConverted,
    of_unknown_class,
    originals,
)
from .rules import warn_of_unfollowed
from .table import (
    converter_of,
    converters,
    converters_with,
    library_module,
    register_converter,
)
from .values import check_made, lazy_parameters

__all__ = [
    "LEAST_WIDTH",
    "LEFT_ALONE",
    "NO_PRODUCT",
    "UNKNOWN",
    "Conversion",
    "Converter",
    "NotConverted",
    "adapted",
    "check_made",
    "conversion",
    "convert",
    "converter_of",
    "converters",
    "converters_with",
    "default_filter",
    "keeps_precision",
    "kind_of",
    "lazy_parameters",
    "library_module",
    "of_unknown_class",
    "originals",
    "reason_by_name",
    "register_converter",
    "register_experts",
    "report_of",
    "warn_of_unfollowed",
]

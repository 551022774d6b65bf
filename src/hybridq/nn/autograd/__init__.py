"""Autograd functions: the GEMMs of linear modules, dense and grouped, and what surrounds them."""

from __future__ import annotations

from .checkpoint import checkpoint
from .cuts import NO_CUTS, Cuts
from .gates import GATES, Gate, gate_of
from .group_sums import gather_tokens, scatter_tokens, share, sum_over
from .grouped_function import GroupedCall, Layout, draw_seeds, grouped_linear
from .linear_function import eager_linear, linear
from .offload import get_cpu_offload_context, offload
from .partial_sums import add_once
from .plain_gemm import plain_attention, plain_linear
from .prepared_linear import PreparedLinear
from .product_watch import (
    GradientWatcher,
    ProductWatcher,
    WatchedProduct,
    WatchedTensor,
    needs_of,
    tell,
    unwatched,
    watch_products,
    watcher,
)
from .prologue import Activation, Norm, Prologue, PrologueCall, apply
from .quantized_attention import AttentionQuantizers, quantized_attention
from .quantized_output import Boundary, with_quantized_gradient
from .saved_planes import saving_planes
from .slot_encoder import STREAMS
from .token_routes import GradientPlane, MadePlane, TokenRows, take_rows

__all__ = [
    "GATES",
    "NO_CUTS",
    "STREAMS",
    "Activation",
    "AttentionQuantizers",
    "Boundary",
    "Cuts",
    "Gate",
    "GradientPlane",
    "GradientWatcher",
    "GroupedCall",
    "Layout",
    "MadePlane",
    "Norm",
    "PreparedLinear",
    "ProductWatcher",
    "Prologue",
    "PrologueCall",
    "TokenRows",
    "WatchedProduct",
    "WatchedTensor",
    "add_once",
    "apply",
    "checkpoint",
    "draw_seeds",
    "eager_linear",
    "gate_of",
    "gather_tokens",
    "get_cpu_offload_context",
    "grouped_linear",
    "linear",
    "needs_of",
    "offload",
    "plain_attention",
    "plain_linear",
    "quantized_attention",
    "saving_planes",
    "scatter_tokens",
    "share",
    "sum_over",
    "take_rows",
    "tell",
    "unwatched",
    "watch_products",
    "watcher",
    "with_quantized_gradient",
]

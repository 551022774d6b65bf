"""Calibration: what a model's products multiply, measured on batches of data.

`hybridq.calibrate` makes a `Calibration`; `products` and `watch` are the pass beneath it, for
observers of the caller's own. See docs/guides/calibration.md.
"""

from __future__ import annotations

from .batches import run
from .caches import attentions, watch_caches
from .calibrate import calibrate
from .calibration import Calibration
from .channel_scales import ChosenScales, awq_scales, smooth_scales
from .clip_pass import ClippedWeight, ClippingReport, clip_weights
from .clipping import MSE
from .comparison import AmaxDiff, SlotDiff, amax_diff
from .file import is_calibration
from .folds import Fold, folds_of, register_folds
from .gptq_matrix import Hessian, gptq_plane
from .gptq_pass import GPTQReport, RoundedWeight, gptq
from .observers import Max, Observer, Running
from .percentile import Percentile
from .products import Product, products, projection_of
from .scaling_pass import ScaledInput, ScalingReport, awq, smooth
from .stored import StoredKind
from .summary import CalibrationSummary
from .watching import MatrixObserver, watch
from .weight_clips import BlockHessian, ClippedMatrix, clip_matrix

__all__ = [
    "MSE",
    "AmaxDiff",
    "BlockHessian",
    "Calibration",
    "CalibrationSummary",
    "ChosenScales",
    "ClippedMatrix",
    "ClippedWeight",
    "ClippingReport",
    "Fold",
    "GPTQReport",
    "Hessian",
    "MatrixObserver",
    "Max",
    "Observer",
    "Percentile",
    "Product",
    "RoundedWeight",
    "Running",
    "ScaledInput",
    "ScalingReport",
    "SlotDiff",
    "StoredKind",
    "amax_diff",
    "attentions",
    "awq",
    "awq_scales",
    "calibrate",
    "clip_matrix",
    "clip_weights",
    "folds_of",
    "gptq",
    "gptq_plane",
    "is_calibration",
    "products",
    "projection_of",
    "register_folds",
    "run",
    "smooth",
    "smooth_scales",
    "watch",
    "watch_caches",
]

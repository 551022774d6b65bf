"""The operators (`torch.ops.hybridq.*`): schemas, checks, fakes, derivatives, and their plans."""

from __future__ import annotations

from . import encode_many, encode_ragged, group_statistics, grouped_gemm, token_rows
from .contiguous import contiguous_copy
from .dense import GemmPlan, check_buffers, gemm_plan, run_checked_gemm, run_gemm, sum_of_rows
from .derivatives import StatedFunction
from .encode_matrix import encode, encode_recording, record_amax
from .encode_plan import (
    decode_recorder,
    encode_plan,
    given_statistic,
    group_encoder,
    placed_encoders,
    run_encode,
    transpose_recorder,
    update_amax,
)
from .exchange import exchanges_bytes
from .gpu_gemm_plan import GpuGemmPlan, gpu_gemm_plan
from .gpu_grouped_plan import GpuGroupedPlan, gpu_grouped_plan, tokens_as_planned
from .grouped_gemm import run_grouped_gemm
from .norm_activation_backward import activation_backward, norm_backward
from .norm_activation_encode import activation_encode, norm_encode
from .norm_activation_steps import activation_prologue, norm_prologue
from .skinny_gemm import skinny_gemm

__all__ = [
    "GemmPlan",
    "GpuGemmPlan",
    "GpuGroupedPlan",
    "StatedFunction",
    "activation_backward",
    "activation_encode",
    "activation_prologue",
    "check_buffers",
    "contiguous_copy",
    "decode_recorder",
    "encode",
    "encode_many",
    "encode_plan",
    "encode_ragged",
    "encode_recording",
    "exchanges_bytes",
    "gemm_plan",
    "given_statistic",
    "gpu_gemm_plan",
    "gpu_grouped_plan",
    "group_encoder",
    "group_statistics",
    "grouped_gemm",
    "norm_backward",
    "norm_encode",
    "norm_prologue",
    "placed_encoders",
    "record_amax",
    "run_checked_gemm",
    "run_encode",
    "run_gemm",
    "run_grouped_gemm",
    "skinny_gemm",
    "sum_of_rows",
    "token_rows",
    "tokens_as_planned",
    "transpose_recorder",
    "update_amax",
]

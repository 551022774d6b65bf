# ruff: noqa: E501
"""The operators' schemas, letter by letter: compiled graphs and other people's code hold them."""

from __future__ import annotations

import torch

import hybridq  # noqa: F401 (defines them)

SCHEMAS = """
activation(Tensor x, str kind) -> Tensor
activation_backward(Tensor dy, Tensor x, str kind) -> Tensor
activation_encode(Tensor x, str kind, str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, Tensor? seed=None, *, str col_source="original", bool keep_row=True, int row_stream=0, int col_stream=1) -> Tensor[]
activation_encode_ragged(Tensor x, Tensor offsets, str kind, str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, Tensor? seed=None, *, str col_source="original", bool keep_row=True, int row_stream=0, int col_stream=1, bool by_group=False) -> Tensor[]
all_to_all_bytes(Tensor payload, SymInt[] nbytes, int rank, str group) -> Tensor
amax(Tensor x, str spec, str direction) -> Tensor
amax_ragged(Tensor x, Tensor offsets, str spec, str direction, Tensor? row_index=None) -> Tensor
bias_grad(Tensor dy) -> Tensor
bias_grad_ragged(Tensor dy, Tensor offsets) -> Tensor
decode(Tensor[] buffers, str spec, SymInt rows, SymInt cols, ScalarType dtype) -> Tensor
encode(Tensor x, str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, Tensor? seed=None, *, str col_source="original", bool keep_row=True, SymInt row0=0, SymInt col0=0, int row_stream=0, int col_stream=1) -> Tensor[]
encode_many(Tensor[] xs, str row, str col, Tensor? row_stats=None, Tensor? col_stats=None, Tensor? seeds=None, *, str col_source="original", bool keep_row=True, int row_stream=0, int col_stream=1) -> Tensor[]
encode_ragged(Tensor x, Tensor offsets, str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, Tensor? seed=None, Tensor? row_index=None, *, str col_source="original", bool keep_row=True, int row_stream=0, int col_stream=1, bool by_group=False) -> Tensor[]
encode_with_amax(Tensor x, str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, Tensor? seed=None, *, str col_source="original", bool keep_row=True, int row_stream=0, int col_stream=1) -> Tensor[]
gemm(Tensor[] a, str a_spec, SymInt a_rows, Tensor[] b, str b_spec, SymInt b_rows, SymInt k, Tensor? bias=None, *, ScalarType out_dtype, str precision="auto") -> Tensor
gemm_(Tensor(out!) out, Tensor[] a, str a_spec, SymInt a_rows, Tensor[] b, str b_spec, SymInt b_rows, SymInt k, Tensor? bias=None, *, bool accumulate=False, str precision="auto") -> ()
grouped_gemm(Tensor[] a, str a_spec, SymInt[2] a_shape, Tensor[] b, str b_spec, SymInt[2] b_shape, Tensor offsets, SymInt tokens, Tensor? bias=None, *, bool is_stack, bool a_padded=False, bool b_padded=False, ScalarType out_dtype, str precision="auto") -> Tensor
grouped_gemm_(Tensor(out!) out, Tensor[] a, str a_spec, SymInt[2] a_shape, Tensor[] b, str b_spec, SymInt[2] b_shape, Tensor offsets, SymInt tokens, Tensor? bias=None, *, bool is_stack, bool a_padded=False, bool b_padded=False, bool accumulate=False, str precision="auto") -> ()
largest_ragged(Tensor x, Tensor offsets, Tensor? row_index=None) -> Tensor
norm(Tensor x, Tensor gamma, Tensor? beta, float eps, str kind, bool zero_centered=False) -> (Tensor, Tensor, Tensor)
norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor mean, Tensor rstd, str kind, bool zero_centered, bool needs_x, bool needs_gamma, bool needs_beta) -> Tensor[]
norm_encode(Tensor x, Tensor gamma, Tensor? beta, float eps, str kind, bool zero_centered, str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, Tensor? seed=None, *, str col_source="original", bool keep_row=True, int row_stream=0, int col_stream=1) -> Tensor[]
record_amax(Tensor(a!) amaxes, int at, Tensor found) -> ()
round_stochastic(Tensor x, Tensor seed, ScalarType dtype, int stream=0, SymInt row0=0, SymInt col0=0) -> Tensor
spread_rows(Tensor grad, Tensor? rows, Tensor weights, Tensor order, ScalarType dtype) -> (Tensor, Tensor)
sum_rows(Tensor rows, Tensor? weights, Tensor inverse, ScalarType dtype) -> Tensor
transpose(Tensor data, SymInt rows, SymInt cols, int bits) -> Tensor
"""


def test_schemas_are_these() -> None:
    found = (str(schema) for schema in torch._C._jit_get_all_schemas())
    own = sorted(text for text in found if text.startswith("hybridq::"))
    assert own == [f"hybridq::{line}" for line in SCHEMAS.strip().splitlines()]

"""The tests' own NumPy model as an adapter: a second implementation that shares no code.

`python -m hybridq conformance --adapter oracle_adapter:ADAPTER`, run in this folder.
"""

from __future__ import annotations

import numpy as np

import oracle
from hybridq.conformance import Case, to_spec
from oracle.bridge import oracle_spec


class OracleAdapter:
    name = "oracle"

    def supports(self, case: Case) -> str | None:
        return "has no products" if case.kind == "gemm" else None

    def encode(self, x, case: Case):
        if case.kind == "cast":
            return {"data": oracle.cast_nearest(x, oracle.ELEMENTS[case.spec["element"]])}
        if case.source is not None:
            source = oracle_spec(to_spec(case.source))
            row = oracle.encode(x, source, dtype=case.dtype)
            x = oracle.round_to(oracle.decode(row, source, *x.shape), case.dtype)
        is_columnwise = case.direction == "columnwise"
        row0, k0 = case.offset[::-1] if is_columnwise else case.offset
        return oracle.encode(
            np.ascontiguousarray(x.T) if is_columnwise else x,
            oracle_spec(to_spec(case.spec)),
            dtype=case.dtype,
            seed=case.seed or 0,
            row0=row0,
            k0=k0,
            stream=case.stream,
            is_columnwise=is_columnwise,
        )

    def decode(self, buffers, case: Case):
        if case.kind == "uncast":
            return oracle.decode_codes(buffers["data"], oracle.ELEMENTS[case.spec["element"]])
        return oracle.decode(dict(buffers), oracle_spec(to_spec(case.spec)), *case.matrix)


ADAPTER = OracleAdapter()

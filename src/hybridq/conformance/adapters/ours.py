"""hybridq itself, through its public operations: every backend, or the one that it chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ... import settings
from ...errors import SpecError
from ...formats import Format, PlaneSpec, element
from ...kernels import OpQuery, choose
from ...reference import unpack
from ..case import Array, Buffers, Case, to_spec

__all__ = ["HybridQAdapter"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _cast_spec(name: str) -> PlaneSpec:
    """Return a spec whose scale is 1 where the amax given from outside is the element's maximum."""
    return PlaneSpec(Format(element(name), None, element("fp32"), "amax", "cast"))


def _from_numpy(array: Array, dtype: str = "float32") -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(_DTYPES[dtype])


def _tensors(buffers: Buffers, spec: PlaneSpec) -> list[torch.Tensor]:
    names = [buffer.name for buffer in spec.buffers(1, 1)]
    return [torch.from_numpy(np.ascontiguousarray(buffers[name])) for name in names]


class HybridQAdapter:
    """hybridq itself as an adapter; its methods are those of `Adapter`.

    Args:
        backend: the backend to force; None lets hybridq choose.
    """

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self.name = "hybridq" if backend is None else f"hybridq-{backend}"

    def supports(self, case: Case) -> str | None:
        """Return None if the backend can run the case's operation, else its reason."""
        try:
            queries = self._queries(case)
        except SpecError as error:
            return str(error)
        with settings.backend(self.backend):
            errors = [choose(query).error for query in queries]
        return next((error for error in errors if error), None)

    def _queries(self, case: Case) -> list[OpQuery]:
        dtype = _DTYPES[case.dtype]
        if case.kind in ("cast", "uncast"):
            op = "encode" if case.kind == "cast" else "decode"
            return [OpQuery(op, "cpu", torch.float32, _cast_spec(case.spec["element"]))]
        spec = to_spec(case.spec)
        if case.kind == "gemm":
            if case.other is None:
                raise SpecError(f"supports: {case.id} has no second operand")
            return [OpQuery("gemm", "cpu", torch.float32, spec, to_spec(case.other[0]))]
        if case.kind == "decode":
            return [OpQuery("decode", "cpu", torch.float32, spec)]
        if case.kind != "encode":
            raise SpecError(f"supports: cases of kind {case.kind!r} are unknown")
        queries = [OpQuery("encode", "cpu", dtype, spec)]
        if case.source is not None:
            source = to_spec(case.source)
            queries += [OpQuery(op, "cpu", dtype, source) for op in ("encode", "decode")]
        return queries

    def encode(self, x: Array, case: Case) -> Buffers:
        """Return the plane's buffers, or an element's codes."""
        if case.kind == "cast":
            return {"data": self._cast(x, case.spec["element"])}
        spec = to_spec(case.spec)
        own = "row" if case.direction == "rowwise" else "col"
        specs = {"row": "", "col": "", own: spec.text}
        options: dict[str, Any] = {f"{own}_stream": case.stream}
        if case.source is not None:
            specs["row"] = to_spec(case.source).text
            options |= {"col_source": "rowwise_dequantized", "keep_row": False}
        seed = (
            None
            if case.seed is None
            else torch.tensor([case.seed], dtype=torch.int64, device="cpu")
        )
        with settings.backend(self.backend):
            made = torch.ops.hybridq.encode(
                _from_numpy(x, case.dtype),
                specs["row"],
                specs["col"],
                seed=seed,
                row0=case.offset[0],
                col0=case.offset[1],
                **options,
            )
        names = [buffer.name for buffer in spec.buffers(1, 1)]
        return {name: buffer.numpy() for name, buffer in zip(names, made, strict=True)}

    def _cast(self, x: Array, name: str) -> Array:
        spec = _cast_spec(name)
        amax = torch.tensor([element(name).max], dtype=torch.float32, device="cpu")
        with settings.backend(self.backend):
            made = torch.ops.hybridq.encode(_from_numpy(x)[None], spec.text, "", row_stat=amax)
        return unpack(made[0], element(name), x.size)[0].numpy()

    def decode(self, buffers: Buffers, case: Case) -> Array:
        """Return the plane's values in float32, or those of an element's codes."""
        with settings.backend(self.backend):
            if case.kind == "uncast":
                return self._uncast(buffers["data"], case.spec["element"])
            spec = to_spec(case.spec)
            tensors = _tensors(buffers, spec)
            return torch.ops.hybridq.decode(tensors, spec.text, *case.matrix, torch.float32).numpy()

    def _uncast(self, codes: Array, name: str) -> Array:
        data = torch.from_numpy(np.ascontiguousarray(codes))[None]
        if element(name).codes_per_byte == 2:
            data = data[:, 0::2] | (data[:, 1::2] << 4)
        buffers = [data.contiguous(), torch.ones(1, dtype=torch.float32, device="cpu")]
        text = _cast_spec(name).text
        return torch.ops.hybridq.decode(buffers, text, 1, codes.size, torch.float32)[0].numpy()

    def gemm(self, a: Buffers, b: Buffers, case: Case) -> Array:
        """Return the float32 product of two planes.

        Raises:
            SpecError: the case has no second operand.
        """
        if case.other is None:
            raise SpecError(f"gemm: {case.id} has no second operand")
        specs = (to_spec(case.spec), to_spec(case.other[0]))
        with settings.backend(self.backend):
            return torch.ops.hybridq.gemm(
                _tensors(a, specs[0]),
                specs[0].text,
                case.shape[0],
                _tensors(b, specs[1]),
                specs[1].text,
                case.other[1][0],
                case.shape[1],
                out_dtype=torch.float32,
            ).numpy()

"""Rules of `torch.ops.hybridq.*`: wrong sizes, dtypes, specs; a pointer is never read too far."""

from __future__ import annotations

from typing import Any, Final

import torch
from hypothesis import strategies as st

import hybridq
from hybridq.formats import PlaneSpec

from .invariants import equal
from .policy import Wrong, attempt
from .pool import Pool, fuzz, indices
from .quantizers import Made, sound_makers
from .texts import spec_texts
from .values import HIGH, JUNK, SIZES, Values, junk, plain

__all__ = ["OperatorRules"]

_OPS: Final = torch.ops.hybridq


def _mostly(value: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Mostly `value`, else one of `others`."""
    return st.integers(0, 2 * len(others)).map(lambda n: others[n] if n < len(others) else value)


_PLACES: Final = st.one_of(st.integers(0, 200), st.integers(0, 2**40), st.sampled_from((0, 2**56)))
_EDGES: Final = st.one_of(
    st.sampled_from((0, 1, -1, 2**31, 2**32, 2**56, 2**62, -(2**63), 2**63 - 1)),
    st.integers(0, 200),
)


@st.composite
def _texts(draw: Any) -> str:
    """The text of a plane, mostly of one that there is."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.one_of(spec_texts(), st.just("")))
    quantizer = draw(sound_makers()).build()
    return (quantizer.rowwise or quantizer.columnwise).text


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.empty(shape, dtype=dtype)
    count = made.numel() * made.element_size()
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else made


#: What is done to one buffer of a plane.
DAMAGE: Final = {
    "none": lambda b: b,
    "strided": lambda b: torch.stack([b, b], -1)[..., 0],
    "transposed": lambda b: b.t().contiguous().t() if b.dim() == 2 else b,
    "short": lambda b: b[:-1],
    "long": lambda b: torch.cat([b, b[:1]]),
    "narrow": lambda b: b[..., :-1],
    "empty": lambda b: b[:0],
    "flat": lambda b: b.reshape(-1),
    "deep": lambda b: b[None],
    "dtype": lambda b: b.view(torch.int8) if b.dtype == torch.uint8 else b.double(),
    "expanded": lambda b: b[:1].expand(b.shape) if b.dim() and b.shape[0] else b,
    "meta": lambda b: b.to("meta"),
    "sparse": lambda b: b.to_sparse(),
    "offset": lambda b: torch.cat([b.reshape(-1)[:1], b.reshape(-1)])[1:].view(b.shape),
    "zero": lambda b: torch._efficientzerotensor(b.shape, dtype=b.dtype),
    "large": lambda b: torch.empty_strided((b.shape), (0,) * b.dim(), dtype=b.dtype).zero_(),
}


class OperatorRules(Pool):
    """encode, decode, amax, transpose, gemm, gemm_, bias_grad, round_stochastic."""

    def _on_both(self, call: Any, name: str) -> Any:
        """Run on the chosen backend and the reference; both give the same, or both refuse."""
        mine, error = attempt(call, name)
        with hybridq.backend("reference"):
            theirs, other = attempt(call, f"{name} on the reference")
        if (error is None) != (other is None):
            raise Wrong(f"{name}: one backend {error!r}, the reference {other!r}")
        if error is not None:
            return None
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]
        for ours, reference in pairs:
            if not equal(ours, reference):
                raise Wrong(f"{name}: not the reference's bits\n{ours}\n{reference}")
        return mine

    def _plane(self, made: Made, rows: int, cols: int, seed: int) -> Any:
        quantizer, error = attempt(made.build, "quantizer")
        if error is not None:
            return None, []
        spec = (quantizer.rowwise or quantizer.columnwise).resolve(torch.float32)
        return spec, [
            _random(b.shape, b.dtype or torch.float32, seed + at)
            for at, b in enumerate(spec.buffers(rows, cols))
        ]

    @fuzz(
        made=sound_makers(),
        rows=st.sampled_from((0, *SIZES)),
        cols=st.sampled_from((0, *SIZES)),
        seed=st.integers(0, 99),
        dtype=st.sampled_from(HIGH),
    )
    def decode_bytes(self, made: Made, rows: int, cols: int, seed: int, dtype: Any) -> None:
        """Any bytes decode, on every backend to the same bits."""
        spec, buffers = self._plane(made, rows, cols, seed)
        if spec is not None:
            self._on_both(
                lambda: _OPS.decode(buffers, spec.text, rows, cols, dtype),
                f"decode {spec} {rows} x {cols}",
            )

    @fuzz(
        made=sound_makers(),
        sizes=st.tuples(st.sampled_from((0, *SIZES)), st.sampled_from((0, *SIZES))),
        claimed=st.one_of(st.none(), st.tuples(_EDGES, _EDGES)),
        damage=st.sampled_from(sorted(DAMAGE)),
        place=st.integers(0, 2),
        drop=st.sampled_from((0, 0, 0, 1, -1)),
        dtype=st.sampled_from((*HIGH, torch.int32)),
    )
    def decode_damaged(
        self, made: Made, sizes: Any, claimed: Any, damage: str, place: int, drop: int, dtype: Any
    ) -> None:
        """Buffers that are not those of the plane are refused, by decode and by gemm."""
        spec, buffers = self._plane(made, *sizes, 5)
        if spec is None:
            return
        place %= len(buffers)
        try:
            buffers[place] = DAMAGE[damage](buffers[place])
        except (RuntimeError, IndexError):
            return
        if drop:
            buffers = buffers[1:] if drop == 1 else [*buffers, buffers[0]]
        rows, cols = sizes if claimed is None else claimed
        where = f"decode {damage} {spec} {rows} x {cols}"
        attempt(lambda: _OPS.decode(buffers, spec.text, rows, cols, dtype), where)
        other = torch.ones(3, max(0, min(cols, 1000)))
        attempt(
            lambda: _OPS.gemm(
                buffers, spec.text, rows, [other], "fp32", 3, cols, None, out_dtype=dtype
            ),
            where,
        )
        out = torch.full((max(0, min(rows, 1000)), 3), 7.0)
        _, error = attempt(
            lambda: _OPS.gemm_(out, buffers, spec.text, rows, [other], "fp32", 3, cols, None), where
        )
        if error is not None and not bool((out == 7.0).all()):
            raise Wrong(f"gemm_: {where}: failed, but has written to out")

    @fuzz(
        values=st.one_of(plain(matrices=True), plain(matrices=True), plain()),
        texts=st.tuples(_texts(), _texts()),
        stats=st.tuples(_mostly(0, 1, 2, 3, 4, 5, 6), _mostly(0, 1, 2, 3, 4, 5, 6)),
        seed=_mostly(1, 0, 2, 3, 4, 5),
        source=_mostly("original", "rowwise_dequantized", "rowwise_dequantized", "x"),
        keep=st.booleans(),
        at=st.tuples(_PLACES, _PLACES),
        streams=st.tuples(_mostly(0, 7, -1, 2**32), _mostly(1, 2**32 - 1, 2**33)),
    )
    def encode(
        self,
        values: Values,
        texts: Any,
        stats: Any,
        seed: int,
        source: str,
        keep: bool,
        at: Any,
        streams: Any,
    ) -> None:
        """encode with whatever it may be given; a wrong one is refused by every backend."""
        x = values.build()

        def stat(which: int, rows: int) -> torch.Tensor | None:
            return {
                0: None,
                1: torch.tensor([2.0]),
                2: torch.rand(rows),
                3: torch.tensor([float("nan")]),
                4: torch.tensor([-1.0]),
                5: torch.ones(1, dtype=torch.float64),
                6: torch.tensor([float("inf")]),
            }[which]

        seeds = {
            0: None,
            1: torch.tensor([3]),
            2: torch.tensor([3.0]),
            3: torch.tensor([1, 2]),
            4: torch.tensor(-(2**63)),
            5: torch.empty(0, dtype=torch.int64),
        }
        shape = (*x.shape, 0, 0)[:2]
        options = {"col_source": source, "keep_row": keep, "row0": at[0], "col0": at[1]}
        options |= {"row_stream": streams[0], "col_stream": streams[1]}
        stat_pair = stat(stats[0], shape[0]), stat(stats[1], shape[1])
        run = attempt if 4 in stats else self._on_both  # no rule for an amax below zero
        run(
            lambda: _OPS.encode(x, *texts, *stat_pair, seeds[seed], **options),
            f"encode {values} {texts} {stats} {options}",
        )

    @fuzz(
        sizes=st.tuples(st.sampled_from((0, *SIZES)), st.sampled_from((0, *SIZES))),
        claimed=st.one_of(st.none(), st.none(), st.tuples(_EDGES, _EDGES)),
        bits=st.sampled_from((4, 8, 8, 16, 32, 0, 3, 64, -8)),
        dtype=st.sampled_from(
            (torch.uint8, torch.uint8, torch.int8, torch.float32, torch.bfloat16)
        ),
        damage=st.sampled_from(sorted(DAMAGE)),
    )
    def transpose(self, sizes: Any, claimed: Any, bits: int, dtype: Any, damage: str) -> None:
        """transpose of data that may be too short for what is claimed."""
        rows, cols = sizes
        data = _random((rows, -(-cols // 2) if bits == 4 else cols), dtype, 3)
        try:
            data = DAMAGE[damage](data)
        except (RuntimeError, IndexError):
            return
        rows, cols = claimed or sizes
        self._on_both(
            lambda: _OPS.transpose(data, rows, cols, bits),
            f"transpose {damage} {dtype} {rows} x {cols} of {tuple(data.shape)}, {bits} bits",
        )

    @fuzz(
        values=plain(matrices=True),
        text=_texts(),
        direction=_mostly("rowwise", "columnwise", "columnwise", ""),
    )
    def amax(self, values: Values, text: str, direction: str) -> None:
        """amax of anything."""
        x = values.build()
        self._on_both(lambda: _OPS.amax(x, text, direction), f"amax {values} {text!r}")

    @fuzz(
        values=plain(matrices=True),
        seed=st.integers(-(2**63), 2**63 - 1),
        dtype=st.sampled_from((*HIGH, torch.int8)),
        at=st.tuples(_mostly(0, 3, -1, 2**32), _PLACES, _PLACES),
    )
    def round_stochastic(self, values: Values, seed: int, dtype: Any, at: Any) -> None:
        """round_stochastic, from anywhere in a larger tensor."""
        x = values.build()
        self._on_both(
            lambda: _OPS.round_stochastic(x, torch.tensor([seed]), dtype, *at),
            f"round_stochastic {values} {dtype} {at}",
        )

    @fuzz(name=junk(), index=indices(), place=st.integers(0, 6))
    def operator_junk(self, name: str, index: int, place: int) -> None:
        """What is no tensor, where an operator wants one."""
        wrong, spec, x = JUNK[name](), PlaneSpec.parse("mxfp8").text, torch.ones(2, 32)
        t = self.take(index)
        calls = {
            0: lambda: _OPS.encode(wrong, spec, ""),
            1: lambda: _OPS.decode([wrong, wrong], spec, 2, 32, torch.float32),
            2: lambda: _OPS.amax(wrong, spec, "rowwise"),
            3: lambda: _OPS.transpose(wrong, 2, 32, 8),
            4: lambda: _OPS.gemm([wrong], "fp32", 2, [x], "fp32", 2, 32, out_dtype=torch.float32),
            5: lambda: _OPS.bias_grad(wrong),
            6: lambda: _OPS.encode(x if t is None else t, spec, wrong),
        }
        attempt(calls[place], f"operator_junk {name} {place}", (IndexError, NotImplementedError))

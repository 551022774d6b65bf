"""Rules that write in place: the whole tensor is quantized again, or nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from hypothesis import strategies as st

from hybridq import PlaneError, QuantizedTensor

from .invariants import check_backends, check_sound, same_planes, snapshot
from .policy import Wrong, attempt
from .pool import Pool, fuzz, indices
from .quantizers import Made, sound_makers
from .values import JUNK, Values, junk, plain, shapes

__all__ = ["WriteRules"]


def _set(t: Any, key: Any, value: Any) -> Any:
    t[key] = value
    return t


#: Views that writes go through.
VIEWS: Final[dict[str, Callable[[Any, int], Any]]] = {
    "rows": lambda t, n: t[: 16 * n],
    "half": lambda t, n: t.chunk(2)[0],
    "columns": lambda t, n: t[..., 32 * n :],
    "view": lambda t, n: t.view(-1),
    "column": lambda t, n: t[..., n],
    "step": lambda t, n: t[::2],
    "diagonal": lambda t, n: t.diagonal(),
    "expand": lambda t, n: t.expand(2, *t.shape),
    "reshape": lambda t, n: t.reshape(-1, t.shape[0]),
    "part of a part": lambda t, n: t[1:][..., n:],
}
#: t is written, x is a plain tensor, n a number.
WRITES: Final[dict[str, Callable[[Any, Any, int], Any]]] = {
    "add_": lambda t, x, n: t.add_(x),
    "add_ alpha": lambda t, x, n: t.add_(x, alpha=n),
    "add_ number": lambda t, x, n: t.add_(n),
    "sub_": lambda t, x, n: t.sub_(x),
    "mul_": lambda t, x, n: t.mul_(x),
    "mul_ self": lambda t, x, n: t.mul_(t),
    "div_": lambda t, x, n: t.div_(x),
    "copy_": lambda t, x, n: t.copy_(x),
    "copy_ int": lambda t, x, n: t.copy_(torch.full(x.shape, n)),
    "zero_": lambda t, x, n: t.zero_(),
    "fill_": lambda t, x, n: t.fill_(n),
    "fill_ tensor": lambda t, x, n: t.fill_(x),
    "clamp_": lambda t, x, n: t.clamp_(-1, n),
    "lerp_": lambda t, x, n: t.lerp_(x, 0.5),
    "addcmul_": lambda t, x, n: t.addcmul_(x, x, value=n),
    "neg_": lambda t, x, n: t.neg_(),
    "abs_": lambda t, x, n: t.abs_(),
    "exp_": lambda t, x, n: t.exp_(),
    "round_": lambda t, x, n: t.round_(),
    "nan_to_num_": lambda t, x, n: t.nan_to_num_(),
    "masked_fill_": lambda t, x, n: t.masked_fill_(x > 0, n),
    "index_fill_": lambda t, x, n: t.index_fill_(0, torch.tensor([n]), 1.0),
    "index_add_": lambda t, x, n: t.index_add_(0, torch.arange(x.shape[0]), x),
    "scatter_": lambda t, x, n: t.scatter_(0, torch.zeros(x.shape, dtype=torch.int64), x),
    "iadd": lambda t, x, n: t.__iadd__(x),
    "bitwise": lambda t, x, n: t.__iand__(1),
    "set row": lambda t, x, n: _set(t, n, 1.5),
    "set rows": lambda t, x, n: _set(t, slice(n), x[:n]),
    "set all": lambda t, x, n: _set(t, ..., x),
    "set column": lambda t, x, n: _set(t, (..., n), 2.0),
    "set columns": lambda t, x, n: _set(t, (..., slice(n, None)), 0.5),
    "set mask": lambda t, x, n: _set(t, x > 0, 1.0),
    "set index": lambda t, x, n: _set(t, torch.tensor([n]), x[:1]),
    "foreach": lambda t, x, n: torch._foreach_add_([t, torch.zeros(1)], [x, torch.ones(1)]),
    "foreach mul": lambda t, x, n: torch._foreach_mul_([t], n),
    "out": lambda t, x, n: torch.add(x, 1.0, out=t),
    "out mul": lambda t, x, n: torch.mul(t, 2.0, out=t),
    "resize_": lambda t, x, n: t.resize_(n, 3),
    "t_": lambda t, x, n: t.t_(),
    "transpose_": lambda t, x, n: t.transpose_(0, n),
    "unsqueeze_": lambda t, x, n: t.unsqueeze_(n),
    "squeeze_": lambda t, x, n: t.squeeze_(),
    "uniform_ empty": lambda t, x, n: t.uniform_(1, 1),
    "set_": lambda t, x, n: t.set_(x),
    "swap": lambda t, x, n: t.mT.add_(1.0),
    "rows": lambda t, x, n: VIEWS["rows"](t, n).mul_(2.0),
    "half": lambda t, x, n: VIEWS["half"](t, n).copy_(VIEWS["half"](x, n)),
    "view": lambda t, x, n: VIEWS["view"](t, n).add_(1.0),
    "columns": lambda t, x, n: VIEWS["columns"](t, n).zero_(),
    "column": lambda t, x, n: VIEWS["column"](t, n).fill_(n),
    "step": lambda t, x, n: VIEWS["step"](t, n).mul_(0.5),
    "diagonal": lambda t, x, n: VIEWS["diagonal"](t, n).neg_(),
    "expand": lambda t, x, n: VIEWS["expand"](t, n)[0].zero_(),
    "reshape": lambda t, x, n: VIEWS["reshape"](t, n).zero_(),
    "part of a part": lambda t, x, n: VIEWS["part of a part"](t, n).add_(1.0),
}
#: Their result is another shape of the very tensor, which a wrapper cannot become: a refusal is
#: as good as success.
_RESHAPING: Final = ("out", "resize_", "t_", "transpose_", "unsqueeze_", "squeeze_", "set_")
#: They write through a view, or a second name.
_INDIRECT: Final = ("swap", *VIEWS)


class WriteRules(Pool):
    """In-place operations, writes of parts, assignments, updates.

    A write through a view reaches the tensor, or is refused: then nothing has changed.
    """

    def _all_bytes(self) -> list[list[torch.Tensor]]:
        return [snapshot(t) for t in self.pool]

    def _unchanged(self, before: list[list[torch.Tensor]], where: str) -> None:
        for old, new in zip(before, self._all_bytes(), strict=True):
            if not all(torch.equal(a, b) for a, b in zip(old, new, strict=True)):
                raise Wrong(f"{where}: failed, but has changed a tensor")

    def _has_kin(self, t: Any) -> bool:
        """Whether another tensor has memory of this one, and memory that this one lacks."""
        mine = _memory(t)
        return any(_memory(one) & mine and _memory(one) - mine for one in self.pool)

    def _others_unchanged(self, t: Any, before: list[list[torch.Tensor]], where: str) -> None:
        mine = _memory(t)
        for one, old, new in zip(self.pool, before, self._all_bytes(), strict=True):
            if _memory(one) & mine or one is t:
                continue
            if not all(torch.equal(a, b) for a, b in zip(old, new, strict=True)):
                raise Wrong(f"{where}: has changed a tensor of other memory")

    @fuzz(
        index=indices(),
        name=st.sampled_from(sorted(WRITES)),
        values=plain(),
        fits=st.integers(0, 5),
        number=st.integers(-3, 5),
    )
    def write(self, index: int, name: str, values: Values, fits: int, number: int) -> None:
        """An operation that writes in place."""
        t = self.take(index)
        if t is None:
            return
        shape = tuple(t.shape)
        if fits:
            dtype = t.dtype if fits > 1 else values.dtype
            values = Values(shape, dtype, values.kind, values.layout, values.seed)
        x = values.build()
        where = f"{name} of {tuple(t.shape)}"
        operation, before = WRITES[name], self._all_bytes()
        expected, refusal = t.dequantize(), None
        try:
            operation(expected, x, number)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            refusal = error
        also = () if refusal is None else (type(refusal), IndexError)
        _, error = attempt(lambda: operation(t, x, number), where, also)
        if error is not None:
            if tuple(t.shape) != shape:
                raise Wrong(f"{where}: failed, but has changed the shape to {tuple(t.shape)}")
            self._unchanged(before, where)
            if isinstance(error, PlaneError) and "shares this memory" in str(error):
                if not self._has_kin(t):
                    raise Wrong(f"{where}: nobody shares its memory: {error!r}") from error
                return
            takes = refusal is None and t.own_quantizer is not None
            if takes and name not in (*_RESHAPING, *_INDIRECT):
                raise Wrong(f"{where}: a plain tensor takes it: {error!r}") from error
            return
        if refusal is not None:
            raise Wrong(f"{where}: a plain tensor raises {refusal!r}, this does not")
        self._others_unchanged(t, before, where)
        if name in _RESHAPING:
            check_sound(t, where)
            return
        for one in self.pool:
            check_sound(one, where)
        if name in VIEWS and x.dtype == t.dtype:
            self._view_is_quantized(t, expected, name, number, where)
        # A write of FP32 values is quantized from FP32, and a part's may be without the rest.
        if name not in _INDIRECT and not name.startswith("set ") and x.dtype == t.dtype:
            self._is_quantized(t, expected, where)

    def _is_quantized(self, t: Any, expected: torch.Tensor, where: str) -> None:
        quantizer = t.own_quantizer
        for plane in t.tensor_storage.planes:
            check_backends(plane, where)
        if t.part is not None or t.dim() == 1 or quantizer.is_stochastic:
            return
        self._holds(t, expected, quantizer, where)

    def _holds(self, t: Any, values: torch.Tensor, quantizer: Any, where: str) -> None:
        """Every plane of t is what quantizing `values` gives."""
        usages = t.get_usages()
        wanted = quantizer.with_usage(**usages).quantize(values.to(t.dtype))
        if wanted.get_usages() != usages:
            return
        pairs = zip(wanted.tensor_storage.planes, t.tensor_storage.planes, strict=True)
        if any(one.spec != other.spec for one, other in pairs):
            return  # an open identity plane has kept the dtype that it was made with
        if not same_planes(wanted, t):
            raise Wrong(f"{where}: not what quantizing the result gives\n{t}\n{values}")

    def _view_is_quantized(
        self, t: Any, expected: torch.Tensor, name: str, number: int, where: str
    ) -> None:
        """No plane of the tensor is stale after a write through a view that has its first plane."""
        view, quantizer = VIEWS[name](t, number), t.own_quantizer
        if not isinstance(view, QuantizedTensor):
            raise Wrong(f"{where}: a decoded part was written, and the tensor was not")
        if t.part is not None or t.dim() < 2:
            return
        if quantizer.is_stochastic or (view.rowwise is None) != (t.rowwise is None):
            return
        # A part that is apart is quantized alone, any other write quantizes the whole tensor.
        is_apart = name != "view" and view.part is None and view.shape != t.shape
        written = view if is_apart else t
        values = VIEWS[name](expected, number) if is_apart else expected
        self._holds(written, values, quantizer, where)

    @fuzz(into=indices(), source=indices(), how=st.integers(0, 4))
    def write_quantized(self, into: int, source: int, how: int) -> None:
        """A quantized tensor written into another."""
        t, s = self.take(into), self.take(source)
        if t is None:
            return
        before = self._all_bytes()
        calls = {
            0: lambda: t.copy_(s),
            1: lambda: t.quantize_(s),
            2: lambda: t.add_(s),
            3: lambda: torch._foreach_copy_([t], [s]),
            4: lambda: s.quantizer.update_quantized(s, t) if s.quantizer else None,
        }
        _, error = attempt(calls[how], f"write_quantized {how}")
        if error is not None:
            self._unchanged(before, f"write_quantized {how}")
        for one in self.pool:
            check_sound(one, "write_quantized")

    @fuzz(index=indices(), made=sound_makers(), values=plain(), fits=st.booleans())
    def update_with(self, index: int, made: Made, values: Values, fits: bool) -> None:
        """Another quantizer writes into a tensor, or leaves it alone."""
        t = self.take(index)
        quantizer, error = attempt(made.build, "quantizer")
        if t is None or error is not None:
            return
        shape = tuple(t.shape) if fits else values.shape
        x = Values(shape, values.dtype, values.kind, values.layout, values.seed).build()
        before = self._all_bytes()
        _, error = attempt(lambda: quantizer.update_quantized(x, t), "update_quantized")
        if error is not None:
            self._unchanged(before, f"update_quantized by {quantizer.text}")
        check_sound(t, "update_quantized")

    @fuzz(index=indices(), name=junk(), how=st.integers(0, 6))
    def write_junk(self, index: int, name: str, how: int) -> None:
        """What is no tensor of values is refused, and nothing has changed."""
        t = self.take(index)
        if t is None:
            return
        wrong, before = JUNK[name](), self._all_bytes()
        calls = {
            0: lambda: t.copy_(wrong),
            1: lambda: t.quantize_(wrong),
            2: lambda: t.add_(wrong),
            3: lambda: setattr(t, "data", wrong),
            4: lambda: t.__setitem__(0, wrong),
            5: lambda: t.quantizer and t.quantizer.update_quantized(wrong, t),
            6: lambda: t.quantizer and t.quantizer.update_quantized(torch.zeros(2, 32), wrong),
        }
        _, error = attempt(
            calls[how], f"write_junk {name}", (IndexError, TypeError, NotImplementedError)
        )
        if error is not None:
            self._unchanged(before, f"write_junk {name} {how}")
        check_sound(t, f"write_junk {name} {how}")

    @fuzz(index=indices(), values=plain(), other=indices(), fits=st.booleans(), own=st.booleans())
    def assign_data(self, index: int, values: Values, other: int, fits: bool, own: bool) -> None:
        """`t.data = ...` of quantized and plain tensors."""
        t = self.take(index)
        if t is None:
            return
        shape = tuple(t.shape) if fits else values.shape
        plain_one = Values(shape, values.dtype, values.kind, values.layout, values.seed).build()
        value = self.take(other) if own else plain_one
        before = self._all_bytes()
        _, error = attempt(lambda: setattr(t, "data", value), "data")
        if error is not None:
            self._unchanged(before, "data")
        check_sound(t, "data")
        if error is None and (t.shape != value.shape or not isinstance(t, QuantizedTensor)):
            raise Wrong(f"data: {t!r} after assigning {tuple(value.shape)}")

    @fuzz(index=indices(), shape=shapes(), dtype=st.sampled_from((None, torch.int64)))
    def like(self, index: int, shape: tuple[int, ...], dtype: Any) -> None:
        """Tensors made after the likeness of one."""
        t = self.take(index)
        if t is None:
            return
        for made in (
            t.new_empty(shape, dtype=dtype),
            t.new_zeros(shape, dtype=dtype),
            torch.empty_like(t, dtype=dtype),
            torch.zeros_like(t, dtype=dtype),
            t.new_full(shape, 2, dtype=dtype),
        ):
            if made.dtype != (dtype or t.dtype):
                raise Wrong(f"like: {made.dtype}")
            self.keep(made, "like")
        zeros = t.new_zeros(shape)
        plain_zeros = zeros.dequantize() if isinstance(zeros, QuantizedTensor) else zeros
        if not bool((plain_zeros == 0).all()):
            raise Wrong(f"new_zeros: {zeros!r} of {t!r} is not zeros")


def _memory(tensor: Any) -> set[int]:
    """Return the memories that a tensor's planes, and those of the whole it is part of, lie in."""
    storages = [tensor.tensor_storage]
    if tensor.part is not None:
        storages.append(tensor.part.storage)
    return {
        buffer.untyped_storage().data_ptr()
        for storage in storages
        for plane in storage.planes
        for buffer in plane.tensors
    } - {0}

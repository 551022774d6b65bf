"""Rules that make quantized tensors, and compare backends and CPU variants with each other."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize

import hybridq
from hybridq import QuantizedTensor, _core
from hybridq.quantizers import Quantizer

from .invariants import check_accuracy, check_backends, check_sound, equal, same_planes
from .policy import Wrong, attempt
from .pool import Pool, fuzz, indices
from .quantizers import Made, makers, sound_makers
from .values import HIGH, JUNK, Values, junk, plain

__all__ = ["QuantizeRules"]


def _stochastic_seed(quantizer: Quantizer, seed: int) -> torch.Tensor | None:
    return torch.tensor([seed]) if quantizer.is_stochastic else None


def _round_trips() -> dict[str, Any]:
    def saved(tensor: Any) -> Any:
        file = io.BytesIO()
        torch.save({"t": tensor}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)["t"]

    def in_module(tensor: Any) -> Any:
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(tensor, requires_grad=False)
        other = torch.nn.Module()
        other.w = torch.nn.Parameter(torch.zeros(tensor.shape), requires_grad=False)
        other.load_state_dict(module.state_dict(), assign=True)
        return other.w

    def by_hand(tensor: Any) -> Any:
        flat, entries = hybridq.prepare_for_saving(None, tensor)
        return hybridq.restore_from_saved(entries, flat)[1]

    return {
        "clone": torch.clone,
        "deepcopy": deepcopy,
        "pickle": lambda t: pickle.loads(pickle.dumps(t)),
        "save": saved,
        "state_dict": in_module,
        "detach": torch.Tensor.detach,
        "data": lambda t: t.data,
        "to copy": lambda t: t.to("cpu", copy=True),
        "contiguous": lambda t: t.contiguous(),
        "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
        "by hand": by_hand,
        "mirrored twice": lambda t: t.mT.mT if t.dim() == 2 else t.detach(),
        "alias": torch.ops.aten.alias.default,
    }


ROUND_TRIPS = _round_trips()


class QuantizeRules(Pool):
    """quantize, quantizers, copies, dtypes."""

    @fuzz(initialize, made=st.lists(sound_makers(), min_size=2, max_size=4), values=plain())
    def begin(self, made: list[Made], values: Values) -> None:
        """Some tensors to begin with."""
        for one in made:
            quantizer, error = attempt(one.build, "quantizer")
            if error is None and (quantizer.makes_rowwise or quantizer.makes_columnwise):
                self.keep(quantizer.quantize(values.build()), "begin")

    @fuzz(made=sound_makers(), values=plain(), seed=st.integers(-(2**63), 2**63 - 1))
    def quantize(self, made: Made, values: Values, seed: int) -> None:
        """Quantize; the reference must make the same bytes, within the format's rounding."""
        quantizer, error = attempt(made.build, "quantizer")
        if error is not None:
            return
        x = values.build()
        given = _stochastic_seed(quantizer, seed)
        t, error = attempt(lambda: quantizer.quantize(x, seed=given), "quantize")
        if error is not None:
            if quantizer.makes_rowwise or quantizer.makes_columnwise:
                raise Wrong(f"quantize: {quantizer} refused {values}: {error}") from error
            return
        self.keep(t, "quantize")
        with hybridq.backend("reference"):
            reference = quantizer.quantize(x, seed=given)
        if not same_planes(t, reference):
            raise Wrong(f"quantize: {quantizer.text} of {values}: not the reference's bytes")
        for plane in t.tensor_storage.planes:
            check_backends(plane, "quantize")
        if quantizer.columnwise_source == "original" and values.kind in ("normal", "integers"):
            matrix = x.reshape(hybridq.tensor.matrix_shape(x.shape))
            check_accuracy(matrix, t.tensor_storage, f"quantize: {quantizer.text}")

    @fuzz(made=makers(), values=plain(), name=junk(), which=st.integers(0, 4))
    def quantize_junk(self, made: Made, values: Values, name: str, which: int) -> None:
        """Wrong arguments are refused in words."""
        quantizer, error = attempt(made.build, "quantizer")
        if error is not None:
            return
        x, wrong = values.build(), JUNK[name]()
        calls = {
            0: lambda: quantizer.quantize(wrong),
            1: lambda: quantizer.quantize(x, out=wrong),
            2: lambda: quantizer.quantize(x, dtype=wrong),
            3: lambda: quantizer.quantize(x, seed=wrong),
            4: lambda: hybridq.quantize(wrong, "mxfp8", wrong),
        }
        t, _ = attempt(calls[which], f"quantize {name}")
        self.keep(t, "quantize junk")

    @fuzz(made=sound_makers(), shape=st.lists(st.integers(-1, 40), max_size=4), dtype=junk())
    def make_empty(self, made: Made, shape: list[int], dtype: str) -> None:
        """Zeros of any shape."""
        quantizer, error = attempt(made.build, "quantizer")
        if error is None:
            t, _ = attempt(lambda: quantizer.make_empty(shape), "make_empty")
            self.keep(t, "make_empty")
            attempt(lambda: quantizer.make_empty(shape, dtype=JUNK[dtype]()), "make_empty")
            attempt(lambda: quantizer.make_empty(JUNK[dtype]()), "make_empty")

    @fuzz(made=makers())
    def quantizer_text(self, made: Made) -> None:
        """A quantizer's text and pickle give it back; its neighbours are quantizers too."""
        q, error = attempt(made.build, "quantizer")
        if error is None:
            for other in (Quantizer.parse(q.text), pickle.loads(pickle.dumps(q)), deepcopy(q)):
                if other != q or hash(other) != hash(q):
                    raise Wrong(f"Quantizer.parse: {q.text} gives {other}")
            mirrored = q.mirrored()
            if mirrored is not None and mirrored.mirrored() != q:
                raise Wrong(f"mirrored: not its own inverse for {q}")

    @fuzz(index=indices(), how=st.sampled_from(sorted(ROUND_TRIPS)))
    def copy(self, index: int, how: str) -> None:
        """Copies and other names of a tensor hold its bytes."""
        t = self.take(index)
        if t is None:
            return
        made, error = attempt(lambda: ROUND_TRIPS[how](t), how)
        if error is not None:
            raise Wrong(f"{how}: refused {t!r}: {error}") from error
        if not isinstance(made, QuantizedTensor) or not same_planes(made, t):
            raise Wrong(f"{how}: {t!r} became {made!r}")
        if made.shape != t.shape or made.dtype != t.dtype:
            raise Wrong(f"{how}: shape or dtype of {t!r} became those of {made!r}")
        self.keep(made, how)

    @fuzz(index=indices(), dtype=st.sampled_from((*HIGH, torch.float64, torch.int32, torch.bool)))
    def to_dtype(self, index: int, dtype: torch.dtype) -> None:
        """Another dtype: the same codes, or the values as torch converts them."""
        t = self.take(index)
        if t is None:
            return
        made = t.to(dtype)
        if made.dtype != dtype:
            raise Wrong(f"to: {dtype} gives {made.dtype}")
        if isinstance(made, QuantizedTensor):
            if not same_planes(made, t):
                raise Wrong("to: other bytes")
            self.keep(made, "to")
        elif dtype.is_floating_point and not equal(made, t.dequantize().to(dtype)):
            raise Wrong(f"to: {dtype} gives other values")
        for wide in (torch.float32, torch.float16, torch.bfloat16):
            check_dtype = t.dequantize(dtype=wide)
            if check_dtype.dtype != wide:
                raise Wrong("dequantize: another dtype")
        attempt(lambda: t.dequantize(dtype=dtype), "dequantize")

    def _without_planes(self, t: Any) -> None:
        """Both planes given away: values are refused until planes come back, and no door breaks."""
        kept = t.detach()
        t.update_usage(False, False)
        if any(t.get_usages().values()) or list(t.tensor_storage.planes):
            raise Wrong("update_usage: planes were given away, and are there")
        for name, read in {**ROUND_TRIPS, "repr": repr, "add": lambda x: x + 1}.items():
            attempt(lambda read=read: read(t), f"{name} without planes")
        try:
            t.dequantize()
        except hybridq.PlaneError:
            pass
        else:
            raise Wrong("update_usage: planes were given away, and have values")
        t.data = kept
        if not same_planes(t, kept):
            raise Wrong("data: planes came back as others")

    @fuzz(index=indices(), row=st.sampled_from((None, True, False)), col=st.booleans())
    def usage(self, index: int, row: bool | None, col: bool) -> None:
        """Planes are dropped, kept or derived; a refusal changes nothing."""
        t = self.take(index)
        if t is None:
            return
        if row is False and not col:
            self._without_planes(t)
            return
        before = t.tensor_storage
        _, error = attempt(lambda: t.update_usage(row, col), "update_usage")
        if error is not None and t.tensor_storage is not before:
            raise Wrong("update_usage: failed, but changed the tensor")
        check_sound(t, "update_usage")
        if error is None and t.get_usages()["columnwise"] != col:
            raise Wrong("update_usage: not what was asked for")
        for plane in t.tensor_storage.planes:
            check_backends(plane, "update_usage")

    @fuzz(name=st.sampled_from(_core.build_info()["tables"]), threads=st.sampled_from((1, 1, 2)))
    def variant(self, name: str, threads: int) -> None:
        """Another variant of the CPU kernels, and number of threads, for what follows."""
        _core.set_variant(name)
        torch.set_num_threads(threads)

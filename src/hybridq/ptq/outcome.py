"""What a conversion did: per tensor, and in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .measure import PlaneError

__all__ = ["ENCODED", "EXACT", "KEPT", "Conversion", "ShardResult", "TensorResult"]


#: How a tensor's codes were made: from its values; its own, scales included; its own, with scales
#: of another format that stand for the same numbers.
ENCODED: Final = "encoded"
KEPT: Final = "kept"
EXACT: Final = "exact"


@dataclass(frozen=True, slots=True)
class TensorResult:
    """What became of a tensor that was quantized.

    Args:
        quantizer: canonical text.
        shape: of the tensor.
        amax: largest magnitude; infinity counts as the FP32 maximum; None if there is a NaN.
        num_nonfinite: how many values are NaN or infinite.
        errors: direction of each stored plane to its error; empty if errors were not asked for.
        made: `"encoded"` from its values; `"kept"`: codes and scales are the source's, of two
            planes those of the one that it has; `"exact"`: codes are, and other scales stand for
            the same numbers, as of MXFP4 that became NVFP4.
    """

    quantizer: str
    shape: tuple[int, ...]
    amax: float | None
    num_nonfinite: int
    errors: Mapping[str, PlaneError]
    made: str = ENCODED

    @property
    def worst(self) -> float:
        """The largest relative error of its planes, 0 where none is known."""
        return max((one.relative or 0.0 for one in self.errors.values()), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON has it; `parse` inverts it."""
        return {
            "quantizer": self.quantizer,
            "shape": list(self.shape),
            "amax": self.amax,
            "num_nonfinite": self.num_nonfinite,
            "errors": {direction: one.as_dict() for direction, one in self.errors.items()},
            "made": self.made,
        }

    @staticmethod
    def parse(value: Mapping[str, Any]) -> TensorResult:
        """Return the result that `as_dict` wrote."""
        errors = {
            direction: PlaneError(one["relative_rms_error"], one["sqnr_db"])
            for direction, one in value["errors"].items()
        }
        return TensorResult(
            value["quantizer"],
            tuple(value["shape"]),
            value["amax"],
            value["num_nonfinite"],
            errors,
            value.get("made", ENCODED),
        )


@dataclass(frozen=True)
class ShardResult:
    """One finished file.

    Args:
        nbytes: its size.
        sha256: of all its bytes.
        tensors: what was quantized, by name.
    """

    nbytes: int
    sha256: str
    tensors: Mapping[str, TensorResult]


@dataclass(frozen=True, repr=False)
class Conversion:
    """What a conversion did.

    Args:
        source, target: the paths.
        tensors: what was quantized, by name, of all shards.
        num_copied: how many tensors were copied.
        source_nbytes, target_nbytes: bytes of all tensors before and after.
        converted_nbytes: bytes of the source that this run converted.
        num_kept: how many shards an earlier run had finished.
        seconds: what this run took.
    """

    source: Path
    target: Path
    tensors: Mapping[str, TensorResult]
    num_copied: int
    source_nbytes: int
    target_nbytes: int
    converted_nbytes: int
    num_kept: int
    seconds: float

    def named(self, made: str) -> tuple[str, ...]:
        """Return the names of the tensors whose codes were made in a way, sorted.

        Args:
            made: as of `TensorResult`.
        """
        return tuple(sorted(name for name, one in self.tensors.items() if one.made == made))

    @property
    def worst(self) -> tuple[str, float] | None:
        """The tensor with the largest relative error and that error; None if none is known."""
        known = {name: one.worst for name, one in self.tensors.items() if one.errors}
        name = max(known, key=lambda name: known[name], default=None)
        return None if name is None else (name, known[name])

    def __repr__(self) -> str:
        worst = ""
        if self.worst is not None:
            name, error = self.worst
            worst = f", worst relative error {error:.4g} in {name}"
        return (
            f"<Conversion: {self.source} -> {self.target}, {len(self.tensors)} tensors quantized, "
            f"{self.num_copied} copied, {self.source_nbytes:,} bytes to {self.target_nbytes:,}"
            f"{worst}>"
        )

    @property
    def gigabytes_per_second(self) -> float:
        """Source bytes that this run converted per second, in 10^9."""
        return self.converted_nbytes / max(self.seconds, 1e-9) / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON has it."""
        return {
            "source": str(self.source),
            "target": str(self.target),
            "num_quantized": len(self.tensors),
            "num_copied": self.num_copied,
            "source_nbytes": self.source_nbytes,
            "target_nbytes": self.target_nbytes,
            "converted_nbytes": self.converted_nbytes,
            "num_shards_kept": self.num_kept,
            "seconds": self.seconds,
            "gigabytes_per_second": self.gigabytes_per_second,
            "tensors": {name: one.as_dict() for name, one in self.tensors.items()},
        }

"""Rules of checkpoints: made in tiles of any size and read back, and files with wrong bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from safetensors.torch import save_file

import hybridq
from hybridq.ptq import ConvertOptions, Selection
from hybridq.ptq.budget import Budget

from .invariants import same_planes
from .policy import Wrong, attempt
from .pool import Pool, fuzz
from .quantizers import Made, sound_makers
from .values import Values, plain

__all__ = ["CheckpointRules"]


class CheckpointRules(Pool):
    """convert_checkpoint, load_checkpoint."""

    @fuzz(
        values=plain(matrices=True),
        made=sound_makers(),
        tile=st.integers(100, 20_000),
        at=st.floats(0, 1),
        byte=st.integers(0, 255),
    )
    def checkpoint(self, values: Values, made: Made, tile: int, at: float, byte: int) -> None:
        """The planes read back are the quantizer's; a file with a wrong byte is refused or read."""
        x, quantizer = values.build(), made.build()
        selection, error = attempt(lambda: Selection(quantizer), "Selection")
        if error is not None:
            return
        with tempfile.TemporaryDirectory() as name:
            source, target = Path(name, "a.safetensors"), Path(name, "b.safetensors")
            save_file({"w.weight": x.clone().contiguous()}, source)
            with mock.patch.object(Budget, "most_values", lambda self, record: tile):
                options = ConvertOptions(measure=tile % 2 == 0)
                _, error = attempt(
                    lambda: hybridq.convert_checkpoint(source, target, selection, options),
                    "convert_checkpoint",
                )
            if error is not None:
                return  # a backend that is forced cannot
            got: Any = hybridq.load_checkpoint(target)["w.weight"]
            want = quantizer(x)
            if not same_planes(got, want):
                raise Wrong(f"convert_checkpoint: {quantizer.text}: not the quantizer's bytes")
            self.keep(got, "load_checkpoint")
            raw = bytearray(target.read_bytes())
            raw[int(at * (len(raw) - 1))] = byte
            target.write_bytes(raw)
            attempt(lambda: dict(hybridq.load_checkpoint(target)), "load_checkpoint")

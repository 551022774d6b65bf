"""Which products of planes are the core's, by the CPU and the variant in use."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from core_tools import using_variant
from hybridq import _core

_INFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(
    not _INFO.exists() or platform.machine() != "x86_64", reason="reads x86's /proc/cpuinfo"
)
def test_fp32_products_where_bf16_instructions_are_none_or_slow():
    """Intel's BF16 instruction of vectors is slower than FP32's; with tiles neither is taken."""
    text = _INFO.read_text()
    for variant in _core.build_info()["tables"]:
        with using_variant(variant):
            if variant == "baseline":  # no fused multiply-add
                assert not _core.multiplies_planes()
            elif variant == "x86-64-v3" or "avx512_bf16" not in text:
                assert _core.multiplies_planes() and not _core.has_product()
            else:
                assert _core.has_product()
                assert _core.multiplies_planes() == ("GenuineIntel" in text)
    if "x86-64-v4-amx" in _core.build_info()["variants"]:
        with using_variant("x86-64-v4-amx"):
            assert not _core.multiplies_planes() and _core.multiplies_planes_in_bf16()

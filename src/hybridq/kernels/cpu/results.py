"""Memory of kernels' results: of large ones in huge pages, where the system gives them.

A large result is memory that was not there before: the allocator maps it, and gives it back when
it is freed. Linux fills it in page by page, at the first write to each, which takes three times as
long as the kernel itself; in pages of 2 MB it takes half as long. So torch allocates it as ever,
and before it is written the core asks for such pages (`madvise`), for this block alone: glibc maps
each block of 32 MiB and more by itself, so that the advice ends with the block.
`HYBRIDQ_HUGE_PAGES=0` leaves it out (ADR 173).

With `HYBRIDQ_KEEP_MEMORY=1` glibc maps no block by itself and gives nothing back: what was freed is
there for the next result, of this library or of any other in the process (ADR 206).

Source: Linux, Documentation/admin-guide/mm/transhuge.rst; mallopt(3), M_MMAP_THRESHOLD, M_MMAP_MAX,
M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from ... import settings
from ..._log import log_once
from ..inputs import made
from . import backend

__all__ = ["LARGE_NBYTES", "is_large", "prepare", "result"]

#: From so many bytes on glibc maps a block alone (DEFAULT_MMAP_THRESHOLD_MAX), freed ones included.
LARGE_NBYTES: Final = 32 << 20
_CPU: Final = torch.device("cpu")
_uses_huge_pages: Final = settings.uses_huge_pages()
#: mallopt's M_TRIM_THRESHOLD and M_MMAP_MAX: nothing is trimmed, nothing mapped by itself.
_KEEP: Final = ((-1, -1), (-4, 0))


def _keep_freed_memory() -> bool:
    """Have the C library keep what this process frees; return whether it does, or say why not."""
    try:
        mallopt, why = ctypes.CDLL(None).mallopt, "mallopt refused"
    except (AttributeError, OSError):
        mallopt, why = None, "this system's C library has no mallopt, which glibc has"
    if mallopt is not None and all(mallopt(name, value) == 1 for name, value in _KEEP):
        return True
    text = f"HYBRIDQ_KEEP_MEMORY: {why}; freed memory goes back to the system as before"
    log_once(text, text)
    return False


if settings.keeps_memory():
    _keep_freed_memory()


def is_large(nbytes: int) -> bool:
    """Return whether a result is to be in huge pages.

    Args:
        nbytes: of it.
    """
    return nbytes >= LARGE_NBYTES and _uses_huge_pages


def prepare(buffer: torch.Tensor) -> None:
    """Ask for huge pages for a large result that is not written yet.

    Args:
        buffer: contiguous, on the CPU.
    """
    backend.core.advise_huge_pages(made(buffer), buffer.nbytes)


def result(*shape: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Return memory for a result, which is written by whoever asks for it.

    Args:
        shape: of it.
        dtype: of it; None: torch's default.
    """
    out = torch.empty(shape, dtype=dtype, device=_CPU)
    if is_large(out.nbytes):
        prepare(out)
    return out

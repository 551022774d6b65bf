"""What earlier GEMMs have made of a plane: decoded, folded, padded or swizzled operands.

An `OperandCache` belongs to its plane and dies with it. An entry is good as long as every buffer of
the plane has the version and the address that it was made from, so any write ends it; and it is
good on the stream that made it only: another one could read it before it is written, or after its
memory has gone to a third. All planes share one limit in bytes; the entry that was used longest ago
goes first. The ledger of that limit holds numbers and weak references only, never a tensor.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from ... import settings
from .addresses import begins_at
from .device import stream_of

__all__ = ["Made", "OperandCache", "forget_all", "operand_cache_nbytes"]


class Made(Protocol):
    """An operand in the form that some kernel takes."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Its tensors, those that are the plane's own buffers included."""


_T = TypeVar("_T", bound=Made)
_State = tuple[tuple[int, int], ...]
_serials = itertools.count()


class _Ledger:
    """Which entries there are, in the order of their last use, and how many bytes they take."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: OrderedDict[tuple[int, str], tuple[weakref.ref[OperandCache], int]] = (
            OrderedDict()
        )
        self.nbytes = 0
        # A plane may die at any moment, also while this thread holds the lock: its end is only
        # noted here, and booked with the next use.
        self.dead: deque[int] = deque()

    def add(self, kept: OperandCache, form: str, nbytes: int, limit: int) -> None:
        """Book an entry, and drop the oldest ones until all fit into `limit`."""
        dropped = []
        with self.lock:
            self._bury()
            self._remove((kept.serial, form))
            self.entries[kept.serial, form] = (weakref.ref(kept), nbytes)
            self.nbytes += nbytes
            while self.nbytes > limit and self.entries:
                key, (owner, size) = self.entries.popitem(last=False)
                self.nbytes -= size
                dropped.append((owner, key[1]))
        for owner, gone in dropped:
            alive = owner()
            if alive is not None:
                alive.entries.pop(gone, None)

    def use(self, serial: int, form: str) -> None:
        """Make an entry the one that was used last."""
        with self.lock:
            if (serial, form) in self.entries:
                self.entries.move_to_end((serial, form))

    def remove(self, serial: int, forms: Sequence[str]) -> None:
        """Forget entries of one plane."""
        with self.lock:
            for form in forms:
                self._remove((serial, form))

    def owners(self) -> list[OperandCache]:
        """Return the living planes' places that have an entry."""
        with self.lock:
            references = {key[0]: owner for key, (owner, _) in self.entries.items()}
        return [kept for kept in (owner() for owner in references.values()) if kept is not None]

    def total(self) -> int:
        """Return the bytes of all entries."""
        with self.lock:
            self._bury()
            return self.nbytes

    def _remove(self, key: tuple[int, str]) -> None:
        _, size = self.entries.pop(key, (None, 0))
        self.nbytes -= size

    def _bury(self) -> None:
        gone = set()
        while self.dead:
            gone.add(self.dead.popleft())
        if gone:
            for key in [key for key in self.entries if key[0] in gone]:
                self._remove(key)


_ledger = _Ledger()


def operand_cache_nbytes() -> int:
    """Return how many bytes are kept for all planes of this process."""
    return _ledger.total()


def forget_all() -> None:
    """Drop everything that any plane of this process keeps."""
    for kept in _ledger.owners():
        kept.forget()


class OperandCache:
    """The operands made of one plane, by form. Copies and pickles are empty.

    Args:
        at_once: keep from the first use on, for a plane that is known to be used again.
    """

    __slots__ = ("__weakref__", "_stack", "at_once", "entries", "seen", "serial")
    #: Whether anything is kept at all.
    keeps: ClassVar[bool] = True

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        #: The serials of planes that are multiplied together, and what is made of all of them.
        self._stack: tuple[tuple[int, ...], OperandCache] | None = None
        self.serial = next(_serials)
        self.entries: dict[str, tuple[_State, Any]] = {}
        self.seen: dict[str, _State] = {}

    def get(
        self,
        form: str,
        buffers: Sequence[torch.Tensor],
        make: Callable[[], _T],
        *,
        at_once: bool = False,
    ) -> _T:
        """Return what `make` makes, kept from the second use on of the same values.

        A plane that is used once, an activation's, so costs no memory.

        Args:
            form: what is made, in a text.
            buffers: the plane's.
            make: called where nothing valid is kept.
            at_once: keep it from the first use on.
        """
        limit = settings.current().gemm_cache_nbytes
        if limit <= 0:
            self.forget()
            return make()
        state = _state(buffers)
        stream = stream_of(buffers[0].device)
        if stream:
            form = f"{form} on stream {stream}"
        entry = self.entries.get(form)
        if entry is not None and entry[0] == state:
            _ledger.use(self.serial, form)
            return entry[1]
        if entry is not None:
            self.forget()  # one write ends every form
        if not (at_once or self.at_once) and self.seen.get(form) != state:
            self.seen[form] = state
            return make()
        made = make()
        nbytes = _own_nbytes(made.tensors, buffers)
        if nbytes <= limit:
            self.entries[form] = (state, made)
            _ledger.add(self, form, nbytes, limit)
        return made

    def of_stack(self, caches: Sequence[OperandCache]) -> OperandCache:
        """Return the place of what is made of several planes at once, the first of them this one's.

        It is another one as soon as one of the planes is: new planes may have the addresses and
        versions of those that have gone. It dies with this one.

        Args:
            caches: of all the planes, in their order.
        """
        if not all(one.keeps for one in caches):
            return NoOperandCache()
        serials = tuple([one.serial for one in caches])
        if self._stack is None or self._stack[0] != serials:
            self._stack = (serials, OperandCache(self.at_once))
        return self._stack[1]

    def forget(self) -> None:
        """Drop everything."""
        self._stack = None
        forms = tuple(self.entries)
        self.entries.clear()
        self.seen.clear()
        if forms:
            _ledger.remove(self.serial, forms)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is kept, the plane's own buffers among them where an operand has them."""
        own = [tensor for _, made in tuple(self.entries.values()) for tensor in made.tensors]
        return own if self._stack is None else own + self._stack[1].tensors

    @property
    def nbytes(self) -> int:
        """Bytes kept for this plane."""
        serials = (self.serial,) if self._stack is None else (self.serial, self._stack[1].serial)
        with _ledger.lock:
            return sum(size for key, (_, size) in _ledger.entries.items() if key[0] in serials)

    def __del__(self) -> None:
        if self.entries:
            _ledger.dead.append(self.serial)

    def __reduce__(self) -> Any:
        return OperandCache, ()


class NoOperandCache(OperandCache):
    """Keeps nothing: of planes whose memory is freed, and filled again without a new version."""

    __slots__ = ()
    keeps: ClassVar[bool] = False

    def get(
        self,
        form: str,
        buffers: Sequence[torch.Tensor],
        make: Callable[[], _T],
        *,
        at_once: bool = False,
    ) -> _T:
        """Return what `make` makes.

        Args:
            form, buffers, at_once: not used.
            make: called each time.
        """
        del form, buffers, at_once
        return make()


def _state(buffers: Sequence[torch.Tensor]) -> _State:
    """Return what changes with every write to the buffers, and with other memory."""
    return tuple((buffer._version, begins_at(buffer)) for buffer in buffers)


def _own_nbytes(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the memory of `tensors` that is not the plane's own."""
    known = {begins_at(buffer.untyped_storage()) for buffer in buffers}
    sizes = {begins_at(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for address, size in sizes.items() if address not in known)

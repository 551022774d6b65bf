"""How ranks stay agreed on a recipe: before the first gather, and in each one.

Before the first gather ranks compare what they are about to run (`fingerprint`). From then on the
bytes of a gather end with a digest of what its rank computes now, and a gather is done as was
agreed before: its size cannot differ between ranks whose recipes do. When it has arrived, every
rank knows all digests, so all of them take the new recipe, or all of them raise.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ... import settings
from ..._torch_private import fp32_matmul_precision
from ...errors import warn_once
from ...nn import WeightOwner
from ...recipes import Plan, Recipe, SlotPlan
from ...shards import named_ranks
from .fingerprint import DIGEST_NBYTES, Fingerprint, compare, flat_group, plan_digest
from .fsdp2_groups import reshard_wholly

__all__ = [
    "ExpectedRecipe",
    "Note",
    "Prepared",
    "Unread",
    "check_trailers",
    "expected_recipe",
    "expected_stack_recipe",
    "read_arrived",
    "trailer",
]


class Note:
    """What a rank tells the others of its rows, beside its recipe: a sum of the following.

    Plain numbers, since every gather asks for them.

    Attributes:
        WRITTEN: since ranks reduced maxima that its planes need; they are not in its payload.
        STEPPED: since scales that follow from earlier steps were updated.
    """

    WRITTEN = 1
    STEPPED = 2


#: By note, what the bytes of a digest are combined with, exclusively.
_MASKS: Final = (0x00, 0x55, 0xAA, 0xFF)


class ExpectedRecipe(NamedTuple):
    """What a rank computes with a weight.

    Attributes:
        slot: how the weight is quantized; None: not at all.
        digest: of everything that ranks must have in common.
        slots: the same as `slot` of each matrix, where the weight is several.
        is_delayed: scales of the module, not of the weight alone, follow from earlier steps.
    """

    slot: SlotPlan | None
    digest: bytes
    slots: tuple[SlotPlan | None, ...] = ()
    is_delayed: bool = False


def expected_recipe(
    module: WeightOwner | None, part: str, given: tuple[Recipe | None] | None = None
) -> ExpectedRecipe:
    """Return what a module computes under the recipe in force.

    Args:
        module: that the weight belongs to; None: it is gone.
        part: of the module's parts.
        given: another recipe, or None for none; None: the one in force.
    """
    plan = None
    if module is not None and given is None:
        plan = module.plan_now(part)
    elif module is not None and given is not None and isinstance(given[0], Recipe):
        plan = module.plan_of(given[0], part)
        plan = None if plan.is_plain else plan
    return _expected(plan, settings.current().backend, fp32_matmul_precision())


@lru_cache(maxsize=4096)
def _expected(plan: Plan | None, *settings_of_digest: str | None) -> ExpectedRecipe:
    """Return what a plan makes ranks expect, under the settings that its digest is of."""
    del settings_of_digest  # they are in force: only another value asks anew
    if plan is None:
        return ExpectedRecipe(None, plan_digest(None))
    return ExpectedRecipe(plan.weight, plan_digest(plan), (), plan.is_delayed)


def expected_stack_recipe(
    module: WeightOwner | None,
    part: str,
    count: int,
    given: tuple[Recipe | None] | None = None,
) -> ExpectedRecipe:
    """Return what a module computes with a weight of several matrices, under the recipe in force.

    Args:
        module: that the weight belongs to; None: it is gone.
        part: of the module's parts.
        count: how many matrices there are.
        given: as for `expected_recipe`.
    """
    if given is None:
        given = (None if module is None else module.recipe_now(),)
    return _expected_of_stack(module, part, given[0], count)


def _expected_of_stack(
    module: WeightOwner | None, part: str, recipe: Recipe | None, count: int
) -> ExpectedRecipe:
    plans: list[Plan | None] = [None]
    if module is not None and recipe is not None:
        parts = module.matrix_parts(part, count, recipe)
        plans = [module.plan_of(recipe, one) for one in parts]
    plans = [None if plan is None or plan.is_plain else plan for plan in plans]
    slots = tuple(None if plan is None else plan.weight for plan in plans)
    digests = b"".join(plan_digest(plan) for plan in plans)
    is_delayed = any(plan is not None and plan.is_delayed for plan in plans)
    if len(plans) == 1:
        return ExpectedRecipe(None, digests, slots * count, is_delayed)
    digest = hashlib.blake2b(digests, digest_size=DIGEST_NBYTES).digest()
    return ExpectedRecipe(None, digest, slots, is_delayed)


class Prepared:
    """One call of `prepare_fsdp2`: its ranks compare once, before the first gather.

    Args:
        model: that was prepared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._recipe: Recipe | None = None
        #: Whether ranks have compared.
        self.is_compared = False
        #: How often the ranks of a mesh had to find all maxima again, of the weights that lie on
        #: it, since rows were written by no optimizer.
        self.num_reductions: Counter[Any] = Counter()
        self._in_graphs: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    def compare_once(self, mesh: Any, group: Any) -> None:
        """Raise on every rank if ranks differ; every rank must call it.

        Args:
            mesh: of all ranks that hold the parameter, or None.
            group: the ranks, if there is no mesh.
        """
        if self.is_compared:
            return
        self._check_sharded(mesh)
        recipe = settings.current().recipe
        self._recipe = recipe if isinstance(recipe, Recipe) else None
        shape = (group.size(),) if mesh is None else tuple(mesh.shape)
        self._in_graphs = _compiled(self._model())
        for module in _roots(self._model()):
            module.register_forward_pre_hook(torch.compiler.disable(_use_in_graph))
        own = Fingerprint.of(self._model(), self._recipe, shape)
        compare(own, group if mesh is None else flat_group(mesh), "fsdp2")
        self.is_compared = True
        self._check_attached()
        model = self._model()
        if model is not None:
            reshard_wholly(model)

    def _check_sharded(self, mesh: Any) -> None:
        """Raise where every rank holds a whole weight, so that nothing is gathered: `replicate`.

        Args:
            mesh: that a gather begins on, or None.
        """
        model = None if mesh is None or mesh.size() == 1 else self._model()
        for path, module in () if model is None else model.named_modules():
            for name in _prepared_of(module):
                weight: Any = module._parameters[name]
                is_here = getattr(weight, "device_mesh", None) == mesh
                if not is_here or not all(one.is_replicate() for one in weight.placements):
                    continue
                whole = f"{path}.{name}".lstrip(".")
                raise RuntimeError(
                    f"fsdp2: {whole} must be sharded by fully_shard, got a weight that every "
                    f"rank of {tuple(mesh.shape)} holds whole; torch's replicate gathers nothing: "
                    "leave prepare_fsdp2 out, and take DistributedDataParallel for quantized ones"
                )

    def _check_attached(self) -> None:
        """Warn where a prepared parameter was replaced by a plain one, on all ranks alike."""
        model = self._model()
        lost = [
            f"{path}.{name}".lstrip(".")
            for path, module in (() if model is None else model.named_modules())
            for name in _prepared_of(module)
            if not hasattr(getattr(module._parameters[name], "_local_tensor", None), "_about")
        ]
        if lost:
            warn_once(
                f"fsdp2.lost:{lost}",
                f"fsdp2: {', '.join(lost)} were prepared, and then replaced by other parameters, "
                "whose values are gathered as they are; load values into the parameters that there "
                "are (load_state_dict keeps them prepared, with assign=True too)",
            )

    def is_compiled(self, module: object) -> bool:
        """Return whether a module was part of a compiled one when ranks compared.

        Args:
            module: of the model.
        """
        return module in self._in_graphs

    def expected(self, module: WeightOwner | None, part: str) -> ExpectedRecipe:
        """Return what was compared of a weight: the same on all ranks.

        Args:
            module, part: that the weight belongs to.
        """
        plan = None
        if module is not None and self._recipe is not None:
            plan = module.plan_of(self._recipe, part)
            plan = None if plan.is_plain else plan
        return ExpectedRecipe(None if plan is None else plan.weight, plan_digest(plan))

    def expected_of_stack(
        self, module: WeightOwner | None, part: str, count: int
    ) -> ExpectedRecipe:
        """Return what was compared of a weight of several matrices: the same on all ranks.

        Args:
            module, part: that the weight belongs to.
            count: how many matrices there are.
        """
        return _expected_of_stack(module, part, self._recipe, count)


def _compiled(model: nn.Module | None) -> weakref.WeakSet[nn.Module]:
    """Return all modules inside those that are compiled, `torch.compile(module)` included."""
    found: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    for module in _roots(model):
        found.update(module.modules())
    return found


def _roots(model: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the modules that are compiled: `torch.compile(module)` makes one around another."""
    for module in () if model is None else model.modules():
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            yield module


def _prepared_of(module: nn.Module) -> dict[str, Any]:
    """Return what keeps the prepared weights of a module itself, by name.

    A wrapper (`checkpoint_wrapper`, `torch.compile` of a module) has the attributes of the module
    inside, and none of its parameters.
    """
    found = getattr(module, "prepared_weights", {})
    return {name: one for name, one in found.items() if name in module._parameters}


def _use_in_graph(module: nn.Module, args: Any) -> None:
    """Have the planes of the recipe in force, where a compiled module's forward begins.

    What it computes with are inputs of a graph, which cannot ask for others.
    """
    recipe = settings.current().recipe
    recipe = recipe if isinstance(recipe, Recipe) else None
    for one in module.modules():
        for name, prepared in _prepared_of(one).items():
            prepared.use_in_graph(one, name, recipe)


@lru_cache(maxsize=256)
def trailer(digest: bytes, device: torch.device, note: int = 0) -> torch.Tensor:
    """Return the bytes that a rank's payload ends with, uint8 `[16]`.

    Args:
        digest: of what the rank expects.
        device: of the payload.
        note: what else the rank tells.
    """
    with torch.inference_mode(False):
        values = [byte ^ _MASKS[note] for byte in digest]
        return torch.tensor(values, dtype=torch.uint8, device=device)


class _Trailers(NamedTuple):
    """Trailers that are on their way from a device, and what they must say."""

    copy: torch.Tensor
    event: Any
    digest: bytes
    name: str
    group: Any


class Unread:
    """Trailers that were not worth waiting for the device, the oldest first.

    Args:
        new_event: makes an event that is recorded on the current stream.
        new_buffer: makes host memory of a shape that a device copies into without waiting.
    """

    def __init__(
        self, new_event: Callable[[], Any], new_buffer: Callable[[torch.Size], torch.Tensor]
    ) -> None:
        self._new_event, self._new_buffer = new_event, new_buffer
        self._waiting: deque[_Trailers] = deque()
        #: Buffers whose trailers were read, by shape.
        self._free: dict[torch.Size, list[torch.Tensor]] = {}

    def add(self, trailers: torch.Tensor, digest: bytes, name: str, group: Any) -> None:
        """Have trailers copied, to be read later.

        Args:
            trailers: uint8 `[ranks, 16]`, on a device.
            digest, name, group: as for `check_trailers`.
        """
        free = self._free.get(trailers.shape)
        copy = free.pop() if free else self._new_buffer(trailers.shape)
        copy.copy_(trailers, non_blocking=True)
        self._waiting.append(_Trailers(copy, self._new_event(), digest, name, group))

    def read(self) -> None:
        """Read what has arrived, up to the first that has not: one question where none has.

        Raises:
            RuntimeError: ranks differ.
        """
        while self._waiting and self._waiting[0].event.query():
            one = self._waiting.popleft()
            notes = _notes(one.copy, one.digest, one.name, one.group)
            self._free.setdefault(one.copy.shape, []).append(one.copy)
            _check_same(notes, one.name, one.group)


def _recorded() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


def _pinned(shape: torch.Size) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True, device="cpu")


_unread: Final = Unread(_recorded, _pinned)


def check_trailers(
    trailers: torch.Tensor, own: bytes, agreed: bytes, name: str, group: Any, note: int
) -> int:
    """Return what any rank notes; raise if a rank expects another recipe than this one.

    On a device the trailers of a rank that expects what is agreed, and which notes nothing, are
    read when they have arrived, with a later gather, so that no gather waits for the device. A rank
    whose recipe or rows have changed has to know now.

    Args:
        trailers: uint8 `[ranks, 16]`.
        own: digest of what this rank expects; of several parameters together, one of all.
        agreed: of what the gather was done by.
        name: of the parameter, or of all of them.
        group: the ranks.
        note: this rank's; on a device all of them must note the same.

    Raises:
        RuntimeError: ranks differ; on all of them.
    """
    if not trailers.is_cuda:
        if torch.equal(trailers, _all_alike(own, trailers.shape[0])):
            return 0
        found = 0
        for one in _notes(trailers, own, name, group):
            found |= one
        return found
    _unread.read()
    if own == agreed and not note:
        _unread.add(trailers, own, name, group)
        return note
    notes = _notes(trailers.cpu(), own, name, group)
    _check_same(notes, name, group)
    return notes[0]


@lru_cache(maxsize=256)
def _all_alike(digest: bytes, world: int) -> torch.Tensor:
    """Return the trailers of ranks that all expect the same, and note nothing."""
    with torch.inference_mode(False):
        return trailer(digest, torch.device("cpu")).repeat(world, 1)


def read_arrived() -> None:
    """Raise if trailers that have arrived from a device meanwhile show that ranks differ.

    Raises:
        RuntimeError: ranks differ.
    """
    _unread.read()


def _notes(trailers: torch.Tensor, digest: bytes, name: str, group: Any) -> list[int]:
    """Return what each rank notes.

    Raises:
        RuntimeError: a rank expects another recipe.
    """
    own = trailer(digest, torch.device("cpu"))
    if torch.equal(trailers, own.expand_as(trailers)):
        return [0] * len(trailers)
    masks = [set(row) for row in (trailers ^ own).tolist()]
    if all(len(mask) == 1 and min(mask) in _MASKS for mask in masks):
        return [_MASKS.index(min(mask)) for mask in masks]
    kinds: dict[Any, list[int]] = {}
    for rank, mask in enumerate(masks):
        row = 0 if len(mask) == 1 and min(mask) in _MASKS else tuple(trailers[rank].tolist())
        kinds.setdefault(row, []).append(_global_rank(group, rank))
    sides = ", another on ".join(named_ranks(ranks) for ranks in kinds.values())
    raise RuntimeError(
        f"fsdp2: every rank must compute alike, got for {name} one recipe (or none) or forced "
        f"backend on {sides}; a recipe must change on all ranks in the same step"
    )


def _check_same(notes: list[int], name: str, group: Any) -> None:
    """Raise unless all ranks note the same."""
    if len(set(notes)) < 2:
        return
    ranks = [_global_rank(group, rank) for rank, note in enumerate(notes) if note]
    raise RuntimeError(
        f"fsdp2: on a GPU every rank must write to its shard of {name} in the same step, since "
        f"no gather waits to learn of it, got a write by no optimizer on {named_ranks(ranks)} "
        "only; write on the others too: shard.add_(0) is enough"
    )


def _global_rank(group: Any, rank: int) -> int:
    import torch.distributed as dist  # not every build of torch has it

    return dist.get_global_rank(group, rank)

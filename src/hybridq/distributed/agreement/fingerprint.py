"""What all ranks must agree on, as lines of text that they compare.

A rank that computes under another recipe, another version or another model than its peers does not
fail by itself: it waits for a message that nobody sends, or trains something else. So ranks compare
what they are about to run, by one small collective, before the first weight is gathered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ... import settings
from ..._version import __version__
from ...direction import DIRECTIONS
from ...errors import RecipeError
from ...nn import QuantizedModule
from ...quantizers import DelayedScalingRequest
from ...recipes import Plan, Recipe, SlotPlan, bind
from ...recipes.named import source
from ...shards import named_ranks
from ...tensor import is_quantized

__all__ = [
    "DIGEST_NBYTES",
    "Fingerprint",
    "check_ranks",
    "compare",
    "flat_group",
    "gathered_values",
    "pipeline_fingerprint",
    "plan_digest",
]

#: Bytes of a digest.
DIGEST_NBYTES = 16
#: Endings of the names of a module's slots, in the order of `Plan`.
_SLOTS = (":input", ":weight", ":grad_output")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_NBYTES).digest()


def _environment() -> list[tuple[str, str]]:
    """Return the settings of this process that change bits."""
    return [
        ("the version of hybridq", __version__),
        ("the version of torch", str(torch.__version__)),
        ("the backend", settings.current().backend or "chosen"),
        ("the variant of the CPU core", settings.cpu_variant() or "chosen"),
        ("the precision of FP32 products", torch.get_float32_matmul_precision()),
    ]


def _delay(text: str) -> str:
    """Return a delay's text without the name of its group, which may differ between ranks."""
    if not text:
        return "none"
    request = DelayedScalingRequest.parse(text)
    *values, _ = request.text.split(",", 5)
    return ",".join([*values, "group" if request.amax_reduction_group else "all"])


def _slot_text(slot: SlotPlan) -> str:
    parts = [f"rowwise {slot.row.spec or 'as it is'}", f"columnwise {slot.col.spec or 'as it is'}"]
    if slot.col_source != "original":
        parts.append(f"of {slot.col_source}")
    if slot.amax_group:
        parts.append("with an amax of a group")
    if slot.is_delayed:
        parts.append(f"delayed by {_delay(slot.row_delay)} and {_delay(slot.col_delay)}")
    return ", ".join(parts)


def _plan_lines(name: str, plan: Plan | None) -> list[tuple[str, str]]:
    """Return what a plan says of each slot, and of the products."""
    if plan is None or plan.is_plain:
        return [(f"the quantizer of {name}{slot}", "none") for slot in _SLOTS] + [
            (f"the products of {name}", "plain")
        ]
    lines = [
        (f"the quantizer of {name}{what}", _slot_text(slot))
        for what, slot in zip(_SLOTS, plan[:3], strict=True)
    ]
    products = ", ".join(f"{gemm} {one}" for gemm, one in plan.precision._asdict().items())
    return [*lines, (f"the products of {name}", products)]


@lru_cache(maxsize=4096)
def _plan_digest(plan: Plan | None, backend: str | None, products: str) -> bytes:
    return _digest(repr((_plan_lines("", plan), backend, products)))


def plan_digest(plan: Plan | None) -> bytes:
    """Return a digest of what a module computes now; equal on ranks that compute alike.

    Args:
        plan: of the module; None: nothing is quantized.

    Returns:
        16 bytes: of the plan and of the settings that may change in mid-run.
    """
    return _plan_digest(plan, settings.current().backend, torch.get_float32_matmul_precision())


class Fingerprint(NamedTuple):
    """All that ranks must have in common, in an order that is the same on all of them.

    Attributes:
        lines: what, and its value.
    """

    lines: tuple[tuple[str, str], ...]

    @staticmethod
    def of(model: nn.Module | None, recipe: Recipe | None, shape: Sequence[int]) -> Fingerprint:
        """Return the fingerprint of a model under a recipe.

        Args:
            model: whose parameters and modules count; None: none do.
            recipe: that it runs under; None: nothing is quantized.
            shape: of the mesh of ranks.
        """
        lines = [*_environment(), ("the mesh of ranks", "x".join(map(str, shape)))]
        if model is not None:
            lines += [*_parameter_lines(model), *_module_lines(model, recipe)]
        return Fingerprint(tuple(lines))

    @property
    def digest(self) -> bytes:
        """16 bytes that differ where a line does."""
        return _digest(repr(self.lines))

    def line(self, number: int) -> tuple[str, str]:
        """Return a line; behind the last one, that there is none.

        Args:
            number: from 0 on.
        """
        return self.lines[number] if number < len(self.lines) else ("", "nothing")

    def first_difference(self, other: Fingerprint) -> int:
        """Return the number of the first line in which two fingerprints differ; -1: in none.

        Args:
            other: another rank's.
        """
        count = max(len(self.lines), len(other.lines))
        return next((i for i in range(count) if self.line(i) != other.line(i)), -1)


def _parameter_lines(model: nn.Module) -> list[tuple[str, str]]:
    found = list(model.named_parameters(remove_duplicate=False))
    first_of: dict[int, str] = {}
    lines = [("the number of parameters", str(len(found)))]
    for number, (name, parameter) in enumerate(found):
        owner = first_of.setdefault(id(parameter), name)
        facts = [name, str(list(parameter.shape)), str(parameter.dtype)]
        if owner != name:
            facts.append(f"tied to {owner}")
        if not parameter.requires_grad:
            facts.append("frozen")
        if hasattr(getattr(parameter, "_local_tensor", parameter), "_about"):
            facts.append("gathered as planes")
        facts += _held_formats(parameter)
        lines.append((f"parameter number {number}", " ".join(facts)))
    return lines


def _held_formats(parameter: Any) -> list[str]:
    """Return what the planes of a quantized parameter are, or of its shard."""
    local = getattr(parameter, "_local_tensor", parameter)
    if is_quantized(local):
        storage = local.tensor_storage
        specs = [None if p is None else p.spec for p in (storage.rowwise, storage.columnwise)]
    else:
        specs = list(getattr(getattr(local, "_about", None), "specs", ()))
    names = zip(DIRECTIONS, specs, strict=False)
    return [f"{name} {spec}" for name, spec in names if spec is not None]


def _module_lines(model: nn.Module, recipe: Recipe | None) -> list[tuple[str, str]]:
    lines, count = [], 0
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        count += 1
        for part in module.parts_of(recipe):
            path = ".".join(filter(None, (name, part))) or type(module).__name__
            try:
                lines += _plan_lines(path, None if recipe is None else module.plan_of(recipe, part))
            except (RecipeError, TypeError, ValueError) as error:
                # The module's own forward raises it. Raised here, other ranks would wait for this.
                lines.append((f"the quantizers of {path}", f"refused: {error}"))
    return [("the number of modules", str(count)), *lines]


def compare(
    own: Fingerprint,
    group: Any,
    where: str,
    rule: str = "every rank must run the same model under the same recipe",
) -> None:
    """Raise on every rank of `group` if one of them has another fingerprint.

    Every rank must call it. One small collective if all are equal, three more if not.

    Args:
        own: this rank's.
        group: a process group.
        where: name of the caller, for the message.
        rule: what ranks must have in common, for the message.

    Raises:
        RuntimeError: with the first line that differs, and what each rank has there.
    """
    import torch.distributed as dist  # not every build of torch has it

    digests = gathered_values(own.digest, group)
    if len(set(digests)) == 1:
        return
    given: list[Any] = [own]
    dist.broadcast_object_list(given, group=group, group_src=0)
    numbers = gathered_values(own.first_difference(Fingerprint(*given[0])), group)
    number = min(one for one in numbers if one >= 0)
    values: dict[tuple[str, str], list[int]] = {}
    for rank, line in enumerate(gathered_values(own.line(number), group)):
        values.setdefault(line, []).append(dist.get_global_rank(group, rank))
    whats = list(dict.fromkeys(what for what, _ in values if what))
    has = "; ".join(
        f"{value if what in ('', whats[0]) else f'{what} {value}'} on {named_ranks(ranks)}"
        for (what, value), ranks in values.items()
    )
    raise RuntimeError(f"{where}: {rule}, got {whats[0]}: {has}")


def pipeline_fingerprint(lines: Sequence[tuple[str, str]], recipe: Recipe | None) -> Fingerprint:
    """Return what ranks of a pipeline must have in common, whose modules differ.

    Args:
        lines: what stages say of themselves.
        recipe: in force; its quantizers of a linear module without a name count.
    """
    try:
        plan = _plan_lines("a linear module", None if recipe is None else bind(recipe))
    except (RecipeError, TypeError, ValueError) as error:  # the module's own forward raises it
        plan = [("the quantizers of a linear module", f"refused: {error}")]
    return Fingerprint((*_environment(), *lines, *plan))


def gathered_values(value: Any, group: Any) -> list[Any]:
    """Return the values of all ranks of a group, in its order. Every rank must call it.

    Args:
        value: this rank's: anything that can be pickled.
        group: a process group.
    """
    import torch.distributed as dist  # not every build of torch has it

    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found


#: By ranks: the group of all ranks at that time, and theirs.
_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}


def flat_group(mesh: Any) -> Any:
    """Return one process group of all ranks of a mesh; every one of them must call it.

    Args:
        mesh: a DeviceMesh of any number of dimensions, a process group, or None: all ranks.
    """
    import torch.distributed as dist  # not every build of torch has it

    if mesh is None:
        return dist.group.WORLD
    if not hasattr(mesh, "get_all_groups"):
        return mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    world, group = _groups.get(ranks, (None, None))
    if world is not dist.group.WORLD:  # of an earlier init_process_group
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        _groups[ranks] = (dist.group.WORLD, group)
    return group


def check_ranks(model: nn.Module, mesh: Any = None, *, recipe: Any = None) -> None:
    """Raise on every rank if ranks differ in what they are about to run.

    Compared are the versions of hybridq and torch, forced backends and CPU variants, the precision
    of FP32 products, the shape of the mesh, and of the model the names, shapes, dtypes and ties of
    its parameters and the quantizers of every slot. Values of parameters are not compared.

    Every rank must call it. Models that `prepare_fsdp2` prepared call it before their first gather.

    Args:
        model: any module.
        mesh: over which ranks: a DeviceMesh, a process group, or None: all ranks.
        recipe: that the model will run under: whatever `hybridq.autocast` takes; None: the one in
            force.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: torch.distributed is not initialized; or ranks differ, with the first thing
            that does and what each rank has.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)))
        >>> hybridq.distributed.check_ranks(model, recipe="mxfp8")
        >>> dist.destroy_process_group()
    """
    import torch.distributed as dist  # not every build of torch has it

    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"check_ranks: model must be an nn.Module, got {type(given).__name__}")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("check_ranks: torch.distributed must be initialized, got no group")
    current = settings.current().recipe if recipe is None else source(recipe).current
    group = flat_group(mesh)
    shape = tuple(mesh.shape) if hasattr(mesh, "shape") else (dist.get_world_size(group),)
    own = Fingerprint.of(model, cast("Recipe | None", current), shape)
    compare(own, group, "check_ranks")

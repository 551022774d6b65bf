"""`parallelize_experts`: the experts of a model, dealt out over ranks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from .. import settings
from .._torch_ranks import leave_out_of_ddp, process_group
from ..converters import converters
from ..distributed.agreement import Fingerprint, compare
from ..distributed.collectives import formats_of_directions
from ..distributed.collectives.symmetric import is_symmetric
from ..formats import PlaneSpec
from ..formats.row_format import row_format
from ..moe import Experts, ExpertsLayout, as_experts
from ..nn.delayed_scaling import reduce_over
from ..nn.weights import replaced
from ..recipes.named import source
from ..tensor import is_quantized
from .exchange import BY_RECIPE, TokenExchange
from .plans import capacity_of, experts_by_rank
from .ranks import Ranks, ranks_of
from .saving import saves_whole

__all__ = ["parallelize_experts"]

_Model = TypeVar("_Model", bound=nn.Module)
_WHERE = "parallelize_experts"
_RULE = "every rank must deal out the same experts in the same way"
#: Of a module of experts: its name, itself, and how it holds them (None: it is converted already).
_Found = tuple[str, Any, ExpertsLayout | None]


def parallelize_experts(
    model: _Model,
    mesh: Any = None,
    *,
    recipe: Any = None,
    dispatch: Any = None,
    combine: Any = None,
    plan: Any = None,
    average_gradients: bool = True,
    capacity: int | None = None,
    transport: Literal["group", "symmetric"] = "group",
) -> _Model:
    """Deal the experts of a model out over the ranks of a mesh; return the model.

    Each rank keeps a contiguous part of every module's experts, as `torch.chunk` deals them out:
    their parameters become DTensors `Shard(0)` under the model's own names. In the forward tokens
    go to the ranks of their experts by an all-to-all, are multiplied there under the recipe, and
    come back; router, auxiliary loss, correction of scores and shared experts are the model's own.
    All ranks must run the same forwards and backwards, each on tokens of its own.
    `save_pretrained` of a model that has it is called on all ranks, and writes one set of files on
    the first. Where experts lie over all ranks, DistributedDataParallel leaves them alone.

    Modules that `hybridq.convert` knows (docs/guides/experts.md) are converted; what else the model
    has is not touched.

    Args:
        model: with modules of experts; after `hybridq.convert`, or without it. Before
            `fully_shard`, DistributedDataParallel, and the optimizer.
        mesh: a DeviceMesh of one dimension, or None: all ranks; or ExpertRanks, which say what
            other ranks there are.
        recipe: that the experts compute under, whatever `hybridq.autocast` takes; None: the one in
            force.
        dispatch: the format in which tokens travel to the experts, and their gradients back: the
            name of one whose scales are of one row each (`"mxfp8"`, `"nvfp4"`, `"fp8_1x128"`,
            `"bf16"`); a pair: one for each direction; `"recipe"`: the quantizers of the roles
            `"dispatch"` and `"grad_dispatch"`; None: as they are.
        combine: the same of the experts' outputs, with the roles `"combine"` and `"grad_combine"`.
        plan: names of modules of experts, patterns with `*` included, or a mapping of them to their
            ExpertsLayout; these alone are dealt out. None: all that are known.
        average_gradients: divide gradients of experts by the number of ranks, which is right where
            each rank's loss is the mean over its own tokens and other gradients are averaged over
            ranks, as DistributedDataParallel and FSDP2 do it. False: they are sums over all ranks'
            losses. Ranks of `tensor_parallel` have one loss together.
        capacity: rows that each rank sends to each, filled with zeros where it has fewer, so that
            all sizes are known before: the host waits for nothing, and `torch.compile` and CUDA
            graphs take the block whole. `tokens * min(k, experts of a rank)` takes whatever the
            router says; a rank that has more rows than the capacity is an error, and no row is
            ever dropped. None: as many rows as there are.
        transport: how tokens and gradients travel. `"group"`: by the process group's all-to-all.
            `"symmetric"`: each rank writes its rows straight into memory of the others that it has
            mapped (torch's symmetric memory: GPUs of one host, joined by NVLink); values are the
            same to the bit. Where ranks cannot have it, rows travel by the group, and the log says
            why, once.

    Raises:
        TypeError: an argument is of another type, or the dtypes of a module's experts differ.
        ValueError: on every rank: no such module, a name that matches none, fewer experts than
            ranks, parts of different sizes or some of them frozen, experts dealt out before, or a
            capacity or transport that is none.
        NotImplementedError: parameters that are quantized or DTensors.
        SpecError: a format whose scales are of several rows.
        RuntimeError: torch.distributed is not initialized, or ranks differ.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from hybridq.moe import ExpertsLayout, parallelize_experts
        >>> class Own(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(4, 32, 16) / 4)
        ...         self.down = torch.nn.Parameter(torch.randn(4, 16, 32) / 4)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layout = ExpertsLayout("up", "down", has_gate=False)
        >>> model = torch.nn.ModuleDict({"experts": Own()})
        >>> model = parallelize_experts(model, dispatch="mxfp8", plan={"experts": layout})
        >>> x, top = torch.randn(10, 16), torch.rand(10, 4).topk(2)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     model["experts"](x, top.indices, top.values).shape
        torch.Size([10, 16])
        >>> dist.destroy_process_group()
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"{_WHERE}: model must be an nn.Module, got {type(given).__name__}")
    ranks = ranks_of(_WHERE, mesh, model)
    mesh = ranks.mesh
    group, rank, world = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    problem: Exception | None = None
    found: list[_Found] = []
    formats, by_copies = (("", ""), ("", "")), False
    try:
        formats = _formats("dispatch", dispatch), _formats("combine", combine)
        capacity, by_copies = capacity_of(_WHERE, capacity), is_symmetric(_WHERE, transport)
        if recipe is not None:
            source(recipe)
        found = _find(model, plan)
        for name, module, layout in found:
            _check(name, module, layout, world)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        problem = error
    try:
        _compare(model, found, ranks, (recipe, formats, capacity, transport), problem)
    except RuntimeError as error:
        problem = error if f"{error}".startswith(_WHERE) else _missing(ranks, error)
    if ranks.replicas:
        _compare_replicas(ranks, found, problem)
    if problem is not None:
        raise problem
    dealt: list[str] = []
    for name, module, layout in found:
        if layout is not None:
            as_experts(module, layout)
        if not module.name:
            module.name = name
        sizes = experts_by_rank(_count(module, module.experts_layout), world)
        factor = 1.0 / ranks.losses if average_gradients else 1.0
        given = (sizes, *formats, recipe, factor, capacity, ranks.replicas)
        batch = (ranks.batch, ranks.has_same_tokens, ranks.batch_is_apart)
        exchange = TokenExchange(group.group_name, rank, *given, *batch, is_symmetric=by_copies)
        _deal_out(module, exchange, mesh)
        dealt += [f"{name}.{own}".lstrip(".") for own in _stacks(module, module.experts_layout)]
    if ranks.replicas == "":  # no other rank has the same, which would have to be averaged with
        leave_out_of_ddp(model, dealt)
    saves_whole(model)
    return model


def _formats(what: str, given: Any) -> tuple[str, str]:
    """Return the formats of both directions, as they travel."""
    where = f"{_WHERE}: {what}"
    both = formats_of_directions(where, given, (BY_RECIPE,))
    forward, backward = (one if one == BY_RECIPE else row_format(where, one) for one in both)
    return forward, backward


def _layout_of(module: nn.Module) -> ExpertsLayout | None:
    """Return how a module that can be converted holds its experts; None: it is none."""
    for converter in converters():
        if converter.layout is not None and converter.takes_module(module):
            return converter.layout(module)
    return None


def _find(model: nn.Module, plan: Any) -> list[_Found]:
    """Return the modules of experts that are dealt out.

    Raises:
        TypeError, ValueError: see `parallelize_experts`.
    """
    given = _plan_of(plan)
    named: dict[str, nn.Module] = dict(model.named_modules())
    found: list[_Found] = []
    if given is None:
        for name, module in named.items():
            layout = None if isinstance(module, Experts) else _layout_of(module)
            if isinstance(module, Experts) or layout is not None:
                found.append((name, module, layout))
        if not found:
            raise ValueError(
                f"{_WHERE}: the model must have experts that are known, got "
                f"{type(model).__name__} without any; name them, "
                "plan={name: ExpertsLayout(...)}"
            )
        return found
    for pattern, own in given.items():
        names = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"{_WHERE}: plan names modules of the model, got {pattern!r}")
        for name in names:
            module = named[name]
            is_done = isinstance(module, Experts)
            layout = None if is_done else own or _layout_of(module)
            if layout is None and not is_done:
                raise ValueError(
                    f"{_WHERE}: {name} must be experts that are known, got "
                    f"{type(module).__name__}; give its ExpertsLayout in plan"
                )
            found.append((name, module, layout))
    return found


def _plan_of(plan: Any) -> dict[str, ExpertsLayout | None] | None:
    """Return a plan as a mapping; None: there is none."""
    if plan is None:
        return None
    if isinstance(plan, Mapping):
        made = dict(plan)
    elif isinstance(plan, Iterable) and not isinstance(plan, str):
        made = dict.fromkeys(plan)
    else:
        raise TypeError(f"{_WHERE}: plan must be names or a mapping, got {type(plan).__name__}")
    for name, layout in made.items():
        if not isinstance(name, str) or not (layout is None or isinstance(layout, ExpertsLayout)):
            raise TypeError(
                f"{_WHERE}: plan maps names of modules to ExpertsLayout, got {name!r}: "
                f"{type(layout).__name__}"
            )
    return made


def _count(module: nn.Module, layout: ExpertsLayout) -> int:
    """Return how many experts there are."""
    return int(getattr(module, layout.down).shape[0])


def _stacks(module: nn.Module, layout: ExpertsLayout) -> dict[str, nn.Parameter]:
    """Return the parameters that have one matrix or vector for each expert."""
    names = [*layout.weights, *layout.first_biases, layout.down_bias]
    return {name: getattr(module, name) for name in names if name is not None}


def _check(name: str, module: Any, given: ExpertsLayout | None, world: int) -> None:
    """Raise where a module's experts cannot be dealt out."""
    where = f"{_WHERE}: {name or type(module).__name__}"
    if isinstance(module, Experts) and module.exchange is not None:
        raise ValueError(f"{where}: experts are dealt out once, got some that were before")
    layout = module.experts_layout if given is None else given
    if given is not None:
        reason = given.reason_against(module)
        if reason is not None:
            raise ValueError(f"{where}: does not fit its layout: {reason}")
    stacks = _stacks(module, layout)
    for parameter, tensor in stacks.items():
        if is_quantized(tensor) or type(tensor.data) is not torch.Tensor:
            raise NotImplementedError(
                f"{where}: {parameter} must be a plain parameter in high precision, got a "
                f"{type(tensor).__name__}; deal experts out before they are quantized or sharded"
            )
    if len({tensor.dtype for tensor in stacks.values()}) > 1:
        kinds = {parameter: str(tensor.dtype) for parameter, tensor in stacks.items()}
        raise TypeError(f"{where}: parameters of experts must have one dtype, got {kinds}")
    weights = {parameter: stacks[parameter] for parameter in layout.weights}
    if len({tensor.requires_grad for tensor in weights.values()}) > 1:
        trained = {parameter: tensor.requires_grad for parameter, tensor in weights.items()}
        raise ValueError(f"{where}: all weights must be trained or none, got {trained}")
    if len({tensor.shape[0] for tensor in stacks.values()}) > 1:
        counts = {parameter: tensor.shape[0] for parameter, tensor in stacks.items()}
        raise ValueError(f"{where}: every parameter must be of as many experts, got {counts}")
    try:
        experts_by_rank(_count(module, layout), world)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _compare(
    model: nn.Module,
    found: list[_Found],
    ranks: Ranks,
    choice: tuple[Any, tuple[tuple[str, str], ...], int | None, object],
    problem: Exception | None,
) -> None:
    """Raise on every rank where one of them deals out something else, or refuses to.

    The rank that refuses raises its own error; the others are told it.
    """
    mesh, group = ranks.mesh, ranks.mesh.get_group()
    recipe, formats, capacity, transport = choice
    chosen: Any = settings.current().recipe
    if problem is None and recipe is not None:
        chosen = source(recipe).current
    lines = [
        ("whether it can be done", "yes" if problem is None else f"{problem}"),
        ("the formats of dispatch", _told(formats[0])),
        ("the formats of combine", _told(formats[1])),
        ("the capacity", str(capacity)),
        ("the transport", str(transport)),
        ("the ranks of a batch, and what tokens they have", ranks.told),
    ]
    for name, module, layout in found:
        own = module.experts_layout if layout is None else layout
        told = {key: list(value.shape) for key, value in _stacks(module, own).items()}
        lines.append((f"the experts {name}", f"{type(module).__name__} {told}"))
    rest = Fingerprint.of(model, chosen, tuple(mesh.shape)).lines
    try:
        compare(Fingerprint((*lines, *rest)), group, _WHERE, _RULE)
    except RuntimeError:
        if problem is None:
            raise


def _missing(ranks: Ranks, error: Exception) -> Exception:
    """Return the error of ranks that do not call, or call with another mesh."""
    import torch.distributed as dist  # not every build of torch has it

    members = dist.get_process_group_ranks(ranks.mesh.get_group())
    made = RuntimeError(
        f"{_WHERE}: every rank of the mesh must call it with the same mesh, got ranks {members} "
        f"here, not all of which answer: {error}"
    )
    made.__cause__ = error
    return made


def _compare_replicas(ranks: Ranks, found: list[_Found], problem: Exception | None) -> None:
    """Raise on every rank of those with the same experts where one has others, or refuses."""
    lines = [
        ("whether it can be done", "yes" if problem is None else f"{problem}"),
        ("the place among the ranks of experts", str(ranks.mesh.get_local_rank())),
        ("the number of ranks of experts", str(ranks.mesh.size())),
        ("the modules", str([name for name, _, _ in found])),
    ]
    try:
        compare(Fingerprint(tuple(lines)), process_group(ranks.replicas or ""), _WHERE, _RULE)
    except RuntimeError:
        if problem is None:
            raise


def _told(formats: tuple[str, str]) -> str:
    """Return the formats of values and of their gradients, for a message."""
    names = (one if one in ("", BY_RECIPE) else PlaneSpec.parse(one).short_text for one in formats)
    return " and ".join(name or "as they are" for name in names)


def _deal_out(module: Any, exchange: TokenExchange, mesh: Any) -> None:
    """Replace a module's parameters by this rank's parts of them."""
    from torch.distributed.tensor import DTensor, Shard

    for name, whole in _stacks(module, module.experts_layout).items():
        own = exchange.own_rows(whole.detach()).clone()
        made: Any = DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        module._parameters[name] = nn.Parameter(made, requires_grad=whole.requires_grad)
        replaced(
            whole, "parallelize_experts", "parallelize_experts, and fully_shard if it is called"
        )
    module.first_matrix, module.all_matrices = exchange.first, sum(exchange.sizes)
    module.exchange = exchange
    module.keep_own_histories()
    reduce_over(module, exchange.replicas or "", is_own=True)

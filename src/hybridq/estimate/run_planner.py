"""`plan`: what each rank of a run holds and moves, computed without running it.

Planes are sized by the code that makes and gathers them (`GatherCall.plan`, `PlaneSpec.buffers`),
so that a plan cannot say anything else than a run does.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import torch
from torch import nn

from .. import settings
from .._torch_ranks import process_group
from ..distributed.fsdp2 import gathered_weights
from ..distributed.tensors import GatheredWeight
from ..errors import must_be_one_of
from ..formats import PlaneSpec
from ..nn import GroupedLinear, QuantizedModule
from ..nn.delayed_scaling import places_of, states_of
from ..recipes import Recipe, autocast
from ..shards import MAXIMA_AT_ONCE
from .parameter_sizes import ParameterSizes, UnitSizes, parameter_sizes
from .run_plan import Held, Moved, RunPlan, Sharding

__all__ = ["plan"]

#: By optimizer: values that it keeps per value of a parameter, and bytes per parameter beside them.
_OPTIMIZERS: Final = {"adamw": (2, 4), "momentum": (1, 0), "sgd": (0, 0)}
#: What memory and collectives are for, in the order of a plan's table.
_HELD: Final = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered parameters",
    "gradients of a unit",
    "amaxes",
    "weights kept for the backward",
    "inputs saved by linears",
)
_MOVED: Final = (
    "weights, forward",
    "weights, backward",
    "other parameters, forward",
    "other parameters, backward",
    "gradients",
    "gradients of shards",
    "amaxes",
    "amaxes of delayed scaling",
)
#: Units whose gathered parameters are there at a time: the one in use, and the next one.
_UNITS_AT_A_TIME: Final = 2
#: In the place of a unit's name: what is not freed after the forward.
_STAYS: Final = "*"


def plan(
    model: nn.Module,
    recipe: Recipe | str | None,
    sharding: Sharding,
    *,
    optimizer: str = "adamw",
    quantized_params: bool = False,
    masters: bool = False,
    moments: str = "fp32",
    tokens: int = 0,
) -> RunPlan:
    """Return what each rank holds, and what a training step moves, without running anything.

    A step is a later one (in the first, maxima are reduced before the first gather too) with one
    forward and one backward, under `prepare_fsdp2` and `fully_shard`, or under DDP. Rows on the
    largest shard count, and padding does. Every weight's input needs a gradient. Beside it stand
    two runs without a recipe: with the same parameters and optimizer, and with BF16 parameters
    that have FP32 masters.

    Args:
        model: as it is before `fully_shard`; may lie on the meta device (`DenseShape.model`).
        recipe: that is trained under, its name, or None.
        sharding: over ranks.
        optimizer: `"adamw"`, `"momentum"` or `"sgd"`: what torch's keep in the parameters' dtype.
        quantized_params: parameters are held as planes, and their values by the optimizer.
        masters: 16-bit parameters have a master and moments in FP32, as `hybridq.optim.AdamW` keeps
            them; with `quantized_params` they always have. FP32 parameters are their own masters.
        moments: `"fp32"`, `"bf16"`, `"fp16"` or `"fp8_block"`: how `hybridq.optim.AdamW` holds
            them, with `masters` or `quantized_params`. The runs that the plan stands beside have
            FP32 ones.
        tokens: of a rank in a step: with them the inputs count that linear modules save for the
            backward. What norms, activations, attention and GroupedLinear save does not.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown recipe or optimizer, or negative tokens, `model` went through
            `prepare_fsdp2` already or has DTensors, or short `moments` go with another optimizer.
        RuntimeError: a weight is no plain tensor: it is quantized.

    Example:
        >>> from hybridq.distributed import DenseShape, Sharding, plan
        >>> model = DenseShape.of(8e9).model()
        >>> made = plan(model, "mxfp8_fwd_nvfp4_bwd", Sharding(world=128))
        >>> [f"{m.what} {m.bytes_per_parameter:.2f}" for m in made.traffic[:2]]
        ['weights, forward 1.03', 'weights, backward 0.56']
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"plan: model must be an nn.Module, got {type(given).__name__}")
    if any(isinstance(parameter.data, GatheredWeight) for parameter in model.parameters()):
        raise ValueError("plan: model must be planned before prepare_fsdp2, got a prepared one")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"plan: parameters must be whole, got {name} that is a DTensor; plan the model "
                "before fully_shard and parallelize_module"
            )
    if optimizer not in _OPTIMIZERS:
        raise ValueError(f"plan: optimizer {must_be_one_of(_OPTIMIZERS, optimizer)}")
    if type(tokens) is not int or tokens < 0:
        raise ValueError(f"plan: tokens must be an int of at least 0, got {tokens!r}")
    if not isinstance(sharding, Sharding):
        raise TypeError(f"plan: sharding must be a Sharding, got {type(sharding).__name__}")
    from ..optim.moments import KINDS  # not before: an optimizer brings torch's compiler

    if moments not in KINDS:
        raise ValueError(f"plan: moments {must_be_one_of(KINDS, moments)}")
    if moments != "fp32" and (optimizer != "adamw" or not (masters or quantized_params)):
        raise ValueError(
            "plan: short moments are those of hybridq.optim.AdamW, got moments="
            f"{moments!r} with {optimizer}; plan it with masters=True or quantized_params=True"
        )
    run = _Run(sharding, _OPTIMIZERS[optimizer], tokens, quantized_params, masters, moments)
    with autocast(enabled=recipe is not None, recipe=recipe):
        made = _Sums(model, run)
    with autocast(enabled=False):
        run = run._replace(moments="fp32")
        plain = _Sums(model, run._replace(is_quantized=False, has_masters=False, is_bf16=True))
        long = _Sums(model, run.with_masters())
    key = "bf16" if recipe is None else recipe if isinstance(recipe, str) else recipe.key
    return RunPlan(
        key,
        made.num_params,
        sharding,
        tuple(
            Held(what, made.held[what], plain.held[what], long.held[what])
            for what in _HELD
            if made.held[what]
        ),
        tuple(
            Moved(*about, made.values[about[0]], nbytes, plain.moved[about], long.moved[about])
            for about, nbytes in sorted(made.moved.items(), key=lambda one: _MOVED.index(one[0][0]))
            if nbytes
        ),
    )


class _Run(NamedTuple):
    """What is planned, beside the model and the recipe.

    Attributes:
        sharding, tokens: as in `plan`.
        optimizer: what it keeps: one of `_OPTIMIZERS`.
        is_quantized: parameters are held as planes.
        has_masters: 16-bit parameters have masters.
        moments: how they are held where hybridq's optimizer holds them.
        is_bf16: all parameters are plain ones, and gathered in 16 bits.
        is_short: parameters lie in 16 bits, whatever the model says.
    """

    sharding: Sharding
    optimizer: tuple[int, int]
    tokens: int
    is_quantized: bool
    has_masters: bool
    moments: str = "fp32"
    is_bf16: bool = False
    is_short: bool = False

    def with_masters(self) -> _Run:
        """Return the run without a recipe whose parameters are BF16 ones with FP32 masters."""
        return self._replace(is_quantized=False, has_masters=True, is_bf16=True, is_short=True)


class _Sums:
    """What one rank holds and moves under the recipe in force.

    Args:
        model: as in `plan`.
        run: what is planned.

    Attributes:
        held: by purpose: bytes.
        moved: by (purpose, kind of collective, ranks in its group): bytes.
        values: by purpose of a collective: how many parameters it is about.
    """

    def __init__(self, model: nn.Module, run: _Run) -> None:
        self._run, self._sharding = run, run.sharding
        self.held: Counter[str] = Counter()
        self.moved: Counter[tuple[str, str, int]] = Counter()
        self.values: Counter[str] = Counter()
        self.num_params = 0
        #: By unit: bytes of its gathered parameters in the forward, in the backward, and of its
        #: gradients before their reduction.
        self._gathered: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._reduced: Counter[str] = Counter()
        #: By unit, and whether it is freed after the forward: its weights that travel as planes.
        self._travelling: dict[tuple[str, bool], list[tuple[ParameterSizes, int]]] = {}
        #: By step of encoding: bytes of all maxima that are reduced before it.
        self._maxima: Counter[int] = Counter()
        sharding = run.sharding
        weights = {id(found.parameter): found for found in gathered_weights(model)}
        units = _units(model) if sharding.units is None else set(sharding.units)
        for name, parameter in _gathered_order(model):
            weight = weights.get(id(parameter))
            own = _shortened(parameter.dtype) if run.is_short else parameter.dtype
            dtype = sharding.param_dtype or own
            if run.is_bf16:
                dtype = _shortened(dtype)
            sizes = parameter_sizes(
                parameter.shape,
                own,
                sharding.ranks,
                dtype,
                None if weight is None or run.is_bf16 else weight.slots(),
                weight is not None and not run.is_bf16,
                run.is_quantized,
                weight is not None and isinstance(weight.module, GroupedLinear),
            )
            self.num_params += parameter.numel()
            self._add_state(parameter, sizes)
            what = "other parameters" if weight is None else "weights"
            if sharding.policy == "ddp":
                self._add_replicated(parameter, sizes, weight is not None)
            else:
                self._add_sharded(parameter, sizes, what, _unit(name, units))
        self._add_units()
        self._add_delayed(model)
        if run.tokens:
            self._add_saved(model, run.tokens)

    def _move(self, what: str, kind: str, ranks: int, nbytes: int, numel: int) -> None:
        """Book what a collective carries of `numel` parameters; one rank alone needs none."""
        if ranks > 1 and nbytes:
            self.moved[what, kind, ranks] += nbytes
            self.values[what] += numel

    def _add_state(self, parameter: nn.Parameter, sizes: ParameterSizes) -> None:
        """Book what a rank keeps from step to step."""
        itemsize = sizes.own_dtype.itemsize
        plain = sizes.shard_numel * itemsize
        planes = sizes.shard_planes if self._run.is_quantized else None
        self.held["parameters"] += plain if planes is None else planes
        if parameter.requires_grad:
            per_value, per_param = self._run.optimizer
            self.held["gradients"] += plain
            own = plain * per_value
            # hybridq.optim: masters in FP32, moments as they are asked for
            has_masters = self._run.is_quantized or self._run.has_masters
            numel = sizes.shard_numel
            from ..optim.moments import moment_nbytes

            moment = moment_nbytes(self._run.moments, parameter.shape, numel)
            if planes is not None or (has_masters and itemsize < 4):
                own = 4 * numel + per_value * moment
            elif has_masters and itemsize == 4:
                own = per_value * moment
            self.held["optimizer"] += own + per_param

    def _add_replicated(
        self, parameter: nn.Parameter, sizes: ParameterSizes, is_weight: bool
    ) -> None:
        """Book a parameter under DDP."""
        if is_weight and not (self._run.is_quantized and sizes.shard_planes is not None):
            self.held["weights kept for the backward"] += sizes.kept
        if parameter.requires_grad:
            numel, world = parameter.numel(), self._sharding.world
            self._move("gradients", "all_reduce", world, numel * sizes.own_dtype.itemsize, numel)

    def _add_sharded(
        self, parameter: nn.Parameter, sizes: ParameterSizes, what: str, unit: str
    ) -> None:
        """Book a parameter under FSDP2."""
        given, ranks, numel = self._sharding, self._sharding.ranks, parameter.numel()
        reshards = given.reshard_after_forward
        is_freed = unit != "" if reshards is None else reshards
        held = sizes.planes(is_freed) if sizes.can_travel else (sizes.plain, sizes.plain)
        for found, nbytes in zip(self._gathered, held, strict=True):
            found[unit if is_freed else _STAYS] += nbytes
        self.held["amaxes"] += sizes.maxima_kept
        self._maxima.update(dict(enumerate(sizes.maxima_by_step)))
        if sizes.can_travel:
            self._travelling.setdefault((unit, is_freed), []).append((sizes, numel))
        else:
            self._move(f"{what}, forward", "all_gather", ranks, sizes.plain, numel)
            backward = sizes.plain if is_freed else 0
            self._move(f"{what}, backward", "all_gather", ranks, backward, numel)
        if not parameter.requires_grad:
            return
        dtype = given.reduce_dtype or given.param_dtype or sizes.own_dtype
        padded = sizes.shard_numel * ranks * dtype.itemsize
        self._move("gradients", "reduce_scatter", ranks, padded, numel)
        shard = padded // ranks
        self._move("gradients of shards", "all_reduce", given.replicas, shard, numel)
        own = (given.param_dtype or sizes.own_dtype).itemsize
        self._reduced[unit] += padded + numel * own
        self._move("amaxes", "all_reduce", ranks, sizes.maxima, numel)

    def _add_units(self) -> None:
        if self._sharding.policy == "ddp":
            return
        ranks = self._sharding.ranks
        for (unit, is_freed), members in self._travelling.items():
            sizes = UnitSizes([one for one, _ in members], ranks)
            numel = sum(count for _, count in members)
            for found, nbytes in zip(self._gathered, sizes.received(is_freed), strict=True):
                found[unit if is_freed else _STAYS] += nbytes
            for when, nbytes in zip(("forward", "backward"), sizes.moved(is_freed), strict=True):
                self._move(f"weights, {when}", "all_gather", ranks, nbytes, numel)
        self.held["gathered parameters"] = max(
            found.pop(_STAYS, 0) + sum(sorted(found.values())[-_UNITS_AT_A_TIME:])
            for found in self._gathered
        )
        self.held["gradients of a unit"] += max(self._reduced.values(), default=0)
        at_once = max(self._maxima.values(), default=0)
        self.held["amaxes"] += min(at_once, 4 * MAXIMA_AT_ONCE)

    def _add_delayed(self, model: nn.Module) -> None:
        """Book the reductions of delayed scaling: one number for each place with a history."""
        recipe = settings.current().recipe
        if not isinstance(recipe, Recipe):
            return
        for module in model.modules():
            if not isinstance(module, QuantizedModule):
                continue
            for part in states_of(module):
                numel = sum(p.numel() for own, p in module.scaled_weights() if own == part)
                requests = [place.request for place in places_of(module.plan_of(recipe, part))]
                groups = [one.amax_reduction_group for one in requests if one.reduce_amax]
                for ranks, count in Counter(map(self._ranks_of, groups)).items():
                    what = "amaxes of delayed scaling"
                    self._move(what, "all_reduce", ranks, 4 * count, numel)

    def _ranks_of(self, group: str | None) -> int:
        """Return how many ranks a process group has; one that is not there counts as all."""
        import torch.distributed as dist  # not every build of torch has it

        if not (group and dist.is_available() and dist.is_initialized()):
            return self._sharding.world
        ranks: int = process_group(group).size()
        return ranks

    def _add_saved(self, model: nn.Module, tokens: int) -> None:
        """Book the inputs that linear modules save: their columnwise planes."""
        recipe = settings.current().recipe
        for module in model.modules():
            if not isinstance(module, QuantizedModule):
                continue
            for name, part in module.weight_parts.items():
                weight = module._parameters.get(name)
                if weight is None or isinstance(module, GroupedLinear):
                    continue  # of its tokens nobody knows how many a router sends here
                cols = weight.shape[1]
                own = _shortened(weight.dtype) if self._run.is_short else weight.dtype
                dtype = self._sharding.param_dtype or own
                spec, is_row = PlaneSpec.plain(dtype), True
                if isinstance(recipe, Recipe):
                    slot = module.plan_of(recipe, part).input
                    is_row = slot.saves_row
                    spec = PlaneSpec.parse((slot.row if is_row else slot.col).spec).resolve(dtype)
                sizes = (tokens, cols) if is_row else (cols, tokens)
                self.held["inputs saved by linears"] += spec.nbytes(*sizes)


def _shortened(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of 16 bits: `dtype` itself, or BF16."""
    return dtype if dtype.itemsize <= 2 else torch.bfloat16


def _gathered_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return all parameters, a tied one once, in FSDP2's order: inner modules' ones first."""
    found: dict[int, tuple[str, nn.Parameter]] = {}

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            visit(f"{path}{name}.", child)
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), (path + name, parameter))

    visit("", model)
    return list(found.values())


def _units(model: nn.Module) -> set[str]:
    """Return the names of the children of the model's outermost ModuleLists and ModuleDicts."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not _unit(f"{path}.", found):
            found |= {f"{path}.{name}" if path else name for name, _ in module.named_children()}
    return found


def _unit(name: str, units: set[str]) -> str:
    """Return the innermost unit that a parameter belongs to; empty: the model itself."""
    parts = name.split(".")
    found = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((prefix for prefix in found if prefix in units), "")

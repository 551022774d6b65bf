"""What all modules with quantized GEMMs share: their recipe, their plans, their cached weights."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

import torch

from ... import settings
from ..._torch_private import tracing_state
from ...errors import PlaneError
from ...kernels.decoded import advise
from ...kernels.inputs import has_autocast
from ...quantizers.delayed import no_history
from ...recipes import (
    LINEAR,
    CustomRecipe,
    Plan,
    Recipe,
    bind,
    install,
    is_recomputing,
    plan_by_key,
)
from ...recipes.factories import high_precision_factory
from ...recipes.region_watch import WATCH
from ...storage import TensorStorage
from ...tensor import is_quantized
from ..autograd import Boundary
from ..delayed_scaling import (
    Scales,
    ScalingState,
    load_history,
    misses_step,
    scales_of,
    take_step,
    watch_steps,
)
from ..weights import (
    CachedWeight,
    PrequantizedWeight,
    cached_weight,
    check_weights,
    planes_held,
    quantize_weights,
    tell_values,
    unmoved,
    versions_of,
)
from .forward_only import ForwardOnly
from .input_errors import NESTED
from .parallel_weights import ParallelWeights
from .prepared_weight import PreparedWeight
from .torchscript import TorchScript, tell_of_trace
from .weight_gradients import WeightGradients

__all__ = ["PLAIN", "QuantizedModule"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


#: What a module without a recipe does, as a plan.
PLAIN: Final = bind(CustomRecipe(high_precision_factory))
#: What is remade when needed, or belongs to this process.
_NOT_SAVED: Final = (
    *("_bound", "last_recipe", "_cached_weights", "_boundary", "_prepared_linear"),
    *("prepared_weights", "amax_ranks", "_late", "_late_hooks"),
)


class QuantizedModule(WeightGradients, ParallelWeights, Boundary, ForwardOnly, TorchScript):
    """Base of modules that compute under the recipe of `hybridq.autocast`.

    A module may have several linear parts, each with a name of its own ("" for the only one, "fc1"
    and "fc2" of an MLP): it is what follows the module's name in the roles of that part.

    What other packages ask of a module is public (`WeightOwner`); the rest is the modules' own.
    """

    # Class attributes, so that a module whose __class__ `convert` changed has them too.
    name: str = ""
    _name_is_given: bool = False
    #: What `role.module_type` says of the module's slots.
    module_type: str = LINEAR
    #: Whether weights are `[in, out]`, and not `[out, in]`; of several matrices, each of them.
    holds_transposed: bool = False
    #: Names of the weights, and the part that each belongs to.
    weight_parts: Mapping[str, str] = {"weight": ""}
    #: The last recipe bound, and what it came to for each part.
    _bound: tuple[Recipe | None, dict[str, Plan]] = (None, {})
    #: The recipe (or None) of the last training forward, in a tuple; empty before the first.
    last_recipe: tuple[Any, ...] = ()
    #: By part, the quantized weight of the last microbatch that said whether it was the first.
    _cached_weights: Mapping[str, CachedWeight] = {}
    #: By part, what delayed scaling remembers; made with the module, so that no compiled graph
    #: makes it.
    _scaling: Mapping[str, ScalingState] = {}

    #: By name, what keeps a weight prepared for sharded training.
    prepared_weights: Mapping[str, PreparedWeight] = {}

    def _take_name(self, name: str | None) -> None:
        """Take the constructor's `name`; called last, when the module is otherwise made."""
        if name is not None:
            if not isinstance(name, str):
                raise self._error(TypeError, f"name must be a string, got {type(name).__name__}")
            self.__dict__["name"], self.__dict__["_name_is_given"] = name, True
        install()
        self.quantize_initial_weights()
        self._ensure_scaling()

    def initial_weights(self) -> Iterable[tuple[str, str]]:
        """Return each weight's name and part, for `quantized_model_init`."""
        return self.weight_parts.items()

    def values_because(self) -> Mapping[str, str]:
        """Return the weights that no `quantized_model_init` reaches, and why."""
        return {}

    def quantize_initial_weights(self, but: Container[int] = ()) -> None:
        """Quantize the weights inside `quantized_model_init`, the rest of the module being made.

        Args:
            but: ids of parameters that stay as they are.
        """
        quantize_weights(self, self._initial_but(but))
        tell_values(self, self.values_because())

    def check_initial_weights(self, but: Container[int] = ()) -> None:
        """Raise where `quantize_initial_weights` would, and change nothing.

        Args:
            but: ids of parameters that stay as they are.
        """
        check_weights(self, self._initial_but(but))

    def _initial_but(self, but: Container[int]) -> list[tuple[str, str]]:
        named = self.initial_weights()
        return [(w, p) for w, p in named if id(self._parameters.get(w)) not in but]

    def _get_name(self) -> str:
        """Return what `print(model)` calls the module: `hybridq.Linear` beside torch's `Linear`."""
        own = type(self).__module__.split(".")[0] == __name__.split(".")[0]
        return f"hybridq.{type(self).__name__}" if own else type(self).__name__

    def set_name(self, name: str) -> None:
        """Take the name that the module has in its model, unless the caller gave one.

        Args:
            name: qualified, as the roles of recipes have it.
        """
        if not self._name_is_given and self.name != name:
            self.__dict__["name"] = name
            for what in ("_bound", "_boundary"):
                self.__dict__.pop(what, None)
        self._ensure_scaling()
        for part, state in self._scaling.items():
            state.take_name(self.part_name(part))

    def _error(self, kind: type[Exception], text: str) -> Exception:
        # The name is read here and nowhere on the way: dynamo guards what it reads, and modules
        # that differ in their names only shall share one graph.
        own = type(self).__name__
        return kind(f"{own} {self.name}: {text}" if self.name else f"{own}: {text}")

    def _recipe(self) -> Any:
        """Return the recipe of this call, or None.

        In a recomputation that no recipe came along with (see `recipes.replay`), it is the one of
        this module's last training forward.
        """
        if tracing_state() is not None or torch.compiler.is_exporting():
            tell_of_trace(self)
        if self.bound_recipe is not None:
            return self._own_recipe()
        recipe = settings.current().recipe
        if torch.compiler.is_compiling():
            return recipe
        if is_recomputing():
            recipe = self.last_recipe[0] if self.last_recipe else recipe
        elif self.training or torch.is_grad_enabled():
            # Not through Module.__setattr__: this is bookkeeping on the hot path.
            self.__dict__["last_recipe"] = (recipe,)
        for name, prepared in self.prepared_weights.items():
            prepared.use(self, name, recipe)  # type: ignore[arg-type]
        return recipe

    def plan_of(self, recipe: Recipe, part: str = "") -> Plan:
        """Return the Plan of one part of this module; made anew only for another recipe.

        Args:
            recipe: any.
            part: of the module.
        """
        if torch.compiler.is_compiling():
            # Nothing but strings may decide, since strings are what dynamo guards.
            name = self.part_name(part) if recipe.reads_names else ""
            return plan_by_key(recipe.key, name, self.module_type, self._bound_inputs(part))
        bound = self._bound
        if bound[0] is not recipe and bound[0] != recipe:
            bound = self.__dict__["_bound"] = (recipe, {})
        plan = bound[1].get(part)
        if plan is None:
            WATCH.close()
            plan = self._bound_plan(bind(recipe, self.part_name(part), self.module_type), part)
            bound[1][part] = plan
        return plan

    def recipe_now(self) -> Recipe | None:
        """Return the recipe that the module computes under now; None: nothing is quantized.

        For what happens outside a forward: in a backward the recipe is the last forward's.
        """
        recipe = self.bound_recipe or settings.current().recipe
        if is_recomputing() and self.bound_recipe is None:
            recipe = self.last_recipe[0] if self.last_recipe else None
        return recipe if isinstance(recipe, Recipe) else None

    def plan_now(self, part: str) -> Plan | None:
        """Return how a part computes now; None: nothing is quantized.

        Args:
            part: of the module.
        """
        recipe = self.recipe_now()
        if recipe is None:
            return None
        plan = self.plan_of(recipe, part)
        return None if plan.is_plain else plan

    def parts_of(self, recipe: Recipe | None) -> tuple[str, ...]:
        """Return the parts that `recipe` is asked about.

        Args:
            recipe: any, or None.
        """
        return tuple(dict.fromkeys(self.weight_parts.values())) or ("",)

    def matrix_parts(self, part: str, count: int, recipe: Recipe | None) -> tuple[str, ...]:
        """Return what a recipe is asked about for a weight of several matrices: once, or each.

        Args:
            part: of the module, that the weight belongs to.
            count: how many matrices there are.
            recipe: any, or None.
        """
        del count, recipe
        return (part,)

    def part_name(self, part: str) -> str:
        """Return the qualified name of a part of the module, as roles have it."""
        return f"{self.name}.{part}" if self.name and part else self.name or part

    def _check_first(self, is_first_microbatch: object) -> None:
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
            got = type(is_first_microbatch).__name__
            raise self._error(TypeError, f"is_first_microbatch must be a bool or None, got {got}")

    def _kept(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype,
        plan: Plan,
        is_first_microbatch: bool | None,
        part: str = "",
        whole: TensorStorage | None = None,
    ) -> CachedWeight | PrequantizedWeight | None:
        """Return where the planes of a part's `weight`, as `dtype`, are or go; None: nowhere.

        `whole`: of the quantized tensor that the weight is a matrix of, if it is one.
        """
        if torch.compiler.is_compiling():
            return None
        if is_quantized(weight):
            return planes_held(self, part, weight, plan.weight, dtype, whole)
        if is_first_microbatch is None:
            is_first_microbatch = settings.current().is_first_microbatch
            if is_first_microbatch is None:
                return None
        return self._keep(weight, dtype, plan, is_first_microbatch, part)

    def _keep(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype,
        plan: Plan,
        is_first_microbatch: bool,
        part: str = "",
        is_checked: bool = False,
    ) -> CachedWeight | None:
        """Return where a part's planes are kept: see `cached_weight`."""
        known, state = self._cached_weights.get(part), self._scaling.get(part)
        age = 0
        if state is not None and plan.weight.is_delayed:
            age = state.age(settings.current().scaling_epoch)
        first, of = is_first_microbatch, versions_of({} if is_checked else self._parameters)
        kept = cached_weight(known, weight, dtype, plan.weight, first, age, is_checked, of)
        if kept is not known:
            others = {name: one for name, one in self._cached_weights.items() if name != part}
            self.__dict__["_cached_weights"] = others if kept is None else {**others, part: kept}
        return kept

    def _scales(
        self,
        weight: torch.Tensor,
        plan: Plan,
        is_first_microbatch: bool | None,
        part: str = "",
    ) -> Scales | None:
        """Return a part's scales of delayed scaling, updated first if a step was told by nobody.

        None where the plan keeps no history.
        """
        if not plan.is_delayed:
            return None
        if plan.is_forward_only:
            return self._static_scales(part)
        if torch.compiler.is_compiling():
            return scales_of(self._scaling.get(part), weight, plan, self.training, None)
        self._ensure_scaling()
        if is_first_microbatch is None:
            is_first_microbatch = settings.current().is_first_microbatch
        state = self._scaling.get(part)
        return scales_of(state, weight, plan, self.training, is_first_microbatch)

    def misses_step(self, part: str, stamp: object) -> bool:
        """Return whether delayed scales wait for a step that nobody told of.

        Args:
            part: of the module.
            stamp: another one when the part's weight was written.
        """
        plan = self.plan_now(part)
        if plan is None or not plan.is_delayed or not self.training:
            return False
        if settings.current().is_first_microbatch is False:
            return False
        return misses_step(self._scaling.get(part), stamp)

    def scale_changes(self, part: str, is_training: bool) -> int:
        """Return what changes with a part's scales: -1 if is_training and nobody told of steps."""
        state = self._scaling.get(part)
        if state is None or (is_training and not state.owner.is_told):
            return -1
        return state.num_changes

    def take_step(self, part: str, stamp: object) -> None:
        """Update delayed scales, if the module's plan has any; all ranks must call it.

        Args:
            part, stamp: as for `misses_step`.
        """
        take_step(self._scaling.get(part), stamp)

    def weight_statistics(self, part: str) -> tuple[int, torch.Tensor]:
        """Return a number for the scales of a part's weight as they are now, and their statistics.

        FP32 `[2]`, of the rowwise and of the columnwise plane, as encode takes them.

        Args:
            part: of the module.

        Raises:
            PlaneError: it keeps no history.
        """
        state = self._scaling.get(part)
        if state is None:
            raise PlaneError(no_history("linear"))
        stats = state.weight_statistics(self.plan_now(part))
        return state.num_changes, stats

    def scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return each part with its weight, those that are there."""
        named = [(part, self._parameter_behind(name)) for name, part in self.weight_parts.items()]
        return [(part, weight) for part, weight in named if weight is not None]

    def _parameter_behind(self, name: str) -> Any:
        """Return a weight; of one that is computed (`torch.nn.utils.parametrize`) a parameter.

        To compute it takes time, and may change the module (`spectral_norm`).
        """
        computed: Any = self._modules.get("parametrizations")
        if computed is not None and name in computed:
            return next(computed[name].parameters(), None)
        return getattr(self, name, None)

    def _ensure_scaling(self) -> None:
        """Have a state of delayed scaling for each part, where its weight is."""
        for part, weight in self.scaled_weights():
            state = self._scaling.get(part)
            if state is None:
                watch_steps()
                made = ScalingState(weight.device, self.module_type)
                made.take_name(self.part_name(part))
                made.owner.belong_to(self, part)
                self.__dict__["_scaling"] = {**self._scaling, part: made}
            elif state.device != weight.device:
                state.move(weight.device)

    def _cast(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors as torch.autocast would pass them on to a linear module."""
        first = next(tensor for tensor in tensors if tensor is not None)
        kind = first.device.type
        if not has_autocast(kind):
            advise(first.dtype, kind)
            return tensors
        dtype = torch.get_autocast_dtype(kind)
        advise(dtype, kind)
        return tuple(None if one is None else _cast(one, dtype) for one in tensors)

    def _check(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, features: int
    ) -> None:
        """Raise where x `[..., features]`, weight and bias cannot meet in a GEMM."""
        if x.is_nested:
            raise self._error(TypeError, NESTED)
        if x.layout != torch.strided:
            raise self._error(TypeError, f"input must be strided, got layout {x.layout}")
        if x.dtype not in _DTYPES:
            raise self._error(
                TypeError, f"input dtype must be float32, bfloat16 or float16, got {x.dtype}"
            )
        for what, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and tensor.dtype != x.dtype:
                raise self._error(
                    RuntimeError,
                    f"input and {what} must have the same dtype, got {x.dtype} and "
                    f"{tensor.dtype}; cast one of them or use torch.autocast",
                )
        if x.dim() == 0 or x.shape[-1] != features:
            raise self._error(
                RuntimeError,
                f"the last dimension of the input must be in_features={features}, got "
                f"shape {tuple(x.shape)}",
            )
        if x.device != weight.device:
            raise self._error(
                RuntimeError,
                f"input and weight must be on one device, got {x.device} and {weight.device}",
            )

    def _forget_weight(self) -> None:
        """Free the quantized weights; `hybridq.forget(module)` calls it."""
        self.__dict__.pop("_cached_weights", None)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._forget_weight()  # .to(), .half(), .cuda(): what is kept would only take memory
        with settings.moving(), unmoved(self, fn):
            moved = super()._apply(fn, recurse)
        self._attach()
        self._ensure_scaling()
        return moved

    def held(self, name: str) -> Any:
        """Return the parameter of a name as it is now: sharded or whole, or None.

        Args:
            name: of a weight.
        """
        return self._parameters.get(name)

    def keep_prepared(self, name: str, prepared: PreparedWeight) -> None:
        """Have a weight prepared again whenever the module is given another tensor for it.

        Args:
            name: of the weight.
            prepared: what prepares it.
        """
        self.__dict__["prepared_weights"] = {**self.prepared_weights, name: prepared}

    def _attach(self) -> None:
        """Prepare weights again that were, if the module was given others."""
        for name, prepared in self.prepared_weights.items():
            prepared.attach(self, name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._attach()
        self._ensure_scaling()
        has_weights = any(prefix + name in state_dict for name in self.weight_parts)
        load_history(self._scaling, state_dict, prefix, args[-2], args[-1], has_weights)
        self._load_static(state_dict, prefix, args[-2], args[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for part, own in self._scaling.items():
            own.owner.belong_to(self, part)

    def __getstate__(self) -> dict[str, Any]:
        # What a recipe came to is remade when needed; a factory may not even be picklable.
        state = self.__dict__.copy()
        for name in _NOT_SAVED:
            state.pop(name, None)
        return state


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in `dtype`, but float64 and integers as they are."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

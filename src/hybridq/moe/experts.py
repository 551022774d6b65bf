"""Experts: a model's own module of experts, whose products run under the recipe.

The class of such a module is changed in place: parameters, their names and shapes, submodules and
hooks stay. Without a recipe its forward is the one that it had. What routes the tokens (router,
auxiliary loss, shared experts) lies outside of the module, and is not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import nn

from ..nn import GroupedModule
from ..nn.autograd import Activation, GradientPlane, TokenRows, take_rows
from ..nn.modules import clash, made_class
from ..recipes import Recipe, install
from ..reference import ACTIVATIONS
from .exchange import ExpertExchange
from .layout import ExpertsLayout
from .permutation import Routes, permute, rows_of, unpermute

__all__ = ["Experts", "as_experts", "chosen", "convert_experts", "reason_against"]

_Module = TypeVar("_Module", bound=nn.Module)
#: Names of the functions of one value, to the gated activation of it.
_GATED: Final = {one.core: name for name, one in ACTIVATIONS.items() if one.is_gated}


class Experts(GroupedModule):
    """Base of the classes that `convert_experts` makes: experts that compute under a recipe.

    Under `hybridq.autocast` the tokens are sorted by expert and both (or all three) products of
    every expert run between quantized planes, in both directions, as in `hybridq.GroupedLinear`.
    Slots have the module type `"grouped_linear"`, and the names
    `"<module>.<parameter>"`; a recipe that reads names is asked for each expert,
    `"<module>.<parameter>.<e>"`. Without a recipe, or under one that leaves all of it alone, the
    forward is that of the module's own class, if it has one.

    Attributes:
        experts_layout: how the experts are held.
        plain_class: the module's own class.
        own_arguments: names of its forward's arguments.
        exchange: ranks that have the other experts (`parallelize_experts`); None: all are here.
        meanwhile: called while tokens travel to other ranks; None: nothing is.
    """

    experts_layout: ExpertsLayout
    plain_class: type[nn.Module]
    own_arguments: tuple[str, ...] = ()
    exchange: ExpertExchange | None = None
    meanwhile: Callable[[], None] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the experts make of their tokens: as the own forward, of the same arguments.

        Args:
            args, kwargs: those of the own forward, by place or by name.

        Raises:
            TypeError: a dtype cannot be quantized, or arguments are missing.
            RuntimeError: features, dtypes or devices do not fit.
            RecipeError: the recipe leaves a GEMM without a plane.
            NotImplementedError: gradients shall be added to `main_grad`, and ranks have parts.
        """
        if self.exchange is not None:
            if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
                raise NotImplementedError(
                    f"{type(self).__name__} {self.name}: fuse_wgrad_accumulation takes weights "
                    "that a rank has whole, got experts that parallelize_experts dealt out; leave "
                    "it off"
                )
            with self.exchange.recipe():
                return _forward(self, self.training_recipe(), args, kwargs)
        recipe = self.training_recipe()
        has_own = self.plain_class.forward is not nn.Module.forward
        if has_own and self.leaves_all_plain(recipe):
            return super().forward(*args, **kwargs)
        return _forward(self, recipe, args, kwargs)

    def own_part(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter if self.exchange is None else self.exchange.own_part(parameter)

    def multiplied_part(self, parameter: torch.Tensor) -> torch.Tensor:
        if self.exchange is None:
            # In a forward a DTensor is of a library that dealt experts out: of FSDP2 it is whole.
            to_local: Any = getattr(parameter, "to_local", None)
            return parameter if to_local is None else to_local()
        return self.exchange.with_copies(self, self.own_part(parameter))


# Functions and not methods: the own class may have methods of these names.


def _count(module: Experts) -> int:
    """Return how many experts there are; where another library dealt them out, on this rank."""
    down = getattr(module, module.experts_layout.down)
    return int((down if module.exchange is not None else module.multiplied_part(down)).shape[0])


def _check_dealt(module: Experts, recipe: Recipe | None) -> None:
    """Raise where another library dealt the experts out otherwise than one by one.

    It hands this rank the tokens of its own experts, and no others, as torchtitan does.
    """
    down: Any = getattr(module, module.experts_layout.down)
    if not hasattr(down, "device_mesh"):
        return
    for one, size in zip(down.placements, down.device_mesh.shape, strict=True):
        if size > 1 and not (one.is_shard(0) or one.is_replicate()):
            raise NotImplementedError(
                f"experts {module.name}: parameters must be dealt out over ranks expert by expert, "
                f"Shard(0), got {one}: a part of each expert; let the ranks of tensor parallelism "
                "have whole experts (torchtitan: an expert_parallel_degree that "
                "tensor_parallel_degree divides), or parallelize_experts(model, ExpertRanks(...))"
            )
    is_part = module.multiplied_part(down).shape != down.shape
    if recipe is not None and recipe.reads_names and is_part:
        raise NotImplementedError(
            f"experts {module.name}: a recipe that reads names needs to know which experts this "
            "rank has, which parallelize_experts(model, ExpertRanks(...)) tells it; or take a "
            "recipe that reads no names"
        )


def _forward(
    module: Experts, recipe: Recipe | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return what the own forward would, products under the recipe."""
    given = _given(module, args, kwargs)
    if module.exchange is None:
        if any(hasattr(one, "device_mesh") for one in given):
            raise TypeError(
                f"experts {module.name}: tokens must be plain tensors where each rank has all "
                "experts, got DTensors; deal the experts out, parallelize_experts(model, "
                "ExpertRanks(..., tensor_parallel=mesh)), or give what to_local() returns"
            )
        _check_dealt(module, recipe)
        return _of_tokens(module, recipe, given, None)
    local, lanes, placed = module.exchange.local_tokens(module, given)
    y = _of_tokens(module, recipe, local, lanes)
    return module.exchange.placed_result(y, placed)


def _of_tokens(
    module: Experts, recipe: Recipe | None, given: list[torch.Tensor], lanes: Any
) -> torch.Tensor:
    """Return what the experts make of this rank's tokens, which `lanes` have too."""
    takes = module.experts_layout.takes
    if takes == "routing":
        return _routed(module, recipe, lanes, *given)
    x, *sizes = given
    flat, count = x.reshape(-1, x.shape[-1]), _count(module)
    if takes == "sizes":
        each = torch.as_tensor(sizes[0], dtype=torch.int64, device=flat.device)
        _check_sizes(module, sizes[0], each, flat.shape[0], count)
        offsets = torch.cumsum(each.clamp(0, flat.shape[0]), 0, dtype=torch.int32)
    else:
        if flat.shape[0] % count:
            raise ValueError(
                f"{type(module).__name__}: forward takes as many rows for each of {count} experts, "
                f"got {flat.shape[0]} rows"
            )
        numbers = torch.arange(1, count + 1, dtype=torch.int32, device=flat.device)
        offsets = numbers * (flat.shape[0] // count)
    if module.exchange is None:
        y = _shared(module, recipe, flat, offsets)
    else:  # of rows that several ranks have, each sends its share
        own = module.exchange.own_sorted(module, flat, offsets, lanes)
        y = module.exchange.all_tokens(_shared(module, recipe, *own), flat.shape[0], lanes)
    return y.view(*x.shape[:-1], y.shape[-1])


def _check_rest(
    module: Experts, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: int
) -> None:
    """Raise where the own forward would take more than this one: it would do something with it."""
    names = module.own_arguments
    rest = dict(zip(names[wanted:], args[wanted:], strict=False))
    rest |= {name: value for name, value in kwargs.items() if name not in names[:wanted]}
    if not rest:
        return
    known = inspect.signature(module.plain_class.forward).parameters
    more = [name for name, value in rest.items() if not _is_default(known.get(name), value)]
    if more:
        takes = ", ".join(names[:wanted])
        raise TypeError(
            f"{type(module).__name__}: under a recipe, or over ranks, forward takes {takes}, got "
            f"{', '.join(more)} too, which it could not regard; apply it outside of the experts, "
            "or in the layout's activation"
        )


def _is_default(parameter: inspect.Parameter | None, value: Any) -> bool:
    """Return whether a value says no more than an argument that is left out."""
    default = None if parameter is None else parameter.default
    default = None if default is inspect.Parameter.empty else default
    return value is default or (isinstance(value, bool | int | float | str) and value == default)


def _check_sizes(module: Experts, given: Any, each: torch.Tensor, rows: int, count: int) -> None:
    """Raise where sizes do not fit: what a list says, and how many there are, is on the host."""
    where = f"{type(module).__name__}: forward"
    if each.shape != (count,):
        raise ValueError(
            f"{where} takes a number of rows for each of {count} experts, got sizes of shape "
            f"{tuple(each.shape)}"
        )
    if not isinstance(given, torch.Tensor) and (sum(given) != rows or min(given) < 0):
        raise ValueError(
            f"{where} takes sizes that add up to the rows, {rows}, got {list(given)}, {sum(given)}"
        )


def _given(module: Experts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return what the own forward takes first, by place or by name."""
    takes = module.experts_layout.takes
    wanted = {"routing": 3, "sizes": 2, "batches": 1}[takes]
    names = module.own_arguments[len(args) : wanted]
    given = [*args[:wanted], *(kwargs[name] for name in names if name in kwargs)]
    if len(given) < wanted:
        kind = type(module).__name__
        raise TypeError(f"{kind}: forward takes {wanted} tensors ({takes}), got {len(given)}")
    if takes != "routing" or not given[1].is_floating_point():  # which is refused by its dtype
        _check_rest(module, args, kwargs, wanted)
    return given


def chosen(module: Experts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return how many rows each expert of a forward is chosen for, int64 `[E]`; None: all alike.

    Args:
        module: the experts.
        args, kwargs: of its forward.
    """
    takes = module.experts_layout.takes
    if takes == "batches":
        return None
    count = _count(module)
    # Of DTensors what this rank has, as of other tokens.
    every: list[Any] = list(_given(module, args, kwargs))
    given = [one.to_local() if hasattr(one, "device_mesh") else one for one in every]
    if takes == "sizes":
        return torch.as_tensor(given[1], dtype=torch.int64, device=given[0].device)
    index = given[1].flatten().long()
    within = (index >= 0) & (index < count)
    zeros = torch.zeros(count + 1, dtype=torch.int64, device=index.device)
    return zeros.scatter_add_(0, torch.where(within, index, count), within.long())[:count]


def _routed(
    module: Experts,
    recipe: Recipe | None,
    lanes: Any,
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the sum over each token's experts, in the shape and dtype of `hidden`."""
    layout = module.experts_layout
    if indices.is_floating_point():
        raise TypeError(
            f"{type(module).__name__}: forward takes tokens, indices and weights under a recipe, "
            f"got {indices.dtype} for indices"
        )
    tokens = hidden.reshape(-1, hidden.shape[-1])
    top = indices if indices.dim() == 2 else indices.flatten(0, -2)
    given = [tokens, top]
    if layout.router_weights != "none":
        given.append(weights.reshape(top.shape))
    if module.exchange is not None:  # of tokens that several ranks have, each sends its share
        given = module.exchange.own_tokens(module, given, lanes)
    own, top, *rest = given
    routes = Routes.of(top, _count(module))
    shares = rest[0] if rest else None
    # Several products of the same rows: their gradients are added row by row.
    x = None
    moves = layout.router_weights == "input" or layout.passes_others
    if moves or len(layout.first) != 1 or module.exchange is not None:
        x = permute(own, routes)
    if shares is not None and x is not None and layout.router_weights == "input":
        x = x * shares.flatten()[routes.order][:, None].to(x.dtype)
        shares = None
    if x is None:
        y = _computed(module, recipe, own, routes.offsets, rows_of(routes))
    else:
        y = _shared(module, recipe, x, routes.offsets)
    if x is not None and layout.passes_others:
        number = torch.arange(y.shape[0], dtype=torch.int64, device=y.device)
        passes = (number >= routes.offsets[-1]) & (top.flatten()[routes.order] >= 0)
        y = torch.where(passes[:, None], x, y)
    summed = unpermute(y, shares, routes, hidden.dtype)
    if module.exchange is not None:
        summed = module.exchange.all_tokens(summed, tokens.shape[0], lanes)
    return summed.view(hidden.shape)


def _shared(
    module: Experts, recipe: Recipe | None, x: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of experts, here or on other ranks, of tokens sorted by expert."""
    if module.exchange is None:
        return _computed(module, recipe, x, offsets)

    def compute(
        x: torch.Tensor, offsets: torch.Tensor, rows: TokenRows, arriving: GradientPlane | None
    ) -> torch.Tensor:
        if len(module.experts_layout.first) == 1:
            return _computed(module, recipe, x, offsets, rows, arriving)
        return _computed(module, recipe, take_rows(x, rows), offsets, None, arriving)

    return module.exchange.run(module, recipe, x, offsets, compute)


def _computed(
    module: Experts,
    recipe: Recipe | None,
    x: torch.Tensor,
    offsets: torch.Tensor,
    rows: TokenRows | None = None,
    arriving: GradientPlane | None = None,
) -> torch.Tensor:
    """Return the experts' outputs of tokens sorted by expert, x or rows of it, `[N, H]`."""
    layout = module.experts_layout
    made = []
    for name, bias in zip(layout.first, layout.first_biases, strict=True):
        more = 0
        if module.exchange is None:  # matrices that nothing reads
            more = module.multiplied_part(getattr(module, name)).shape[0] - offsets.shape[0]
        ends = torch.cat([offsets, offsets[-1:].expand(more)]) if more else offsets
        made.append(module.grouped_product(recipe, name, bias, x, ends, rows))
    hidden, activation = x, None
    if made:
        h = made[0] if len(made) == 1 else torch.cat(made, 1)
        hidden, activation = _before_activation(module, h)
    given = (recipe, layout.down, layout.down_bias, hidden, offsets)
    y = module.grouped_product(*given, activation=activation, arriving=arriving)
    if layout.post_norm is not None:
        y = getattr(module, layout.post_norm)(y)
    if layout.scale is not None:
        scale = getattr(module, layout.scale)
        if module.exchange is not None:
            scale = module.exchange.own_rows(scale)
        y = y * _of_rows(scale, offsets, y)
    return y


def _before_activation(module: Experts, h: torch.Tensor) -> tuple[torch.Tensor, Activation | None]:
    """Return what the second product's activation takes, and that; None: it is done.

    Args:
        module: the experts.
        h: what the first product gives.
    """
    layout = module.experts_layout
    if not isinstance(layout.activation, str):
        return layout.activation(module, h), None
    if not layout.has_gate:
        return h, Activation(layout.activation)
    if len(layout.first) == 1 and not layout.is_concatenated:
        h = h.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return h, Activation(_GATED[layout.activation])


def _of_rows(scale: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the scale of each row's expert, `[N, 1]`; of rows of no expert any."""
    rows = torch.arange(y.shape[0], device=y.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets, rows, right=True).clamp(max=scale.shape[0] - 1)
    return scale.to(y.dtype).index_select(0, expert)[:, None]


def reason_against(module: nn.Module, layout: ExpertsLayout) -> str | None:
    """Return why `convert_experts` cannot convert a module; None: it can.

    Args:
        module: of experts, not converted.
        layout: how it may hold them.
    """
    if "forward" in vars(module):
        return "another library replaced its forward (hooks of a device map); convert before"
    return layout.reason_against(module) or clash(Experts, module)


def convert_experts(module: _Module, layout: ExpertsLayout) -> _Module:
    """Let a module of experts compute under the recipe of `hybridq.autocast`; return the module.

    Its class becomes one that is derived from `Experts` and from its own; nothing else changes, but
    that inside `quantized_model_init` its weights are quantized, each as one tensor.

    Args:
        module: of experts.
        layout: how it holds them.

    Raises:
        TypeError: `module` is no module, or `layout` no ExpertsLayout.
        ValueError: the module does not hold its experts so, or is converted already.

    Example:
        >>> import torch, hybridq
        >>> from hybridq.moe import ExpertsLayout, convert_experts
        >>> class Own(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(4, 32, 16))
        ...         self.down = torch.nn.Parameter(torch.randn(4, 16, 32))
        >>> layout = ExpertsLayout("up", "down", has_gate=False, activation="relu")
        >>> experts = convert_experts(Own(), layout)
        >>> x, top = torch.randn(10, 16), torch.rand(10, 4).topk(2)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     experts(x, top.indices, top.values).shape
        torch.Size([10, 16])
    """
    as_experts(module, layout)
    converted: Any = module
    converted.quantize_initial_weights()
    return module


def as_experts(module: nn.Module, layout: ExpertsLayout) -> None:
    """Change a module's class as `convert_experts` does, and quantize nothing.

    Args:
        module, layout: as there.

    Raises:
        TypeError, ValueError: as there.
    """
    given: object = module
    if not isinstance(given, nn.Module):
        raise TypeError(f"convert_experts: module must be a module, got {type(given).__name__}")
    kind: object = layout
    if not isinstance(kind, ExpertsLayout):
        raise TypeError(
            f"convert_experts: layout must be an ExpertsLayout, got {type(kind).__name__}"
        )
    if isinstance(module, GroupedModule):
        raise ValueError(
            f"convert_experts: a module is converted once, got {type(module).__name__}"
        )
    reason = reason_against(module, layout)
    if reason is not None:
        raise ValueError(
            f"convert_experts: {type(module).__name__} does not fit its layout: {reason}"
        )
    install()
    names = list(inspect.signature(module.forward).parameters)
    module.__dict__.update(
        experts_layout=layout,
        holds_transposed=layout.is_transposed,
        weight_parts={name: name for name in layout.weights},
        own_arguments=tuple(names),
    )
    module.__class__ = made_class(Experts, type(module))

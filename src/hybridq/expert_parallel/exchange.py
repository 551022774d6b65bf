"""TokenExchange: a block of experts over ranks, in one forward."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from .. import settings
from .._log import log_once
from .._torch_private import assert_async, out_of_graphs
from .._torch_ranks import functional_all_gather, process_group, wait_tensor
from ..distributed.agreement import Fingerprint, compare, gathered_values
from ..distributed.agreement.fingerprint import plan_digest
from ..distributed.collectives.groups import place
from ..kernels.operators import StatedFunction
from ..moe.exchange import Compute
from ..moe.permutation import rows_of
from ..nn.autograd import GradientPlane, TokenRows, take_rows
from ..nn.delayed_scaling import reduces_by_default
from ..recipes import QuantizerRole, Recipe, autocast
from ..recipes.boundary import boundary_quantizer
from ..recipes.recipe import recipe_by_key
from ..tensor import is_quantized
from ..tensor.in_graph import runs_at_once
from .copies import CopyPlaces
from .lanes import Lanes
from .plans import RoutePlan, Told, check_capacity, planned
from .token_placements import is_placed, taken_apart
from .transport import arrived_rows, incoming, outgoing, returned, row_text, send_rows

__all__ = ["BY_RECIPE", "ROLES", "TokenExchange"]

#: The word for formats that the recipe chooses, by roles.
BY_RECIPE = "recipe"
#: `tensor_type` of what travels to the experts and back, and of the gradients, which go the other
#: way.
ROLES = (("dispatch", "grad_dispatch"), ("combine", "grad_combine"))
#: Spec strings of values and of their gradients, to the experts and back; empty: as they are.
Formats = tuple[tuple[str, str], tuple[str, str]]
_RULE = "every rank must run the same experts under the same recipe, on tokens of one kind"


class _TimesInBackward(StatedFunction):
    """A tensor as it is, whose gradient is multiplied with a factor."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0] * ctx.factor, None


class _Forward(NamedTuple):
    """One forward of a module of experts.

    Attributes:
        module: the experts.
        recipe: that they compute under.
        formats: of what travels.
        compute: what this rank's experts make of rows that arrived.
    """

    module: Any
    recipe: Recipe | None
    formats: Formats
    compute: Compute


@dataclass(frozen=True)
class TokenExchange:
    """The ranks that have a module's experts, and how tokens travel between them.

    Attributes:
        name: of the process group.
        rank: this rank's number in it.
        sizes: experts of each rank.
        dispatch, combine: formats of values and of their gradients on the way to the experts and
            back: spec strings, `"recipe"`, or empty for values as they are.
        own_recipe: that experts compute under; None: the one in force.
        factor: what gradients of the experts' parameters are multiplied with.
        capacity: rows that each rank sends to each; None: as many as it has.
        replicas: name of the group of ranks that have the same experts; empty: there are none;
            None: not known.
        batch: ranks that compute one batch together; None: each has its own.
        has_same_tokens: these ranks have all tokens each, where those are plain tensors.
        batch_is_apart: some of these ranks have other ranks of experts.
        copies: which ranks have copies of which experts; None: there are none.
        is_symmetric: tokens travel by symmetric memory, where ranks have it.
    """

    name: str
    rank: int
    sizes: tuple[int, ...]
    dispatch: tuple[str, str] = ("", "")
    combine: tuple[str, str] = ("", "")
    own_recipe: Any = None
    factor: float = 1.0
    capacity: int | None = None
    replicas: str | None = ""
    batch: Lanes | None = None
    has_same_tokens: bool = True
    batch_is_apart: bool = False
    copies: CopyPlaces | None = None
    is_symmetric: bool = False

    @property
    def lanes(self) -> Lanes | None:
        """The ranks that have the same tokens, where those are plain tensors; None: no others."""
        return self.batch if self.has_same_tokens else None

    @property
    def first(self) -> int:
        """Number of this rank's first expert."""
        return sum(self.sizes[: self.rank])

    def recipe(self) -> AbstractContextManager[Any]:
        """Return the context of a forward: the recipe in force, or the exchange's own."""
        return nullcontext() if self.own_recipe is None else autocast(recipe=self.own_recipe)

    def own_part(self, parameter: Any) -> torch.Tensor:
        """Return this rank's part of a parameter of the experts.

        Args:
            parameter: a DTensor `[experts, ...]`.
        """
        from torch.distributed.tensor import Shard

        local: torch.Tensor = parameter.to_local(grad_placements=[Shard(0)])
        if self.factor != 1.0 and local.requires_grad and torch.is_grad_enabled():
            factor = self.factor
            if torch.compiler.is_compiling():  # torch 2.10 traces no hooks
                local = _TimesInBackward.apply(local, factor)
            else:
                local.register_hook(lambda grad: grad * factor)
        return local

    def with_copies(self, module: Any, own: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, and copies of other ranks' experts behind.

        Args:
            module: the experts.
            own: as `own_part` returned it.

        Raises:
            NotImplementedError: on every rank: it is quantized.
        """
        if self.copies is None:
            return own
        if is_quantized(own):
            raise NotImplementedError(
                f"experts {module.name}: copies are made of weights in high precision, got a "
                f"{type(own).__name__}; call copy_experts_ with {{}} first, or do not quantize them"
            )
        return self.copies.with_copies(own)

    def own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, copies included, of what every rank has whole.

        Args:
            tensor: `[experts, ...]`.
        """
        if self.copies is not None:
            return self.copies.rows_with_copies(tensor)
        return tensor.narrow(0, self.first, self.sizes[self.rank])

    def local_tokens(
        self, module: Any, given: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any, Any]:
        """Return what this rank has of tokens, what ranks have the same ones, and how they lie.

        Args:
            module: the experts.
            given: what the forward takes; DTensors say by themselves who has the same tokens.

        Raises:
            TypeError, ValueError: on every rank: DTensors that are not parts of the tokens of the
                ranks of `tensor_parallel`.
        """
        if not any(is_placed(one) for one in given):
            return given, self.lanes, None
        takes_routing = module.experts_layout.takes == "routing"
        where = f"experts {module.name}".rstrip()
        local, placed = taken_apart(where, given, takes_routing, self.batch)
        return local, None if placed.is_sharded else self.batch, placed

    def own_tokens(
        self, module: Any, given: list[torch.Tensor], lanes: Lanes | None
    ) -> list[torch.Tensor]:
        """Return of what each token has the rows that this rank sends.

        Args:
            module: the experts.
            given: `[tokens, ...]` each.
            lanes: ranks that have the same tokens; None: there are no others.

        Raises:
            RuntimeError: on every rank and replica, in the first forward: ranks that are said
                to have the same tokens have not.
        """
        if lanes is None:
            return given
        self._check_lanes(module, given[0], lanes)
        return [lanes.own(one) for one in given]

    def own_sorted(
        self, module: Any, x: torch.Tensor, offsets: torch.Tensor, lanes: Lanes | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of rows sorted by expert those that this rank sends, and where experts' end.

        Args:
            module: the experts.
            x: `[rows, in]`.
            offsets: int32 `[experts]`, where each expert's rows end.
            lanes: as for `own_tokens`.

        Raises:
            RuntimeError: as `own_tokens` does.
        """
        if lanes is None:
            return x, offsets
        self._check_lanes(module, x, lanes)
        own, first = lanes.own(x), lanes.first(x.shape[0])
        return own, (offsets - first).clamp(0, own.shape[0])

    def _check_lanes(self, module: Any, x: torch.Tensor, lanes: Lanes) -> None:
        """Compare the tokens of the first forward."""
        known = module.__dict__.get("_compared_lanes")
        if known == lanes or torch.compiler.is_compiling():
            return
        problem = lanes.problem(f"experts {module.name}".rstrip(), x)
        # The other ranks of these experts would wait for those that stop, and so would replicas.
        for group in filter(None, (self.name, self.replicas)):
            told = gathered_values(problem, process_group(group))
            problem = problem or next(filter(None, told), "")
        if problem:
            raise RuntimeError(problem)
        module.__dict__["_compared_lanes"] = lanes

    def all_tokens(self, y: torch.Tensor, count: int, lanes: Lanes | None) -> torch.Tensor:
        """Return what all ranks have made of the tokens of which each has sent its rows.

        Args:
            y: `[rows, out]`, of this rank's.
            count: of all tokens.
            lanes: as for `own_tokens`.
        """
        return y if lanes is None else lanes.all(y, count)

    def placed_result(self, y: torch.Tensor, placed: Any) -> torch.Tensor:
        """Return the result as the tokens lie.

        Args:
            y: `[..., out]`, of this rank's tokens.
            placed: as `local_tokens` returned it.
        """
        made: torch.Tensor = y if placed is None else placed.put(y)
        return made

    def run(
        self,
        module: Any,
        recipe: Recipe | None,
        x: torch.Tensor,
        offsets: torch.Tensor,
        compute: Compute,
    ) -> torch.Tensor:
        """Return what the experts of all ranks make of this rank's rows, `[rows, out]`.

        Without a capacity sizes are not known before, and a graph breaks here.

        Args:
            module: the experts.
            recipe: of this forward.
            x: `[rows, in]`, sorted by expert.
            offsets: int32 `[experts]`, where each expert's rows end.
            compute: what this rank's experts make of rows that arrived.

        Raises:
            RuntimeError: on every rank: ranks differ in the module, the recipe or the tokens, or
                one of them has more rows for a rank than the capacity (on replicas, too).
        """
        forward = _Forward(module, recipe, self._formats(module, recipe), compute)
        run = self._run if self.capacity is not None else self._run_at_once
        return run(forward, x, offsets)

    @out_of_graphs
    def _run_at_once(
        self, forward: _Forward, x: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        return self._run(forward, x, offsets)

    def _run(self, forward: _Forward, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        dealt = None if self.copies is None else self.copies.dealt(offsets, x.shape[0])
        if dealt is not None:
            x, offsets = take_rows(x, TokenRows(dealt.order, dealt.inverse[:, None])), dealt.offsets
        y = self._there_and_back(forward, x, offsets)
        if dealt is None:
            return y
        return take_rows(y, TokenRows(dealt.inverse, dealt.order[:, None]))

    def _there_and_back(
        self, forward: _Forward, x: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return what ranks make of rows sorted by the place that multiplies them."""
        module, recipe, formats, compute = forward
        given = (recipe, x.dtype, x.shape[1], x.requires_grad, torch.is_grad_enabled(), formats)
        note = self._note(module, given)
        counts = (offsets, x.shape[0], note, self.capacity, self.is_symmetric)
        where = f"experts {module.name}".rstrip()
        plan, told = self._planned(where, *counts)
        self._check_notes(module, given, note, told.notes, where)
        check_capacity(where, self._most(where, told.most), self.capacity)
        self._check_replicas(module, recipe)
        self._check_copies(module, recipe)
        meanwhile = module.meanwhile
        is_apart = meanwhile is not None
        sent = send_rows(outgoing(x, plan), plan, formats[0], is_apart=is_apart)
        if meanwhile is not None:
            meanwhile()
        arrived, made = arrived_rows(sent)
        order = plan.arrived
        rows = rows_of(order)._replace(made=made)
        if torch.compiler.is_compiling():  # nothing is handed on beside tensors
            y = compute(arrived, order.offsets, rows, None)
            back = take_rows(y, TokenRows(order.inverse.flatten(), order.order[:, None]))
            return incoming(send_rows(back, plan, formats[1], is_back=True).values(), plan)
        arriving = GradientPlane() if formats[1][1] and torch.is_grad_enabled() else None
        y = compute(arrived, order.offsets, rows, arriving)
        return incoming(returned(y, plan, formats[1], arriving), plan)

    def _planned(self, where: str, *counts: Any) -> tuple[RoutePlan, Told]:
        """Return the plan, and what all ranks told each other; say where a rank is missing."""
        sizes = self.sizes if self.copies is None else self.copies.by_rank
        if torch.compiler.is_compiling():
            return planned(self.name, self.rank, sizes, *counts)
        try:
            return planned(self.name, self.rank, sizes, *counts)
        except RuntimeError as error:
            raise RuntimeError(
                f"{where}: all {len(self.sizes)} ranks of the experts must exchange tokens, got no "
                f"answer from one of them, which may be gone: {error}"
            ) from error

    def _most(self, where: str, most: torch.Tensor | None) -> torch.Tensor | None:
        """Return the rows that ranks have for one rank at most, of all that compute together.

        Ranks of a batch that have other ranks of experts, and replicas, which reduce gradients
        with these ranks, would wait for those that stop.
        """
        if most is None:
            return None
        if self.batch_is_apart and self.batch is not None:
            most = _gathered(most, self.batch.group, self.batch.world)
        if self.replicas:
            return _gathered(most, self.replicas, place(where, self.replicas)[1])
        if self.replicas is None:
            log_once(
                "capacity without replicas",  # one module stands for all
                f"{where}: more rows than the capacity are an error on the ranks of these experts "
                "alone, and others that reduce gradients with them would wait; give "
                "ExpertRanks(mesh['ep'], replicas=mesh['dp'])",
            )
        return most

    def _check_notes(
        self, module: Any, given: tuple[Any, ...], note: int, notes: torch.Tensor, where: str
    ) -> None:
        """Raise on every rank where ranks run different things; say which, where notes are here."""
        if torch.compiler.is_compiling() or notes.device.type != "cpu":
            assert_async((notes == note).all(), f"{where}: ranks differ; {_RULE}")
        elif bool((notes != note).any()):
            told = Fingerprint(tuple(_lines(module, given)))
            compare(told, process_group(self.name), where, _RULE)

    def _check_replicas(self, module: Any, recipe: Recipe | None) -> None:
        """Raise where amaxes are to be reduced over ranks that are not known; all ranks agree."""
        if self.replicas is not None or recipe is None:
            return
        if any(reduces_by_default(module.plan_of(recipe, one)) for one in module.parts_of(recipe)):
            raise RuntimeError(
                f"experts {module.name}: delayed scaling reduces amaxes over the ranks that have "
                "the same experts, which are not known where experts do not lie over all ranks; "
                "give ExpertRanks(mesh['ep'], replicas=mesh['dp']) to parallelize_experts, or take "
                "a recipe with reduce_amax=False, got neither"
            )

    def _check_copies(self, module: Any, recipe: Recipe | None) -> None:
        """Raise where an expert's history would be of several ranks; all ranks agree."""
        if self.copies is None or recipe is None:
            return
        if any(module.plan_of(recipe, one).is_delayed for one in module.parts_of(recipe)):
            raise NotImplementedError(
                f"experts {module.name}: under delayed scaling an expert has one history, on one "
                "rank, got copies of experts; take a recipe without histories, or copy_experts_ "
                "with {}"
            )

    def _formats(self, module: Any, recipe: Recipe | None) -> Formats:
        """Return the spec strings of the way to the experts and of the way back."""

        def pair(own: tuple[str, str], roles: tuple[str, str]) -> tuple[str, str]:
            forward, backward = (
                _by_role(module, recipe, role) if one == BY_RECIPE else one
                for one, role in zip(own, roles, strict=True)
            )
            return forward, backward

        return pair(self.dispatch, ROLES[0]), pair(self.combine, ROLES[1])

    def _note(self, module: Any, given: tuple[Any, ...]) -> int:
        """Return a number that ranks have in common if they run the same."""
        if torch.compiler.is_compiling():
            recipe, *_, formats = given
            return _note_of(module.name, "" if recipe is None else recipe.key, formats)
        key = (settings.current().backend, *given)
        known: tuple[Any, int] | None = module.__dict__.get("_exchange_note")
        if known is None or known[0] != key:
            known = key, _digest(repr(_lines(module, given)))
            module.__dict__["_exchange_note"] = known
        return known[1]


def _gathered(most: torch.Tensor, group: str, world: int) -> torch.Tensor:
    """Return the largest values of all ranks of a group."""
    return wait_tensor(functional_all_gather(most.max().view(1), world, group))


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@runs_at_once
def _note_of(name: str, key: str, formats: Formats) -> int:
    """Return the number that the graphs of ranks have in common if they are of the same block.

    Args:
        name: of the module.
        key: of its recipe; empty: there is none.
        formats: of messages.
    """
    plan = "" if not key else type(recipe_by_key(key)).__name__
    return _digest(repr((name, plan, formats)))


def _by_role(module: Any, recipe: Recipe | None, role: str) -> str:
    """Return the spec string that a recipe gives a role; empty: values travel as they are."""
    if recipe is None:
        return ""
    if torch.compiler.is_compiling():
        return _role_text(recipe.key, module.module_type, role, module.name)
    return row_text(
        "dispatch", boundary_quantizer(recipe, QuantizerRole(module.module_type, role, module.name))
    )


@runs_at_once
def _role_text(key: str, module_type: str, role: str, name: str) -> str:
    """Return `_by_role` of the recipe whose key is `key`."""
    made = boundary_quantizer(recipe_by_key(key), QuantizerRole(module_type, role, name))
    return row_text("dispatch", made)


def _lines(module: Any, given: tuple[Any, ...]) -> list[tuple[str, str]]:
    """Return what ranks must have in common in one forward."""
    recipe, dtype, features, needs_grad, has_grad, formats = given
    own = cast("Recipe | None", recipe)
    lines = [
        ("the module", module.name or type(module).__name__),
        ("the dtype of tokens", str(dtype)),
        ("the features of tokens", str(features)),
        ("whether tokens need a gradient", str(bool(needs_grad))),
        ("whether gradients are recorded", str(bool(has_grad))),
        ("the formats of messages", " ".join(str(one) for pair in formats for one in pair)),
    ]
    if own is not None and own.reads_names:  # each expert may have quantizers of its own
        return [*lines, ("the recipe", type(own).__name__)]
    for part in sorted(set(module.weight_parts.values())):
        plan = None if own is None else module.plan_of(own, part)
        lines.append((f"the quantizers of {part}", plan_digest(plan).hex()))
    return lines

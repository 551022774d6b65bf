"""What each slot's format changes of the loss: runs with one slot in another format each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ...formats import PlaneSpec
from ...kernels.inputs import wide
from ...quantizers import IdentityQuantizer, Quantizer
from ...recipes import CustomRecipe, QuantizerRole, Recipe, get
from ...recipes.choices import CHOICES, with_choices_of
from ...recipes.gemm_words import word
from .rows import SlotRow
from .running import Run
from .untouched import untouched

__all__ = ["loss_changes", "losses", "switched"]

#: What recipes are asked for operands of attention, by the report's names of them.
_ATTENTION: Final = {
    **dict.fromkeys(("query", "key", "value"), "qkv"),
    "attention_weights": "s",
    "grad_attention": "do",
    "grad_scores": "dp",
}
#: Length of the step after which gradients are compared, over that of all parameters.
_STEP: Final = 1e-2


@dataclass(frozen=True, repr=False)
class _Switched(Recipe):
    """A recipe that is `base` but for one slot of one module; choices are those of `base`.

    Args:
        base: any; a module follows what `base.for_name` gives.
        role: name of the module.
        slot: as recipes are asked.
        quantizer_of: makes the slot's quantizer.
    """

    base: Recipe
    role: str
    slot: str
    quantizer_of: Callable[[QuantizerRole], Quantizer]

    def __post_init__(self) -> None:
        chosen = CustomRecipe(self.quantizer_of).key
        self.seal(f"_Switched({self.base.key!r}, {self.role!r}, {self.slot!r}, {chosen!r})", True)
        # Of GEMMs outside modules. The class is frozen.
        for name in ("precision", "quantizes_attention"):
            object.__setattr__(self, name, getattr(self.base, name))

    def for_name(self, name: str) -> Recipe:
        """Return the base's recipe of a module, or one with its choices and the other slot."""
        own = self.base.for_name(name)
        head, _, last = name.rpartition(".")
        if name != self.role and not (head == self.role and last.isdecimal()):
            return own

        def factory(asked: QuantizerRole) -> Quantizer:
            if asked.tensor_type == self.slot:
                return self.quantizer_of(asked)
            return own.quantizer(asked)

        factory.fp8_dpa = own.quantizes_attention  # type: ignore[attr-defined]
        return CustomRecipe(factory, **{one: getattr(own, one) for one in CHOICES})

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """Return the quantizer that the recipe of the role's module makes."""
        return self.for_name(role.name).quantizer(role)


def switched(base: Recipe, role: str, tensor: str, quantizer: Callable[..., Quantizer]) -> Recipe:
    """Return a recipe that is `base` but for one slot of one module, its choices included.

    Args:
        base: any.
        role: name of the module, as roles have it; its experts are meant too.
        tensor: the slot, as a report names it; queries, keys and values are one.
        quantizer: makes the slot's quantizer of its role.
    """
    return _Switched(base, role, _ATTENTION.get(tensor, tensor), quantizer)


def check_roles(where: str, layers: Iterable[tuple[str, str, str]]) -> None:
    """Raise where a recipe cannot tell two layers apart: it asks them by one name.

    Args:
        where: who asks, for the error.
        layers: the layer, its name as roles have it, and a tensor of it.

    Raises:
        ValueError: two layers have one name.
    """
    known: dict[str, str] = {}
    for layer, role, _ in sorted(layers):
        other = known.setdefault(role, layer)
        if role and other != layer:
            raise ValueError(
                f"{where} needs layers with names of their own, by which a recipe is asked, got "
                f"{role!r} of both {other!r} and {layer!r}, which were converted apart; "
                "hybridq.convert(model) of the whole names them"
            )


def loss_changes(
    run: Run,
    recipe: Recipe | None,
    rows: Sequence[SlotRow],
    formats: Mapping[str, PlaneSpec | Recipe],
) -> dict[tuple[str, str, str, bool], float]:
    """Return what the format of each slot adds to the loss: one run more for each.

    Of inputs and weights it is the loss of the run less that with the slot in high precision; of
    gradients, the same of the loss after a step against the gradient, of 1/100 of the parameters'
    length. Where the run quantizes nothing, it is what each format would add.

    Args:
        run: of the model.
        recipe: of the run, or None.
        rows: of its report.
        formats: what-if.

    Returns:
        By layer, tensor, format and whether that is in the run.

    Raises:
        ValueError: a layer has no name for a recipe, or the run has no loss.
    """
    base = get("bf16") if recipe is None else recipe
    own = {(row.layer, row.role, row.tensor) for row in rows if row.in_run and not row.is_plain}
    check_roles("report: switch=True", own)
    has_gradients = any(row.tensor.startswith("grad_") for row in rows)
    before, after = losses(run, base, has_gradients=has_gradients)
    found: dict[tuple[str, str, str, bool], float] = {}

    def changed(role: str, tensor: str, quantizer: Callable[..., Quantizer]) -> float:
        if not role:
            raise ValueError(
                "report: switch=True needs modules with names, got one without; "
                "hybridq.convert(model) names them"
            )
        recipe = switched(base, role, tensor, quantizer)
        own = losses(run, recipe, base, has_gradients=has_gradients)
        return own[1] - after if tensor.startswith("grad_") else own[0] - before

    for layer, role, tensor in sorted(own):
        change = -changed(role, tensor, lambda _: IdentityQuantizer())
        for row in rows:
            if (row.layer, row.tensor, row.in_run) == (layer, tensor, True) and not row.is_plain:
                found[layer, tensor, row.format, True] = change
    if own:
        return found
    slots = dict.fromkeys((row.layer, row.role, row.tensor) for row in rows)
    for layer, role, tensor in slots:
        for one in formats.values():
            change = changed(role, tensor, _quantizer_of(one))
            for row in rows:
                is_slot = (row.layer, row.tensor, row.in_run) == (layer, tensor, False)
                if is_slot and _is_of(row.format, one, role, tensor):
                    found[layer, tensor, row.format, False] = change
    return found


def _quantizer_of(one: PlaneSpec | Recipe) -> Callable[[QuantizerRole], Quantizer]:
    if not isinstance(one, Recipe):
        return lambda _: Quantizer(one, one)

    def chosen(asked: QuantizerRole) -> Quantizer:
        own = one.for_name(asked.name)
        choices = (own.backward_override, own.columnwise_source)
        return with_choices_of({asked.tensor_type: own.quantizer(asked)}, *choices)[
            asked.tensor_type
        ]

    return chosen


def _is_of(label: str, one: PlaneSpec | Recipe, role: str, tensor: str) -> bool:
    if isinstance(one, PlaneSpec):
        return word(one) == label
    made = _quantizer_of(one)(QuantizerRole("linear", tensor, role))
    return label in [word(spec) for spec in (made.rowwise, made.columnwise) if spec is not None]


def losses(
    run: Run, recipe: Recipe, last: Recipe | None = None, *, has_gradients: bool = False
) -> tuple[float, float]:
    """Return the loss of a run under a recipe, and that after a step against its gradient.

    Args:
        run: of the model.
        recipe: of the run.
        last: of the loss after the step; None: the same.
        has_gradients: whether the run is known to have a backward.

    Raises:
        ValueError: the run has no loss, or a run with a backward leaves no gradients.
    """
    with untouched(run.model, run.data):
        loss = run(recipe)
        if loss is None:
            raise ValueError(f"{run.owner}: switch=True needs a loss, got none of the run")
        known = [(one, _gradient(one)) for one in run.model.parameters()]
        moved = [(one, gradient) for one, gradient in known if gradient is not None]
        if not (run.backward and moved):
            if run.backward and has_gradients and any(one.requires_grad for one, _ in known):
                raise ValueError(
                    f"{run.owner}: a loss after a step needs the gradients that a run leaves, got "
                    "none; a function of the model must not end with zero_grad()"
                )
            return loss, loss
        with torch.no_grad():
            were = [one.detach().clone() for one, _ in moved]
            length = _norm([one.detach() for one, _ in moved])
            against = _norm([gradient for _, gradient in moved])
            scale = _STEP * length / against if against > 0.0 else 0.0
            try:
                for one, gradient in moved:
                    one.sub_((gradient * scale).to(one.dtype))
                after = run._replace(backward=False)(last or recipe)
            finally:
                for (one, _), value in zip(moved, were, strict=True):
                    one.copy_(value)
    return loss, loss if after is None else after


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what a run left as a parameter's gradient, in `grad`, `main_grad` or both."""
    main = getattr(parameter, "main_grad", None)
    if not isinstance(main, torch.Tensor) or main.shape != parameter.shape or not bool(main.any()):
        return parameter.grad
    return main if parameter.grad is None else main + parameter.grad


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(wide(one).square().sum()) for one in tensors))

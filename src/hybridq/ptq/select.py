"""Which tensors of a checkpoint are quantized, and how."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ..converters import LEAST_WIDTH, keeps_precision
from ..errors import SpecError, names_in
from ..kernels.inputs import HIGH_PRECISION
from ..quantizers import Quantizer
from ..recipes import QuantizerRole, Recipe, get, names
from .header import TORCH_DTYPES, Entry
from .record import Record

__all__ = [
    "DEFAULT_EXCLUDE",
    "DEFAULT_INCLUDE",
    "EMBEDDINGS",
    "Selection",
    "tell_of_dtypes",
    "tell_of_unused",
]

#: Names of tensors that are quantized unless others are asked for; of these, matrices only.
DEFAULT_INCLUDE: Final = ("*.weight",)
#: Names of embeddings.
EMBEDDINGS: Final = (
    *("*embed*", "*.wte.*", "wte.*", "*.wpe.*", "wpe.*"),
    *("shared.weight", "*.shared.weight"),  # of an encoder and its decoder
)
#: Of those, embeddings and norms are not; nor are heads, routers, adapters and narrow matrices,
#: which `hybridq.convert` leaves alone by the same list.
DEFAULT_EXCLUDE: Final = (
    *EMBEDDINGS,
    *("*norm*", "*.ln_*", "ln_*"),
    *("*lm_head*", "head.weight", "lm_loss.weight", "pred_layer.*"),
)
_SUFFIX: Final = ".weight"


@dataclass(frozen=True)
class Selection:
    """Which tensors of a checkpoint are quantized, and by which quantizer.

    Only tensors in FP32, BF16 or FP16 are: matrices, and stacks of matrices `[E, rows, cols]` that
    `include` names, each matrix of a stack by itself. All others are copied. Of a weight W that its
    model keeps as `[in, out]` (GPT-2's `Conv1D`), the planes are those of `W.T`, and so change
    places: what is asked for as rowwise is stored as columnwise.

    Args:
        quantizer: of every chosen tensor; None where a recipe says it.
        recipe: name of a recipe, or a recipe: asked for the weight of the module whose name is the
            tensor's without `.weight`.
        include: globs of names; a name is chosen if one of them matches. If there are any, only
            `exclude` takes from them.
        exclude: globs of names that are not chosen. Without `include`, every matrix `*.weight` is
            chosen but `DEFAULT_EXCLUDE`, what `hybridq.convert` leaves alone by its name or width
            or, where the model can be asked, in the model, and these.

    Raises:
        SpecError: not exactly one of quantizer and recipe; a quantizer that rounds stochastically,
            reduces over a group of processes, or quantizes nothing.
        TypeError: globs are one text, and no collection of them.
        TypeError, ValueError: `recipe` is neither a recipe nor the name of one.

    Example:
        >>> import hybridq
        >>> chosen = hybridq.ptq.Selection(hybridq.quantizer("nvfp4", None), exclude=("*.0.*",))
    """

    quantizer: Quantizer | None = None
    recipe: str | Recipe | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            globs = names_in(f"Selection: {name}", getattr(self, name))
            object.__setattr__(self, name, globs)
        if (self.quantizer is None) == (self.recipe is None):
            raise SpecError(
                "Selection: needs a quantizer or a recipe and not both, got "
                f"{'none' if self.quantizer is None else self.quantizer.text} and {self.recipe!r}"
            )
        if self.recipe is not None:
            get(self.recipe)
        elif self.quantizer is not None:
            _check(self.quantizer)
            if self.quantizer.is_identity:
                raise SpecError(
                    f"Selection: the quantizer must quantize, got {self.quantizer.text}"
                )

    def quantizer_of(self, entry: Entry) -> Quantizer | None:
        """Return the quantizer of a tensor, or None for one that is copied.

        Args:
            entry: the tensor, as a file's header has it.

        Raises:
            SpecError: the recipe gives a quantizer that rounds stochastically, or the weight is
                kept as `[in, out]` and its columnwise plane would be made of decoded rows.
        """
        return self.quantizer_for(entry) if self.chooses(entry) else None

    def quantizer_for(self, entry: Entry) -> Quantizer | None:
        """Return the quantizer of a tensor that is chosen; None: the recipe says to copy it.

        Args:
            entry: the tensor.

        Raises:
            SpecError: as `quantizer_of`.
        """
        if self.quantizer is not None:
            return (
                _with_swapped_planes(self.quantizer, entry)
                if entry.is_transposed
                else self.quantizer
            )
        kind = "linear" if len(entry.shape) == 2 else "grouped_linear"
        role = QuantizerRole(kind, "weight", entry.name.removesuffix(_SUFFIX))
        made = get(self.recipe).ask(role).undelayed()  # type: ignore[arg-type]
        _check(made)
        if made.is_identity:
            return None
        return _with_swapped_planes(made, entry) if entry.is_transposed else made

    def chooses(self, entry: Entry, is_quantized: bool = False) -> bool:
        """Return whether a tensor is chosen.

        Args:
            entry: the tensor.
            is_quantized: it is quantized already, which says more than its name does.
        """
        return can_quantize(entry) and self._names(entry, is_quantized)

    def leaves_for_dtype(self, entry: Entry) -> bool:
        """Return whether a tensor would be chosen if it were FP32, BF16 or FP16.

        Args:
            entry: the tensor.
        """
        is_wide = TORCH_DTYPES.get(entry.dtype, torch.bool).is_floating_point
        takes = not is_wide or can_quantize(entry) or len(entry.shape) not in (2, 3)
        return not takes and self._names(entry, is_quantized=False)

    def _names(self, entry: Entry, is_quantized: bool) -> bool:
        """Return whether a tensor is chosen by its name and shape."""
        if any(fnmatch.fnmatchcase(entry.name, glob) for glob in self.exclude):
            return False
        if self.include:
            return any(fnmatch.fnmatchcase(entry.name, glob) for glob in self.include)
        return is_quantized or (
            len(entry.shape) == 2
            and any(fnmatch.fnmatchcase(entry.name, glob) for glob in DEFAULT_INCLUDE)
            and not any(fnmatch.fnmatchcase(entry.name, glob) for glob in DEFAULT_EXCLUDE)
            and not keeps_precision(entry.name.removesuffix(_SUFFIX), _features(entry))
            and min(entry.shape) >= LEAST_WIDTH
        )

    def without_tensors(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the globs that match none of these names.

        Args:
            names: of tensors.
        """
        known = tuple(names)
        globs = dict.fromkeys((*self.include, *self.exclude))
        found = (one for one in globs if not any(fnmatch.fnmatchcase(name, one) for name in known))
        return tuple(found)

    def record_of(self, entry: Entry) -> Record | None:
        """Return the record of a tensor that will be quantized, or None."""
        quantizer = self.quantizer_of(entry)
        if quantizer is None:
            return None
        return Record(entry.name, quantizer, entry.shape, TORCH_DTYPES[entry.dtype])

    def as_dict(self) -> dict[str, Any]:
        """Return the selection as JSON can hold it, to tell whether two are the same."""
        recipe = self.recipe
        if recipe is not None and recipe not in names():
            recipe = repr(get(recipe))
        return {
            "quantizer": None if self.quantizer is None else self.quantizer.text,
            "recipe": recipe,
            "include": list(self.include),
            "exclude": list(self.exclude),
        }


def tell_of_unused(
    selection: Selection, names: Iterable[str], has_stacks: bool, warn: Callable[[str], None]
) -> None:
    """Warn of globs and of a recipe's rules that match nothing: they change nothing.

    Args:
        selection: of what is quantized.
        names: of all tensors of the source.
        has_stacks: a recipe is asked for each expert of a stack, by names that are not known here.
        warn: is told.
    """
    known = tuple(names)
    for glob in selection.without_tensors(known):
        what = "include" if glob in selection.include else "exclude"
        warn(f"the {what} pattern {glob!r} matches no tensor of the source, and changes nothing")
    if selection.recipe is not None and not has_stacks:
        unfollowed = get(selection.recipe).unfollowed(one.removesuffix(_SUFFIX) for one in known)
        for rule in unfollowed:
            warn(f"no weight of the source follows the recipe's rule {rule!r}")


def tell_of_dtypes(
    selection: Selection,
    entries: Iterable[Entry],
    keeps: Callable[[str], bool],
    warn: Callable[[str], None],
) -> None:
    """Warn of weights that are copied because no quantizer takes their dtype.

    Args:
        selection: of what is quantized.
        entries: all tensors of the source that are not quantized.
        keeps: whether the model itself keeps a tensor of a name in high precision.
        warn: is told.
    """
    left = [one for one in entries if selection.leaves_for_dtype(one)]
    if not selection.include:
        left = [one for one in left if not keeps(one.name)]
    if left:
        dtypes = " and ".join(sorted({one.dtype for one in left}))
        more = f" and {len(left) - 1} more weights" if len(left) > 1 else ""
        warn(
            f"{left[0].name!r}{more} of {dtypes} stay as they are: only tensors of F32, BF16 and "
            "F16 are quantized"
        )


def can_quantize(entry: Entry) -> bool:
    """Return whether a tensor has a dtype and a shape that quantizers take here."""
    return TORCH_DTYPES.get(entry.dtype) in HIGH_PRECISION and len(entry.shape) in (2, 3)


def _features(entry: Entry) -> tuple[int, int]:
    """Return the input and output features of a matrix of a file."""
    out, into = entry.shape
    return (out, into) if entry.is_transposed else (into, out)


def _with_swapped_planes(quantizer: Quantizer, entry: Entry) -> Quantizer:
    """Return what makes the planes of `W.T` of a weight W that is kept as `[in, out]`.

    The columnwise plane of W is the rowwise one of `W.T`: blocks along `in`, as the forward needs.
    """
    if quantizer.columnwise_source != "original":
        raise SpecError(
            f"Selection: {entry.name!r} is kept as [in, out], so its rowwise plane would have to "
            f"be made of the columnwise one, got {quantizer.text}; leave it out with an exclude "
            "pattern"
        )
    return replace(
        quantizer,
        rowwise=quantizer.columnwise,
        columnwise=quantizer.rowwise,
        rowwise_usage=quantizer.columnwise_usage,
        columnwise_usage=quantizer.rowwise_usage,
    )


def _check(quantizer: Quantizer) -> None:
    if quantizer.is_stochastic:
        raise SpecError(
            "Selection: a checkpoint is a function of its source, so nothing is rounded "
            f"stochastically, got {quantizer.text}"
        )
    if quantizer.amax_group is not None:
        raise SpecError(
            f"Selection: amax is not reduced over a group of processes, got {quantizer.text}"
        )

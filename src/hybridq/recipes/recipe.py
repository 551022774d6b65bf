"""Recipe: which quantizer each slot of a module gets. Frozen values, compared by content."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from ..quantizers import DelayedScalingRequest, Quantizer
from .asking import ask, factory_name
from .choices import CHOICES, GemmPrecision, check_choice, check_choices
from .roles import QuantizerRole
from .toml_text import write

__all__ = ["ChoosingRecipe", "CustomRecipe", "Recipe", "RecipeSource", "recipe_by_key"]

_R = TypeVar("_R", bound="Recipe")


class RecipeSource:
    """What `hybridq.autocast` takes: something that has a recipe at any moment."""

    #: Whether that is the same one at every step, so that it stands wherever a Recipe may.
    is_steady: ClassVar[bool] = False

    @property
    def current(self) -> Recipe:
        """The recipe of a block that is entered now."""
        raise NotImplementedError(f"{type(self).__name__}.current: must be overridden")

    def unfollowed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns of rules that none of these modules follows.

        Rules of `ByName` are such. A module follows the first rule that its name matches, so a rule
        behind a wider one is followed by nobody.

        Args:
            names: qualified names of modules, as `hybridq.convert` gives them.

        Example:
            >>> import hybridq
            >>> rules = [("*.up", "bf16"), ("blocks.0.*", "mxfp8"), ("*.donw", "bf16")]
            >>> recipe = hybridq.recipes.ByName(rules, default="nvfp4")
            >>> recipe.unfollowed(["blocks.0.up", "blocks.1.up", "blocks.1.down"])
            ('blocks.0.*', '*.donw')
        """
        return ()

    def to_toml(self) -> str:
        """Return this as the text of a TOML file, which `hybridq.recipes.load` reads.

        Raises:
            ValueError: a file cannot say it: a factory, or a recipe class of one's own.

        Example:
            >>> import hybridq
            >>> print(hybridq.recipe("nvfp4", wgrad="bf16", precision="exact").to_toml())
            fprop = ["nvfp4", "nvfp4_16x16"]
            dgrad = ["nvfp4;sr", "nvfp4_16x16"]
            wgrad = "bf16"
            precision = "exact"
        """
        return write(self._table())

    def _table(self) -> dict[str, Any]:
        """Return the table of the file."""
        raise ValueError(f"to_toml: a file cannot say a {type(self).__name__}")


class Recipe(RecipeSource):
    """Base of all recipes: a value that makes one quantizer per role.

    A recipe is frozen and hashable. Two equal recipes are interchangeable: a module that is bound
    to one of them is not bound again for the other.

    Attributes:
        key: a string that is equal for equal recipes and different for different ones. It is what
            `torch.compile` guards, since it can compare strings but not arbitrary objects.
        reads_names: whether the quantizers may depend on `role.name`. Where they do not, modules
            that differ in their names only share one compiled graph.
        precision: of its GEMMs (docs/reference/gemm.md): `"auto"`, `"exact"` or `"fast"`, or a
            GemmPrecision where they differ.
        backward_override: None, `"high_precision"` or `"dequantized"`: what the backward
            multiplies instead of the columnwise planes; see docs/guides/recipes.md.
        columnwise_source: None, `"original"` or `"rowwise_dequantized"`: what the columnwise planes
            of inputs and weights are made of, whatever their quantizers say.

    The last three are choices: a recipe that wants to let one be made declares a field of that
    name, or derives from `ChoosingRecipe`, as all recipes of hybridq do.

    Source: ours; built-in recipes carry Transformer Engine's names and defaults.
    """

    key: str
    reads_names: bool = False
    #: Whether attention between projections is quantized too, by slots of the module type `"dpa"`.
    quantizes_attention: bool = False
    #: Whether its fields are options that a file may set.
    has_options: ClassVar[bool] = False
    precision: str | GemmPrecision = "auto"
    backward_override: str | None = None
    columnwise_source: str | None = None
    _blueprint: _Blueprint

    @property
    def current(self) -> Recipe:
        """This recipe."""
        return self

    def for_name(self, name: str) -> Recipe:
        """Return the recipe that a module of this qualified name follows: this one, or a part.

        Args:
            name: as in `QuantizerRole.name`.
        """
        return self

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """Return the quantizer of the slot that `role` describes.

        Args:
            role: the slot. An unknown `tensor_type` is treated as an input.

        Raises:
            TypeError, ValueError: a custom factory returned something else; the text names
                the role.
            NotImplementedError: a recipe class must override this.
        """
        raise NotImplementedError(f"{type(self).__name__}.quantizer: must be overridden")

    def ask(self, role: QuantizerRole) -> Quantizer:
        """Return `quantizer(role)`, as modules ask for it: a mistake in it names the slot.

        Args:
            role: the slot.

        Raises:
            RecipeError: it raised; the cause is what it raised.
            TypeError, ValueError: it returned no Quantizer.
        """
        return ask(f"{type(self).__name__}.quantizer", self.quantizer, role)

    def with_choices(self: _R, **choices: Any) -> _R:
        """Return this recipe with other choices.

        Args:
            choices: `precision`, `backward_override`, `columnwise_source`; those that are not
                given stay.

        Raises:
            ValueError: an unknown value, or two that contradict each other.
            TypeError: there is no such choice, or the recipe's class has no field for it.

        Example:
            >>> import hybridq
            >>> recipe = hybridq.recipes.get("nvfp4").with_choices(backward_override="dequantized")
            >>> recipe == hybridq.recipes.NVFP4BlockScaling(backward_override="dequantized")
            True
        """
        return self._with("with_choices", choices)

    def with_precision(self: _R, precision: str | GemmPrecision | Mapping[str, str]) -> _R:
        """Return this recipe with GEMMs of that precision.

        Args:
            precision: `"auto"`, `"exact"` or `"fast"`; or one for each GEMM, as a GemmPrecision or
                a mapping (`{"wgrad": "exact"}`: the others are `"auto"`).

        Raises:
            ValueError: another precision.
            TypeError: the recipe's class has no field `precision`.

        Example:
            >>> import hybridq
            >>> hybridq.recipes.get("mxfp8").with_precision("exact").precision
            'exact'
        """
        return self._with("with_precision", {"precision": precision})

    def _with(self: _R, where: str, choices: dict[str, Any]) -> _R:
        given = {name: check_choice(name, value, where) for name, value in choices.items()}
        changed = {name: value for name, value in given.items() if value != getattr(self, name)}
        if not changed:
            return self
        declared = {field.name for field in fields(self)}  # type: ignore[arg-type]
        for name, value in changed.items():
            if name not in declared:
                raise TypeError(
                    f"{where}: {type(self).__name__} has no field {name} to set, got {value!r}; "
                    f"declare `{name}: str = {CHOICES[name]!r}` or derive from "
                    "hybridq.recipes.ChoosingRecipe"
                )
        return replace(self, **changed)  # type: ignore[type-var]

    def __post_init__(self) -> None:
        self._check_choices()  # before the key is made of them
        self.seal(f"{type(self).__module__}.{self._key_text()}")

    def seal(self, key: str, reads_names: bool = False) -> None:
        """Set what is derived from the fields: the last thing that a constructor does.

        Args:
            key: of this recipe and of all that are equal to it.
            reads_names: what it makes depends on modules' names.
        """
        blueprint = _blueprints.get(key)
        if blueprint is None:
            blueprint = _blueprints[key] = _Blueprint(type(self), self._values())
        _set(self, key=key, reads_names=reads_names, _blueprint=blueprint)

    def _check_choices(self) -> None:
        """Give the choices their normal form; raise where they are none."""
        where = type(self).__name__
        for name in CHOICES:
            given = getattr(self, name)
            normal = check_choice(name, given, where)
            if normal is not given:
                _set(self, **{name: normal})
        check_choices(self.backward_override, self.columnwise_source, where)

    def _key_text(self) -> str:
        """Return what follows the module in the key: every field, choices last if made."""
        if type(self).__repr__ is not Recipe.__repr__:
            return repr(self)  # a class of its own prints what makes it
        shown = [(name, value) for name, value in self._values() if name not in CHOICES]
        shown += self._chosen()
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def __repr__(self) -> str:
        formats = self._formats_text()
        return f"<{self._call()}: {formats}>" if formats else self._call()

    def _call(self) -> str:
        """Return the call that makes this recipe, with the fields that are not at their default."""
        known = fields(self)  # type: ignore[arg-type]
        defaults = {field.name: field.default for field in known}
        shown = [
            (name, value)
            for name, value in self._values()
            if name not in CHOICES and value != defaults[name]
        ]
        shown += self._chosen()
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def _formats_text(self) -> str:
        """Return the formats of its GEMMs where its class knows them, else nothing."""
        return ""

    def _table(self) -> dict[str, Any]:
        from .named import name_of  # whose recipes are of classes that derive from this one

        chosen = self._chosen()
        plain = self._with("to_toml", {name: CHOICES[name] for name, _ in chosen})
        name = name_of(plain)
        if name is None:
            raise ValueError(
                f"to_toml: a file says recipes by name, by formats and by rules, got {self._call()}"
            )
        return {"recipe": name, **self._chosen_table()}

    def _chosen_table(self) -> dict[str, Any]:
        values = self._chosen()
        return {
            name: value._asdict() if isinstance(value, GemmPrecision) else value
            for name, value in values
        }

    def _chosen(self) -> list[tuple[str, Any]]:
        """Return the choices that were made."""
        chosen = [(name, getattr(self, name)) for name in CHOICES]
        return [(name, value) for name, value in chosen if value != CHOICES[name]]

    def _values(self) -> _Values:
        known = fields(self)  # type: ignore[arg-type]
        return tuple((field.name, getattr(self, field.name)) for field in known)

    def __reduce__(self) -> tuple[object, ...]:
        # Keys number factories within one process: another process must make its own.
        return (_made_of, (type(self), self._values()))


_Values = tuple[tuple[str, Any], ...]


def _made_of(cls: type[Recipe], values: _Values) -> Recipe:
    """Return the recipe of a class whose fields have these values."""
    return cls(**dict(values))


def _set(recipe: Recipe, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(recipe, name, value)


@dataclass(frozen=True)
class _Blueprint:
    """What an equal recipe can be made of. All equal recipes hold the same one."""

    cls: type[Recipe]
    values: _Values


# Compiled code can hold a recipe's key but not the recipe. Weak: an entry lives exactly as long
# as some recipe of that key.
_blueprints: weakref.WeakValueDictionary[str, _Blueprint] = weakref.WeakValueDictionary()


def recipe_by_key(key: str) -> Recipe:
    """Return a recipe equal to the live one whose key is `key`.

    Raises:
        KeyError: no such recipe is alive.
    """
    blueprint = _blueprints[key]
    return _made_of(blueprint.cls, blueprint.values)


# One serial number per distinct factory. Weak: a factory made anew for each step is not kept alive;
# numbers are never reused, so no compiled graph can mistake a new factory for a dead one.
_serials: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
_next_serial = itertools.count()


def _serial(factory: object) -> int:
    try:
        return _serials.setdefault(factory, next(_next_serial))
    except TypeError:  # no weak references (a C callable, a class with __slots__)
        return next(_next_serial)


@dataclass(frozen=True, repr=False)
class ChoosingRecipe(Recipe):
    """A recipe with a field for each choice; its subclasses are frozen dataclasses.

    Args:
        precision, backward_override, columnwise_source: as in `Recipe`; by keyword only.

    Raises:
        ValueError: an unknown value, or two that contradict each other.
    """

    precision: str | GemmPrecision = field(default="auto", kw_only=True)
    backward_override: str | None = field(default=None, kw_only=True)
    columnwise_source: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, repr=False)
class CustomRecipe(ChoosingRecipe):
    """A recipe made of the caller's own function.

    Args:
        qfactory: `qfactory(role) -> Quantizer`, asked once per slot when a module is bound. It
            may return any quantizer, uniform or hybrid, a `DelayedScalingRequest`, or an
            `IdentityQuantizer` to leave the slot alone. It must be a pure function of the role. A
            function that never looks at `role.name` may say so with
            `qfactory.reads_names = False`: compiled modules that differ in their names only then
            share one graph. A function with `qfactory.fp8_dpa = True` is asked for the operands of
            attention, too: `role.module_type` is `"dpa"`, `role.tensor_type` `"qkv"`, `"s"`,
            `"do"` or `"dp"` (docs/guides/attention.md).
        precision, backward_override, columnwise_source: as in `Recipe`; by keyword only.

    Two custom recipes are equal if and only if their factories are (functions: the same object)
    and their choices are.

    Raises:
        TypeError: `qfactory` is not callable, or not hashable.
        ValueError: unknown choices.

    Example:
        >>> import hybridq
        >>> def factory(role):
        ...     if role.tensor_type == "grad_output":
        ...         return hybridq.MXFP8Quantizer("e5m2")
        ...     return hybridq.MXFP8Quantizer("e4m3")
        >>> recipe = hybridq.CustomRecipe(qfactory=factory)
        >>> recipe == hybridq.CustomRecipe(qfactory=factory)
        True
    """

    qfactory: Callable[[QuantizerRole], Quantizer | DelayedScalingRequest]

    def __post_init__(self) -> None:
        factory = self.qfactory
        if not callable(factory):
            raise TypeError(
                "CustomRecipe: qfactory must be callable, qfactory(role) -> Quantizer, got "
                f"{type(factory).__name__}"
            )
        try:
            hash(factory)
        except TypeError as error:
            raise TypeError(
                "CustomRecipe: qfactory must be hashable, since recipes are compared by it, got "
                f"{type(factory).__name__}"
            ) from error
        name = getattr(factory, "__qualname__", type(factory).__name__)  # as keys have it
        self._check_choices()
        chosen = "".join(f", {choice}={value!r}" for choice, value in self._chosen())
        self.seal(
            f"CustomRecipe({name}#{_serial(factory)}{chosen})",
            reads_names=bool(getattr(factory, "reads_names", True)),
        )
        _set(self, quantizes_attention=bool(getattr(factory, "fp8_dpa", False)))

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """Return what `qfactory(role)` returns; a request becomes a quantizer of the role.

        Raises:
            RecipeError: it raised; the text names the role, and the cause is what it raised.
            TypeError: it returned something else than a Quantizer.
            ValueError: it returned None.
        """
        return ask(f"CustomRecipe: qfactory {factory_name(self.qfactory)}", self.qfactory, role)

    def ask(self, role: QuantizerRole) -> Quantizer:
        """Return `quantizer(role)`, whose errors say all already."""
        return self.quantizer(role)

    def _call(self) -> str:
        named = self.qfactory if hasattr(self.qfactory, "__qualname__") else type(self.qfactory)
        shown = [f"{named.__module__}.{factory_name(self.qfactory)}"]
        shown += [f"{name}={value!r}" for name, value in self._chosen()]
        return f"CustomRecipe({', '.join(shown)})"

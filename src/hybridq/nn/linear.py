"""hybridq.Linear: nn.Linear whose three GEMMs run between quantized planes."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from .. import settings
from ..kernels.device import has_autocast
from ..recipes import Plan, Recipe, bind, install, is_recomputing, plan_by_key
from .function import linear
from .kept_weight import KeptWeight, kept_weight

__all__ = ["Linear"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Linear(nn.Linear):
    """`nn.Linear` that computes under the recipe of `hybridq.autocast`.

    Outside `hybridq.autocast` it is `nn.Linear`, bit for bit. Inside, input, weight and output
    gradient are quantized by the recipe's quantizers, and the forward and both backward GEMMs run
    between their planes. Parameters, initial values and state_dict are those of `nn.Linear`.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`; any size, any batch
            shape, no alignment.
        name: qualified name for the roles that a recipe's factory sees. Where it is None,
            `hybridq.convert` fills in the name within the model.

    Under `torch.autocast` input, weight and bias are taken in its dtype, as `nn.Linear` would.

    Raises:
        TypeError: `name` is no string.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(100, 50)
        >>> x = torch.randn(3, 7, 100)
        >>> with hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
        ...     y = layer(x)
        >>> y.shape
        torch.Size([3, 7, 50])
    """

    # Class attributes, so that a module whose __class__ `convert` changed has them too.
    name: str = ""
    _name_is_given: bool = False
    #: The last recipe bound and what it came to.
    _bound: tuple[Recipe, Plan] | None = None
    #: The recipe (or None) of the last training forward, in a tuple; empty before the first.
    _last_recipe: tuple[Any, ...] = ()
    #: The quantized weight of the last microbatch that said whether it was the first.
    _kept_weight: KeptWeight | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if name is not None:
            if not isinstance(name, str):
                raise TypeError(f"Linear: name must be a string, got {type(name).__name__}")
            self.name, self._name_is_given = name, True
        install()

    def forward(self, input: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Return `input @ weight.T + bias`.

        Args:
            input: `[..., in_features]`.
            is_first_microbatch: None: the weight is quantized in this forward; and unless
                `hybridq.autocast` says otherwise, in every one. True: it is quantized and kept.
                False: the caller promises that its values are those of the last True, and it is
                taken from there. A weight of other memory, version, shape or dtype, or another
                recipe, is quantized again; a write through `.data` cannot be seen. Without a
                recipe, and in code that torch compiles or captures, nothing is kept.

        Returns:
            `[..., out_features]`, in the input's dtype or torch.autocast's.

        Raises:
            RuntimeError: features or dtypes do not fit (as for `nn.Linear`).
            TypeError: a dtype that cannot be quantized, or `is_first_microbatch` is no bool.
            RecipeError: the recipe leaves a GEMM without a plane.

        Source: `is_first_microbatch`: Transformer Engine's name and meaning.
        """
        first: object = is_first_microbatch
        if first is not None and not isinstance(first, bool):
            got = type(first).__name__
            raise self._error(TypeError, f"is_first_microbatch must be a bool or None, got {got}")
        recipe = self._recipe()
        if recipe is None:
            return super().forward(input)
        plan = self._plan(recipe)
        if plan.is_plain and not torch.compiler.is_compiling():
            # The same bits as the planes would give. Compiled, only the planes give them: a
            # compiler that sees nn.Linear sums the bias's gradient in another order.
            return super().forward(input)
        return self._quantized(input, plan, is_first_microbatch)

    def _recipe(self) -> Any:
        """Return the recipe of this call, or None.

        In a recomputation that no recipe came along with (see `recipes.replay`), it is the one of
        this module's last training forward.
        """
        recipe = settings.current().recipe
        if torch.compiler.is_compiling():
            return recipe
        if is_recomputing():
            return self._last_recipe[0] if self._last_recipe else recipe
        if self.training or torch.is_grad_enabled():
            # Not through Module.__setattr__: this is bookkeeping on the hot path.
            self.__dict__["_last_recipe"] = (recipe,)
        return recipe

    def _plan(self, recipe: Recipe) -> Plan:
        if torch.compiler.is_compiling():
            # Nothing but texts may decide, since texts are what dynamo guards.
            return plan_by_key(recipe.key, self.name if recipe.reads_names else "")
        return self._bind(recipe)

    def _bind(self, recipe: Recipe) -> Plan:
        """Return the Plan of this module under `recipe`; made anew only for another recipe."""
        bound = self._bound
        if bound is not None and (bound[0] is recipe or bound[0] == recipe):
            return bound[1]
        plan = bind(recipe, self.name)
        self.__dict__["_bound"] = (recipe, plan)
        return plan

    def _quantized(
        self, input: torch.Tensor, plan: Plan, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        given: object = input
        if not isinstance(given, torch.Tensor):
            raise self._error(TypeError, f"input must be a Tensor, got {type(given).__name__}")
        x: torch.Tensor = given
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        own = weight
        kind = "cpu" if weight.is_cpu else weight.device.type
        if has_autocast(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = _cast(x, dtype), _cast(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        self._check(x, weight, bias)
        kept = None
        if not torch.compiler.is_compiling():
            if is_first_microbatch is None:
                is_first_microbatch = settings.current().is_first_microbatch
            if is_first_microbatch is not None:
                kept = kept_weight(
                    self._kept_weight, own, weight.dtype, plan.weight, is_first_microbatch
                )
                self.__dict__["_kept_weight"] = kept
        if x.dim() == 2:
            return linear(x, weight, bias, plan, kept)
        flat = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
        y = linear(flat, weight, bias, plan, kept)
        return y.view(*x.shape[:-1], self.out_features)

    def _check(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
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
        if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise self._error(
                RuntimeError,
                f"the last dimension of the input must be in_features={weight.shape[1]}, got "
                f"shape {tuple(x.shape)}",
            )
        if x.device != weight.device:
            raise self._error(
                RuntimeError,
                f"input and weight must be on one device, got {x.device} and {weight.device}",
            )

    def _error(self, kind: type[Exception], text: str) -> Exception:
        # The name is read here and nowhere on the way: dynamo guards what it reads, and modules
        # that differ in their names only shall share one graph.
        return kind(f"Linear {self.name}: {text}" if self.name else f"Linear: {text}")

    def _set_name(self, name: str) -> None:
        """Take the name that the module has in its model, unless the caller gave one."""
        if not self._name_is_given and self.name != name:
            self.name = name
            self.__dict__["_bound"] = None

    def __getstate__(self) -> dict[str, Any]:
        # What a recipe came to is remade when needed; a factory may not even be picklable.
        state = self.__dict__.copy()
        state.pop("_bound", None)
        state.pop("_last_recipe", None)
        state.pop("_kept_weight", None)
        return state

    def _forget_weight(self) -> None:
        """Free the quantized weight; `hybridq.forget(module)` calls it."""
        self.__dict__.pop("_kept_weight", None)

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        self._forget_weight()  # .to(), .half(), .cuda(): what is kept would only take memory
        return super()._apply(fn, recurse)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x as torch.autocast would pass it on: float64 and integers stay."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

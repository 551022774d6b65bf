"""hybridq.optim.Muon: momentum made orthogonal, on masters, with products between planes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import torch

from ..errors import must_be_one_of
from ..formats import PlaneSpec, PlaneText
from ..gemm import gemm_planes
from ..kernels.operators import contiguous_copy
from ..quantizers import Quantizer
from ..recipes import Plan, Recipe, bind, get
from ..storage import Plane
from .base import Base
from .masters import (
    MASTER,
    has_master,
    is_low,
    is_updated_itself,
    local,
    place,
    sharded_like,
)

__all__ = ["Muon", "margin_of", "orthogonalized"]

#: K. Jordan's, chosen for the steepest slope at zero.
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
BUFFER: Final = "momentum_buffer"
_RATES: Final = (None, "original", "match_rms_adamw")


def _plane(x: torch.Tensor, text: PlaneText) -> Plane:
    """Return the rowwise plane of a matrix."""
    if text.is_plain:
        return Plane.of(x)
    return Quantizer(PlaneSpec.parse(text.spec), None).quantize(x).tensor_storage.first


def _product(a: torch.Tensor, b: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return `a @ b.T` in FP32, as the forward of a linear module: a its input, b its weight."""
    left, right = _plane(a, plan.input.row), _plane(b, plan.weight.row)
    precision = plan.precision.fprop
    return gemm_planes(left, right, out_dtype=torch.float32, precision=precision)


def margin_of(plan: Plan) -> float:
    """Return what X is divided by before each iteration, so that rounding errors do not grow.

    It is `1 + sqrt(u)`, u being half a step of the coarsest element: 1.25 for E4M3, 1.5 for E2M1;
    1 where nothing is quantized.

    Args:
        plan: of the products.
    """
    specs = [PlaneSpec.parse(one.row.spec) for one in (plan.input, plan.weight)]
    elements = [one.format.element for one in specs if not one.format.is_identity]
    bits = [one.mantissa_bits for one in elements if one is not None]
    return 1 + math.sqrt(2.0 ** -(1 + min(bits))) if bits else 1.0


def orthogonalized(
    x: torch.Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Return BF16 `U S' V.T` where `x = U S V.T`: singular values are brought near one.

    `X <- a X + (b A + c A A) X` with `A = X X.T`, some times, from `X = x / max(norm(x), eps)`.
    With these coefficients a singular value that errors push beyond 1.3 grows without bound; so,
    with a plan, X is divided by `margin_of(plan)` before each of them.

    Args:
        x: `[rows, cols]`.
        coefficients: a, b, c of the quintic polynomial.
        steps: how often.
        eps: the least norm that x is divided by.
        plan: how the three products of a step are quantized; None: BF16 products of torch.

    Returns:
        BF16 `[rows, cols]`; with the default coefficients, singular values up to about 1.2 (BF16),
        1.3 (FP8, MXFP8) or 1.5 (NVFP4), and from about half of that where x has no tiny ones.

    Source: K. Jordan et al., Muon (2024); without a plan, the bits of `torch.optim.Muon`.
    """
    a, b, c = coefficients
    if plan is not None:
        margin = margin_of(plan)
        a, b, c = a / margin, b / margin**3, c / margin**5
    is_tall = x.shape[0] > x.shape[1]
    made = x.bfloat16()
    if is_tall:
        made = made.T
    made = made / made.norm().clamp(min=eps)
    for _ in range(steps):
        if plan is None:
            gram = made @ made.T
            update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            made = torch.addmm(made, update, made, beta=a)
            continue
        made = made.contiguous()
        gram = _product(made, made, plan).bfloat16()
        update = (b * gram + c * _product(gram, contiguous_copy(gram.T), plan)).bfloat16()
        product = _product(update, contiguous_copy(made.T), plan)
        made = (a * made + product).bfloat16()
    return made.T if is_tall else made


class Muon(Base, torch.optim.Optimizer):  # type: ignore[misc]
    """Muon for matrices of any precision: `torch.optim.Muon`, whose products follow a recipe.

    A step averages the gradient into a momentum, makes it orthogonal by Newton-Schulz iterations
    (`orthogonalized`), and subtracts it from the weight. Masters, quantized parameters,
    `main_grad` and writes are those of `hybridq.optim.AdamW`; the momentum is FP32. For FP32
    parameters and without a recipe the bits are those of `torch.optim.Muon`.

    Norms, biases, embeddings and heads are left to another optimizer, such as AdamW. Of sharded
    parameters (DTensor) each rank gathers the momentum and computes the whole update. Plain parts
    of larger matrices (modules made with `tp_group=`) are updated as matrices of their own.

    Args:
        params: matrices, or groups of them.
        lr: rate; see `adjust_lr_fn`.
        weight_decay: decoupled.
        momentum: weight of what is known in the average.
        nesterov: the update is the average of the gradient and the momentum.
        ns_coefficients, eps, ns_steps: of the iterations.
        adjust_lr_fn: None or `"original"`: the rate times `sqrt(max(1, rows / cols))`;
            `"match_rms_adamw"`: times `0.2 sqrt(max(rows, cols))`, so that rates of AdamW fit.
        recipe: a Recipe or the name of one, whose formats of a forward the products of the
            iterations have, left ones as inputs and right ones as weights; None: BF16.
        master_dtype: as for `hybridq.optim.AdamW`.

    Raises:
        ValueError: a parameter is no matrix, a number or word is out of range, or the recipe keeps
            a history of amaxes.
        TypeError: `recipe` is no recipe.

    Source: K. Jordan et al., Muon (2024); arguments and defaults are torch's, the recipe is ours.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(64, 32, dtype=torch.bfloat16)
        >>> muon = hybridq.optim.Muon([layer.weight], lr=0.02, recipe="mxfp8")
        >>> rest = hybridq.optim.AdamW([layer.bias])
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     layer(torch.randn(4, 64).bfloat16()).sum().backward()
        >>> muon.step(), rest.step()
        (None, None)
    """

    #: Told to those who look for optimizers that leave gradients in `main_grad` alone.
    takes_main_grad: Final = True
    _where = "Muon"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        recipe: Recipe | str | None = None,
        master_dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not float(value) >= 0.0:
                raise ValueError(f"Muon: {name} must not be negative, got {float(value)}")
        if adjust_lr_fn not in _RATES:
            raise ValueError(
                f"Muon: adjust_lr_fn {must_be_one_of(_RATES[1:], adjust_lr_fn, 'None or ')}"
            )
        if len(ns_coefficients) != 3 or not 0 <= ns_steps < 100:
            raise ValueError(
                "Muon: ns_coefficients must be three numbers and ns_steps 0 to 99, got "
                f"{ns_coefficients} and {ns_steps}"
            )
        if master_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"Muon: master_dtype must be float32 or bfloat16, got {master_dtype}")
        self._plan = None if recipe is None else bind(get(recipe), "muon")
        if self._plan is not None and self._plan.is_delayed:
            raise ValueError(
                f"Muon: recipe must quantize by the tensor's own amax, got {recipe!r}, which keeps "
                "a history; take its current scaling"
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "master_dtype": master_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices.

        Args:
            param_group: as for torch's optimizers.

        Raises:
            ValueError: a parameter is no matrix.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() != 2:
                self.param_groups.pop()
                raise ValueError(
                    f"Muon: parameters must be matrices, got shape {tuple(parameter.shape)}; give "
                    "the others to hybridq.optim.AdamW"
                )

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group, one after the other.

        Args:
            group: of `param_groups`.
        """
        for parameter in group["params"]:
            grad = self.gradient_of(parameter, group, "Muon")
            if grad is not None:
                self._update(parameter, grad, group)

    def _update(self, parameter: Any, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Do one step to one parameter; tensors are this rank's parts."""
        if grad.is_sparse:
            raise RuntimeError("Muon: gradients must be dense, got a sparse one")
        own = local(parameter)
        if is_low(own):
            own.quantizer_for_write("Muon")
        state: dict[str, Any] = self.state[parameter]
        dtype = own.dtype if is_updated_itself(own) else torch.float32
        grad = grad.to(dtype)
        if BUFFER not in state:
            state[BUFFER] = sharded_like(torch.zeros_like(grad), parameter)
        values = own.detach()
        if has_master(own, group["master_dtype"]):
            values = self.master_of(parameter, group)
        values = values.to(dtype)
        buffer, momentum = local(state[BUFFER]), group["momentum"]
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = self._orthogonal(update, parameter, group)
        rows, cols = parameter.shape
        rate = 1.0
        if group["adjust_lr_fn"] == "match_rms_adamw":
            rate = 0.2 * math.sqrt(max(rows, cols))
        elif cols:
            rate = math.sqrt(max(1, rows / cols))
        lr = group["lr"]  # a tensor is rounded as torch rounds it
        values.mul_(1 - lr * group["weight_decay"])
        values.add_(update, alpha=-lr * rate)
        self.write([(parameter, values, state)])

    def _orthogonal(
        self, update: torch.Tensor, parameter: Any, group: dict[str, Any]
    ) -> torch.Tensor:
        """Return this rank's part of the orthogonal update."""
        options = {
            "coefficients": group["ns_coefficients"],
            "steps": group["ns_steps"],
            "eps": group["eps"],
            "plan": self._plan,
        }
        whole = sharded_like(update, parameter)
        if whole is update:
            return orthogonalized(update, **options)
        made = orthogonalized(whole.full_tensor(), **options)  # type: ignore[attr-defined]
        row, col = place(parameter)
        return made[row : row + update.shape[0], col : col + update.shape[1]]

    # ---- state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_plan": self._plan}  # of copies and pickles

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("master_dtype", torch.float32)
        self.take_all_saved()

    def take_saved(self, parameter: Any, given: dict[str, Any], group: dict[str, Any]) -> None:
        """Take the momentum and the master as they were saved.

        Args:
            parameter, given, group: as the base says.
        """
        if is_updated_itself(parameter):
            return
        for name, dtype in ((BUFFER, torch.float32), (MASTER, group["master_dtype"])):
            if name in given:
                value = given[name].to(parameter.device, dtype)
                self.state[parameter][name] = value

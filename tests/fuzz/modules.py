"""Rules of modules, recipes and reports: forward and backward, nothing left behind."""

from __future__ import annotations

import pickle
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import nn

import hybridq
from hybridq import QuantizedTensor, settings

from .policy import Wrong, attempt
from .pool import Pool, fuzz, indices
from .quantizers import Made, makers, sound_makers
from .values import HIGH, JUNK, SIZES, Values, junk, plain

__all__ = ["ModuleRules"]


#: What `hybridq.recipe` may be told of an operand, rightly or wrongly.
_OPERANDS: Final = st.sampled_from(
    (
        *hybridq.formats.names(),
        *("nvfp4;sr", "nvfp4;sr;rht", "mxfp8;rht", "MXFP8", "mxpf8", "", None, 3),
        {"format": "nvfp4", "with_rht": True},
        {"format": "mxfp8", "with_2d_quantization": True},
        {"format": "nvfp4", "row_scaled_nvfp4": True, "stochastic_rounding": True},
    )
)


class _Factory:
    """A recipe's factory out of three quantizers; equal to none but itself."""

    def __init__(self, made: dict[str, Any]) -> None:
        self.made = made

    def __call__(self, role: Any) -> Any:
        return self.made[role.tensor_type]


class ModuleRules(Pool):
    """Linear, autocast, convert, autograd, explain, show, doctor."""

    def _forward(self, layer: nn.Module, x: Any, recipe: Any, where: str) -> Any:
        before = settings.current().recipe

        def run() -> torch.Tensor:
            with hybridq.autocast(recipe=recipe):
                return layer(x)

        y, error = attempt(run, where)
        if settings.current().recipe is not before:
            raise Wrong(f"{where}: autocast has left its recipe behind")
        return y, error

    @fuzz(
        sizes=st.tuples(*(st.sampled_from((0, *SIZES[:12])) for _ in range(2))),
        lead=st.lists(st.sampled_from((0, 1, 2, 5, 33)), max_size=3),
        recipe=st.sampled_from(hybridq.recipes.names()),
        dtype=st.sampled_from(HIGH),
        bias=st.booleans(),
        grads=st.tuples(st.booleans(), st.booleans()),
        quantized=st.booleans(),
    )
    def linear(
        self,
        sizes: Any,
        lead: list[int],
        recipe: str,
        dtype: Any,
        bias: bool,
        grads: Any,
        quantized: bool,
    ) -> None:
        """Forward and backward of a layer under a named recipe: shapes, dtypes, finite values."""
        layer = hybridq.Linear(*sizes, bias=bias, dtype=dtype)
        layer.weight.requires_grad_(grads[1])
        if quantized:
            own = hybridq.quantize(layer.weight.detach(), "mxfp8")
            layer.weight = nn.Parameter(own, requires_grad=grads[1])
        x = torch.randn(*lead, sizes[0], dtype=dtype, requires_grad=grads[0])
        y, error = self._forward(layer, x, recipe, f"Linear {sizes} {recipe}")
        if error is not None:
            raise Wrong(f"Linear: {sizes} {lead} {recipe} {dtype}: {error!r}") from error
        if tuple(y.shape) != (*lead, sizes[1]) or y.dtype != dtype or not y.isfinite().all():
            raise Wrong(f"Linear: {sizes} {recipe}: {y.dtype} {tuple(y.shape)}")
        if y.requires_grad:
            y.float().square().sum().backward()
            for what, gradient in (("input", x.grad), ("weight", layer.weight.grad)):
                if gradient is not None and not gradient.float().isfinite().all():
                    raise Wrong(f"Linear: {sizes} {recipe}: gradient of {what} is not finite")
            if grads[0] and (x.grad is None or x.grad.shape != x.shape):
                raise Wrong("Linear: no gradient of the input")

    @fuzz(
        values=plain(),
        features=st.sampled_from(SIZES),
        recipe=st.one_of(
            st.sampled_from(hybridq.recipes.names()), st.sampled_from(("", None, 3, "mxfp"))
        ),
        name=st.one_of(st.none(), junk()),
    )
    def linear_any(self, values: Values, features: int, recipe: Any, name: str | None) -> None:
        """A layer of any input, fitting or not."""
        x = values.build() if name is None else JUNK[name]()
        self._forward(hybridq.Linear(features, 5), x, recipe, f"Linear {name} {values}")

    @fuzz(
        made=st.tuples(makers(), makers(), makers()),
        values=plain(),
        drop=st.sampled_from((None, None, "input", "weight", "grad_output")),
    )
    def custom(self, made: Any, values: Values, drop: str | None) -> None:
        """A recipe of any three quantizers: it runs, forward and backward, or says why not."""
        built = {}
        for slot, one in zip(("input", "weight", "grad_output"), made, strict=True):
            built[slot], error = attempt(one.build, "quantizer")
            if error is not None:
                return
        if drop:
            built[drop] = None
        x = values.build()
        if x.dim() == 0:
            return
        layer = hybridq.Linear(x.shape[-1], 33, dtype=x.dtype)
        recipe = hybridq.CustomRecipe(qfactory=_Factory(built))
        x = x.clone().requires_grad_()
        y, error = self._forward(layer, x, recipe, f"custom {built}")
        if error is None:
            _, error = attempt(lambda: y.float().sum().backward(), f"backward of {built}")
            if error is not None:
                raise Wrong(f"Linear: the forward ran, the backward says {error!r}") from error

    @fuzz(
        said=st.dictionaries(
            st.sampled_from(("fprop", "dgrad", "wgrad", "input", "weight", "grad_output", "base")),
            st.one_of(_OPERANDS, st.tuples(_OPERANDS, _OPERANDS)),
            max_size=4,
        ),
        options=st.sets(st.sampled_from(("stochastic_rounding", "with_rht"))),
        values=plain(),
    )
    def by_gemm(self, said: dict[str, Any], options: set[str], values: Values) -> None:
        """A recipe by formats: it says itself, as a call and as a file, and runs; or says why."""
        given = {**said, **dict.fromkeys(options, True)}
        recipe, error = attempt(lambda: hybridq.recipe(**given), f"recipe {given}")
        if error is not None:
            return
        if hybridq.recipes.loads(recipe.to_toml()) != recipe:
            raise Wrong(f"to_toml: {recipe!r} is read back as another recipe")
        if (
            repr(recipe).startswith("recipe(")
            and eval(repr(recipe), {"recipe": hybridq.recipe}) != recipe
        ):
            raise Wrong(f"recipe: {recipe!r} prints as another one")
        x = values.build()
        if x.dim() == 0:
            return
        layer = hybridq.Linear(x.shape[-1], 33, dtype=x.dtype)
        x = x.clone().requires_grad_()
        y, error = self._forward(layer, x, recipe, f"by_gemm {recipe!r} {values}")
        if error is None:
            y.float().sum().backward()

    @fuzz(index=indices(), values=plain(), made=sound_makers())
    def straight_through(self, index: int, values: Values, made: Made) -> None:
        """Gradients pass through quantize and dequantize unchanged."""
        quantizer, error = attempt(made.build, "quantizer")
        if error is not None or not (quantizer.makes_rowwise or quantizer.makes_columnwise):
            return
        x = values.build().clone().requires_grad_()
        t = quantizer.quantize(x)
        t.dequantize().sum().backward()
        if x.grad is None or not torch.equal(x.grad, torch.ones_like(x)):
            raise Wrong(f"quantize: {quantizer.text}: the gradient is {x.grad}")
        leaf = self.take(index)
        if leaf is None:
            return
        leaf = leaf.detach().clone().requires_grad_()
        (leaf * 2.0).sum().backward()
        if leaf.grad is None or leaf.grad.shape != leaf.shape:
            raise Wrong(f"autograd: {leaf!r} has the gradient {leaf.grad}")
        parts = [leaf[:1]] if leaf.dim() else []
        for part in parts:
            leaf.grad = None
            part.sum().backward()
            if leaf.grad.shape != leaf.shape or float(leaf.grad.double().sum()) != part.numel():
                raise Wrong(f"autograd: a part of {leaf!r} gives the gradient {leaf.grad}")
        attempt(lambda: leaf.add_(1.0), "add_ of a leaf")
        optimizer = torch.optim.SGD([leaf], lr=0.1)
        attempt(optimizer.step, "SGD.step")

    @fuzz(which=st.integers(0, 4), name=junk())
    def convert(self, which: int, name: str) -> None:
        """Models are converted, or left alone with a reason."""
        model = nn.Sequential(nn.Linear(3, 4), nn.ModuleDict({"gate": nn.Linear(4, 4)}))

        def refuse(module: nn.Module, qualified: str) -> bool:
            raise ValueError("refuse: no module pleases me, got this one")

        calls: dict[int, Any] = {
            0: lambda: hybridq.convert(model),
            1: lambda: hybridq.convert(JUNK[name]()),
            2: lambda: hybridq.convert(model, JUNK[name]()),
            3: lambda: hybridq.convert(model, refuse),
            4: lambda: hybridq.convert(nn.Linear(2, 2), lambda m, n: True),
        }
        if name == "class" and which == 2:
            return  # a class is called, and what it raises is its own
        _, error = attempt(calls[which], f"convert {name}")
        if error is not None and any(isinstance(m, hybridq.Linear) for m in model.modules()):
            raise Wrong("convert: failed, but has converted some modules")
        pickle.loads(pickle.dumps(model))

    @fuzz(
        device=st.sampled_from(("cpu", "cpu", "cuda", "meta", "nonsense", "")),
        dtype=st.sampled_from((*HIGH, torch.int8, None)),
        backend=st.sampled_from((None, None, "reference", "cpu", "torch", "none")),
    )
    def doctor(self, device: str, dtype: Any, backend: Any) -> None:
        """A diagnosis of any device is a text, whatever backend is forced."""
        with hybridq.backend(backend):
            found, error = attempt(lambda: hybridq.report.diagnose(device, dtype), "diagnose")
            if error is None and not "".join(hybridq.report.render(t) for t in found.tables):
                raise Wrong("diagnose: no text")
            attempt(lambda: hybridq.quantize(torch.ones(2, 32), "mxfp8"), f"backend {backend}")

    @fuzz(index=indices(), values=plain(), name=junk(), fits=st.booleans())
    def report(self, index: int, values: Values, name: str, fits: bool) -> None:
        """explain and show say something about every tensor, and refuse the rest in words."""
        t = self.take(index)
        if t is None:
            return
        original = Values(tuple(t.shape), t.dtype, values.kind) if fits else values
        for op in ("gemm", "encode", "decode", "amax", "transpose", "x"):
            attempt(lambda op=op: str(hybridq.explain(op, t, t)), f"explain {op}")
            attempt(lambda op=op: str(hybridq.explain(op, JUNK[name]())), f"explain {op} {name}")
        shown, error = attempt(lambda: str(hybridq.show(t)), "show")
        if error is not None or not shown:
            raise Wrong(f"show: refused {t!r}: {error!r}") from error
        _, error = attempt(lambda: str(hybridq.show(t, original=original.build())), "show")
        if error is not None and fits:
            raise Wrong(f"show: refused {t!r} beside its original: {error!r}") from error
        attempt(lambda: str(hybridq.show(JUNK[name]())), f"show {name}")
        if not isinstance(t, QuantizedTensor):
            raise Wrong("show: has changed the tensor's class")

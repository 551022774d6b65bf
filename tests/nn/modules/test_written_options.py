"""What is written to a module after it is made takes effect, or raises, or is told here why not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hybridq
from hybridq import te
from hybridq.tensor import is_quantized

_X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
_SEQUENCES = _X.view(8, 2, 64)
_HEADS = torch.randn(6, 2, 4, 16, generator=torch.Generator().manual_seed(1))
#: What describes a module, or is state that hybridq keeps of it, by the attribute's name.
EXPLAINED = {
    **dict.fromkeys(
        (
            "num_embeddings",
            "embedding_dim",
            "in_features",
            "out_features",
            "ffn_hidden_size",
            "kv_channels",
            "normalized_shape",
        ),
        "describes parameters, as torch's own sizes do: programs write it with new parameters",
    ),
    **dict.fromkeys(
        ("all_matrices", "copied_matrices", "drawing", "first_matrix", "gathers_tokens"),
        "set by hybridq.distributed and expert_parallel, of the ranks",
    ),
    **dict.fromkeys(
        ("holds_transposed", "is_dealt", "is_parallel", "scatters_tokens", "sums_gradients"),
        "set by hybridq.distributed, of the ranks",
    ),
    **dict.fromkeys(("token_sums", "last_recipe", "module_type"), "what hybridq knows of a module"),
    **dict.fromkeys(("layer_number", "ub_name", "tp_group", "tp_size"), "for readers"),
    "parallel_mode": "of one rank it says nothing; of parts: below",
    "save_original_input": "changes what is saved, and no result",
    "asks_original": "the same: what a recipe that cannot is told of",
    "runs_again": "the same",
    "first_overwrites": "of weights with a main_grad",
    "norm_type": "of a max_norm",
    **dict.fromkeys(("num_extra_inputs", "takes_steps", "as_quantize"), "of all of a class"),
    "inplace": "of memory",
    "name": "of recipes that read names: below",
    "fp8_calibration": "what regions say",
    "qk_norm_before_rope": "of angles",
    "rotary_pos_interleaved": "of angles",
    "seq_len_interpolation_factor": "together with the other alone",
    "pretrained_max_position_embeddings": "together with the other alone",
    "quantizes_backward": "of gradients that a linear module takes",
    "bound_recipe": "given by quantize_model",
    "group": "of ranks",
}


def cases(room: Any, norms: Any) -> Iterator[tuple[str, Callable[[], Any], tuple[Any, ...]]]:
    """Yield modules of a package, and what their forwards take."""
    quiet = {"attention_dropout": 0.0}
    for kind in ("Linear", "LayerNormLinear"):
        yield kind, lambda kind=kind: getattr(room, kind)(64, 32), (_X,)
    for act in ("gelu", "clamped_swiglu"):
        yield act, lambda act=act: room.LayerNormMLP(64, 64, activation=act), (_X,)
    yield "GroupedLinear", lambda: room.GroupedLinear(2, 64, 32), (_X, [4, 12])
    norm = {"input_layernorm": True, "qk_norm_type": "RMSNorm"}
    yield "Multihead", lambda: room.MultiheadAttention(64, 4, **quiet, **norm), (_SEQUENCES,)
    rest = {**quiet, "hidden_dropout": 0.0}
    yield "Layer", lambda: room.TransformerLayer(64, 96, 4, **rest), (_SEQUENCES,)
    for softmax in ("vanilla", "learnable"):
        made = lambda softmax=softmax: norms.DotProductAttention(4, 16, softmax_type=softmax)  # noqa: E731
        yield softmax, made, (_HEADS, _HEADS, _HEADS)
    yield "Rotary", lambda: room.RotaryPositionEmbedding(16), (8,)
    for kind in ("LayerNorm", "RMSNorm"):
        yield kind, lambda kind=kind: getattr(norms, kind)(64), (_X,)


def own_cases() -> Iterator[tuple[str, Callable[[], Any], tuple[Any, ...]]]:
    """Yield modules that `hybridq.te` has no names for."""
    yield "RMSNormLinear", lambda: hybridq.RMSNormLinear(64, 32), (_X,)
    for act in ("gelu", "clamped_swiglu"):
        yield act, lambda act=act: hybridq.nn.ActivationFunction(act), (_X,)
    yield "PlainNorm", lambda: hybridq.nn.PlainNorm(64, "LayerNorm", 1e-5), (_X,)
    yield "LayerNormStep", lambda: hybridq.nn.LayerNormStep(64), (_X,)
    yield "Quantize", hybridq.nn.Quantize, (_X,)
    yield "BiasApart", lambda: hybridq.nn.BiasApart(64, 32), (_X,)
    yield "Embedding", lambda: hybridq.nn.Embedding(16, 64), (torch.arange(8) // 2,)


def operation_cases() -> Iterator[tuple[str, Callable[[], Any], tuple[Any, ...]]]:
    """Yield the operations of `te.ops`."""
    room = te.ops
    for kind in ("Linear", "BasicLinear"):
        yield kind, lambda kind=kind: getattr(room, kind)(64, 32), (_X,)
    yield "GroupedLinear", lambda: room.GroupedLinear(2, 64, 32), (_X, [4, 12])
    for kind in ("LayerNorm", "RMSNorm"):
        yield kind, lambda kind=kind: getattr(room, kind)(64), (_X,)
    gates = ("GEGLU", "GLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU", "ClampedSwiGLU")
    for kind in ("GELU", "QGELU", "ReLU", "SReLU", "SiLU", *gates):
        yield kind, getattr(room, kind), (2 * _X.clone().requires_grad_(),)
    yield "L2Normalization", room.L2Normalization, (_X,)
    yield "Quantize", room.Quantize, (_X,)
    yield "ConstantScale", lambda: room.ConstantScale(2.0), (_X,)
    yield "Dropout", lambda: room.Dropout(0.001), (_X,)
    for kind in ("ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSReLU"):
        yield kind, getattr(room, kind), (_X, torch.rand(16))


CASES = [
    *(pytest.param(*one[1:], id=f"own-{one[0]}") for one in cases(hybridq, hybridq.nn)),
    *(pytest.param(*one[1:], id=f"te-{one[0]}") for one in cases(te, te)),
    *(pytest.param(*one[1:], id=f"more-{one[0]}") for one in own_cases()),
    *(pytest.param(*one[1:], id=f"ops-{one[0]}") for one in operation_cases()),
]
#: Another value of a text.
_OTHERS = {
    "LayerNorm": "RMSNorm",
    "RMSNorm": "LayerNorm",
    "gelu": "relu",
    "causal": "no_mask",
    "sbhd": "bshd",
    "self": "cross",
    "vanilla": "off-by-one",
    "learnable": "vanilla",
    "encoder": "decoder",
}


def another(name: str, value: Any) -> Any:
    """Return a value of an option that is not `value`; None: there is none to try."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 100 + 0.3 if isinstance(value, float) else value + 3
    if isinstance(value, str):
        return _OTHERS.get(value, "other")
    return {"window_size": (1, 0), "softmax_scale": 3.0, "glu_interleave_size": 4}.get(name)


def results(module: Any, given: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return what forwards give, without a recipe and under one."""
    made: list[torch.Tensor] = []
    for recipe in (None, "mxfp8"):
        torch.manual_seed(3)
        with hybridq.autocast(recipe=recipe):
            y = module(*given)
        found = y if isinstance(y, tuple | list) else [y]
        made += [torch.empty(0) if one is None else one for one in found]
    made = [one.dequantize() if is_quantized(one) else one for one in made]
    leaves = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
    total = sum(one.square().sum() if one.is_floating_point() else 0 for one in made)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        of_inputs = torch.autograd.grad(total, leaves, retain_graph=True) if leaves else ()
        total.backward()
        made += [*of_inputs, *(p.grad for p in module.parameters() if p.grad is not None)]
    return [one.detach() for one in made]


def _is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("make", "given"), CASES)
def test_an_option_takes_effect_or_raises(make: Callable[[], Any], given: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    module = make()
    own = set(dir(module)) - set(dir(torch.nn.Module())) - set(module._parameters)
    own -= {*module._modules, *module._buffers}
    expected, silent, tried = results(copy.deepcopy(module), given), [], 0
    for name in sorted(own):
        value = getattr(module, name)
        other = another(name, value)
        if name.startswith("_") or callable(value) or other is None:
            continue
        changed, tried = copy.deepcopy(module), tried + 1
        try:
            setattr(changed, name, other)
            has_effect = not _is_same(results(changed, given), expected)
        except Exception as error:
            has_effect = str(error) != ""
        if not has_effect and name not in EXPLAINED:
            silent.append(name)
    assert tried
    assert not silent


@pytest.mark.parametrize("room", [hybridq, te], ids=["own", "te"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_written_options_are_those_of_a_module_that_was_made_so(room: Any, recipe: Any) -> None:
    made = room.LayerNormMLP(64, 64, eps=0.5, activation="relu", zero_centered_gamma=True)
    module = room.LayerNormMLP(64, 64)
    module.load_state_dict(made.state_dict())
    module.eps, module.activation, module.zero_centered_gamma = 0.5, "relu", True
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with hybridq.autocast(recipe=recipe):
            assert torch.equal(one(_X), made(_X))


def test_a_projection_that_leaves_its_bias_returns_it_where_it_is_asked() -> None:
    for bias in (True, False):
        module = hybridq.nn.BiasApart(64, 32, bias=bias, return_bias=True)
        with hybridq.autocast(recipe="mxfp8"):
            y, own = module(_X)
            assert own is module.bias
            module.return_bias = False
            assert torch.equal(module(_X), y)


def test_an_activations_parameters_are_written() -> None:
    made = hybridq.LayerNormMLP(
        64, 64, activation="clamped_swiglu", activation_params={"limit": 0.1}
    )
    module = hybridq.LayerNormMLP(64, 64, activation="clamped_swiglu")
    module.load_state_dict(made.state_dict())
    module.activation_params = {"limit": 0.1}
    assert torch.equal(module(_X), made(_X))


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (lambda: te.LayerNormLinear(64, 32), "eps", -1.0, "eps must be finite and at least 0"),
        (lambda: te.LayerNormLinear(64, 32), "eps", "1", "eps must be a number"),
        (lambda: te.Linear(64, 32), "return_bias", "no", "return_bias must be a bool"),
        (lambda: te.Linear(64, 32), "name", 3, "name must be a string, got int"),
        (lambda: hybridq.nn.Embedding(8, 64), "fuse_wgrad_accumulation", True, "is no product"),
        (lambda: te.Linear(64, 32), "parallel_mode", "rows", "parallel_mode is settled"),
        (lambda: te.LayerNormMLP(64, 64), "activation", "geglu", "one without a gate"),
        (lambda: te.LayerNormMLP(64, 64), "activation", "gelu2", "one of"),
        (lambda: te.LayerNormMLP(64, 64), "normalization", "RMSNorm", "make another module"),
        (lambda: te.DotProductAttention(4, 16), "softmax_type", "none", "one of"),
        (lambda: te.DotProductAttention(4, 16), "softmax_type", "learnable", "softmax_offset"),
        (lambda: te.MultiheadAttention(64, 4), "attention_dropout", 1.5, r"in \[0, 1\)"),
        (lambda: hybridq.nn.PatchConv2d(3, 8, 4), "stride", (2, 2), "stride is settled"),
        (
            lambda: te.TransformerLayer(64, 64, 4, attn_input_format="thd"),
            *("drop_path_rate", 0.1, "of their own dimension"),
        ),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(
    make: Callable[[], Any], name: str, value: Any, message: str
) -> None:
    module = make()
    was = getattr(module, name)
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        setattr(module, name, value)
    assert getattr(module, name) == was
    setattr(module, name, was)  # what it is may be written


def test_a_dropout_reaches_the_core() -> None:
    module = te.MultiheadAttention(64, 4)
    module.attention_dropout = 0.0
    assert module.core_attention.attention_dropout == 0.0


def test_a_written_name_is_what_recipes_are_asked_by() -> None:
    asked: list[str] = []

    def factory(role: hybridq.QuantizerRole) -> hybridq.Quantizer:
        asked.append(role.name)
        return hybridq.MXFP8Quantizer()

    recipe = hybridq.CustomRecipe(qfactory=factory)
    module = hybridq.Linear(64, 32)
    with hybridq.autocast(recipe=recipe):
        module(_X)
        module.name = "head"
        module(_X)
        hybridq.convert(torch.nn.Sequential(module))
        module(_X)
    assert {"", "head"} <= set(asked)
    assert module.name == "head"


def test_delayed_gradients_are_marked_where_they_are_written() -> None:
    module = hybridq.Linear(64, 32)
    module.delay_wgrad_compute = True
    assert module.weight.skip_backward_post_hook
    module.delay_wgrad_compute = False
    assert not module.weight.skip_backward_post_hook


def test_attributes_of_programs_are_their_own() -> None:
    class Theirs(te.LayerNormLinear):
        def __init__(self) -> None:
            self.tp_size, self.config = 1, {"eps": 3}
            super().__init__(64, 32)
            self.is_first_microbatch = True

        def forward(self, inp: torch.Tensor) -> Any:  # type: ignore[override]
            y = super().forward(inp, is_first_microbatch=self.is_first_microbatch)
            self.is_first_microbatch = False
            return y

    module = Theirs()
    module(_X)
    assert module.is_first_microbatch is False
    swapped = type("FSDPTheirs", (Theirs,), {})
    module.__class__ = swapped
    module.eps = 0.5
    with pytest.raises(AttributeError, match="FSDPTheirs: normalization is settled"):
        module.normalization = "RMSNorm"


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_module_over_ranks_may_be_told_to_multiply_its_part_alone(mode: str) -> None:
    """Megatron-Core's shared experts exchange what ranks have themselves."""
    module = te.Linear(64, 32, bias=False, tp_size=2, parallel_mode=mode)
    x = _X[:, : module.weight.shape[1]]
    with pytest.raises(RuntimeError, match="call set_tensor_parallel_group"):
        module(x)
    module.parallel_mode = None
    assert (module.parallel_mode, module.tp_size) == (None, 2)
    for one in (module, copy.deepcopy(module)):
        assert torch.equal(one(x), torch.nn.functional.linear(x, module.weight))
    with pytest.raises(AttributeError, match="parallel_mode is settled"):
        module.parallel_mode = "row" if mode == "column" else "column"
    module.parallel_mode = mode
    assert module.is_parallel and module.parallel[""].mode == mode
    with pytest.raises(AttributeError, match="tp_size is settled when the module is made, as 2"):
        module.tp_size = 4


def test_compiled_code_sees_what_is_written() -> None:
    module = hybridq.LayerNormMLP(64, 64)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for eps, activation in ((1e-5, "gelu"), (0.5, "gelu"), (0.5, "relu"), (2.0, "relu")):
        module.eps, module.activation = eps, activation
        with hybridq.autocast(recipe="mxfp8"):
            assert torch.equal(compiled(_X), module(_X))

"""Recipes of the door: fields, defaults, what they freeze to, and callables of DelayedScaling."""

from __future__ import annotations

import copy
import dataclasses
import inspect

import pytest
import torch

import hybridq
import hybridq.te as te
from hybridq.te import quantization
from hybridq.te.common import recipe as door

#: Names and defaults as Transformer Engine has them, in its order.
FIELDS = {
    "DelayedScaling": "margin fp8_format amax_history_len amax_compute_algo "
    "scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha backward_override",
    "Float8CurrentScaling": "use_power_2_scales fp8_format fp8_gemm_fprop fp8_gemm_dgrad "
    "fp8_gemm_wgrad fp8_dpa fp8_mha backward_override",
    "MXFP8BlockScaling": "margin fp8_format fp8_dpa fp8_mha backward_override "
    "enable_2d_quantization",
    "Float8BlockScaling": "use_f32_scales fp8_format x_block_scaling_dim w_block_scaling_dim "
    "grad_block_scaling_dim fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha "
    "backward_override",
    "NVFP4BlockScaling": "disable_rht disable_stochastic_rounding disable_2d_quantization "
    "row_scaled_activation nvfp4_4over6 nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode "
    "fp4_format fp8_format fp8_dpa fp8_mha backward_override",
    "CustomRecipe": "qfactory fp8_format fp8_dpa fp8_mha backward_override quantization_alignment "
    "qfactory_key",
}
PLAIN = [name for name in FIELDS if name != "CustomRecipe"]


def train(layer: torch.nn.Module, recipe, steps: int = 3) -> list[torch.Tensor]:
    """Outputs and gradients of some steps, under `hybridq.autocast` or `te.autocast`."""
    found = []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    context = te.autocast if isinstance(recipe, door.Recipe) else hybridq.autocast
    for step in range(steps):
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(step), requires_grad=True)
        torch.manual_seed(step)
        with context(recipe=recipe):
            y = layer(x)
        (y * torch.linspace(-1, 1, y.shape[1])).sum().backward()
        found += [y.detach(), x.grad, layer.weight.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def layers() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    own = te.Linear(64, 32)
    plain = hybridq.Linear(64, 32)
    plain.load_state_dict(own.state_dict())
    return own, plain


@pytest.mark.parametrize("name", FIELDS)
def test_fields_lie_in_the_peers_order(name: str) -> None:
    fields = dataclasses.fields(getattr(door, name))
    assert [one.name for one in fields] == FIELDS[name].split()
    if name in PLAIN:  # the same defaults as hybridq's own, where both have the field
        own = getattr(hybridq.recipes, name)()
        for one in fields:
            mine = getattr(getattr(door, name)(), one.name)
            if hasattr(own, one.name) and one.name != "fp8_format":
                assert mine == getattr(own, one.name), one.name


@pytest.mark.parametrize("name", PLAIN)
def test_a_recipe_trains_with_the_bits_of_hybridqs(name: str) -> None:
    own, plain = layers()
    recipe = getattr(door, name)()
    assert recipe.current == getattr(hybridq.recipes, name)()
    got = train(own, recipe)
    want = train(plain, getattr(hybridq.recipes, name)())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not torch.equal(got[0], torch.nn.functional.linear(torch.zeros(6, 64), own.weight))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: door.DelayedScaling(fp8_format=door.Format.E5M2), "fp8_format .* E5M2"),
        (lambda: door.DelayedScaling(fp8_mha=True), "fp8_mha must be False"),
        (lambda: door.MXFP8BlockScaling(margin=1).current, "margin must be 0"),
        (
            lambda: door.Float8CurrentScaling(backward_override="fast"),
            "backward_override .* 'fast'",
        ),
        (lambda: door.Float8CurrentScaling(fp8_gemm_fprop=True), "fp8_gemm_fprop must be MMParams"),
        (lambda: door.Float8BlockScaling(fp8_gemm_wgrad=door.MMParams(False)), "fp8_gemm_wgrad"),
        (lambda: door.NVFP4BlockScaling(fp4_format=door.Format.E4M3), "fp4_format must be E2M1"),
        (
            lambda: door.CustomRecipe(lambda role: None, quantization_alignment=0),
            "must be positive",
        ),
        (lambda: door.CustomRecipe(qfactory=3).current, "qfactory must be callable, got int"),
        (lambda: door.DelayedScaling(amax_compute_algo=3).current, "names or callables, got 3"),
    ],
)
def test_what_asks_for_something_else_is_refused_by_name(make, text: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=text):
        make()


def test_changes_are_seen_and_copies_are_apart() -> None:
    recipe = door.MXFP8BlockScaling()
    first = recipe.current
    assert recipe.current is first
    other = copy.deepcopy(recipe)
    recipe.fp8_format = door.Format.HYBRID
    role = te.QuantizerRole("linear", "grad_output")
    assert recipe.current.quantizer(role).rowwise.format.element.name == "e5m2"
    assert other == door.MXFP8BlockScaling() and other.current == first
    with pytest.raises(ValueError, match="margin"):
        recipe.margin = 1
        _ = recipe.current


def test_params_of_slots_may_be_set() -> None:
    recipe = door.Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = door.QParams(power_2_scale=True, amax_epsilon=0.5)
    quantizer = recipe.current.quantizer(te.QuantizerRole("linear", "input"))
    assert quantizer == hybridq.Float8CurrentScalingQuantizer(
        "e4m3", force_pow_2_scales=True, amax_epsilon=0.5
    )
    weight = recipe.current.quantizer(te.QuantizerRole("linear", "weight"))
    assert weight == hybridq.Float8CurrentScalingQuantizer("e4m3")
    recipe.fp8_quant_fwd_inp = door.QParams(stochastic_rounding=True)
    with pytest.raises(ValueError, match="power_2_scale and amax_epsilon alone"):
        _ = recipe.current
    fp4 = door.NVFP4BlockScaling(nvfp4_4over6="weights")
    fp4.fp4_quant_fwd_inp = door.QParams()
    assert fp4.current.quantizer(te.QuantizerRole("linear", "input")) == hybridq.NVFP4Quantizer()
    weight = fp4.current.quantizer(te.QuantizerRole("linear", "weight"))
    assert weight == hybridq.recipes.NVFP4BlockScaling(nvfp4_4over6="weights").quantizer(
        te.QuantizerRole("linear", "weight")
    )


def test_an_error_mode_that_says_nothing_changes_nothing() -> None:
    quiet = door.NVFP4BlockScaling(nvfp4_4over6_err_mode="MSE")
    assert quiet.current == door.NVFP4BlockScaling().current
    quiet.nvfp4_4over6 = "weights"
    assert quiet.current != door.NVFP4BlockScaling(nvfp4_4over6="weights").current
    with pytest.raises(ValueError, match="nvfp4_4over6_err_mode must be one of"):
        _ = door.NVFP4BlockScaling(nvfp4_4over6_err_mode="L1").current


def test_keys_of_metas_are_those_of_modules() -> None:
    layer = te.Linear(16, 16)
    with te.autocast(recipe=door.DelayedScaling()):
        layer(torch.randn(2, 16)).sum().backward()
    keys = [te.FP8GlobalStateManager.get_meta_tensor_key(forward=one) for one in (True, False)]
    assert keys == list(layer.quantizers)
    assert [layer.fp8_meta[key].scale.numel() for key in keys] == [3, 2]


def test_a_key_without_a_hash_is_refused() -> None:
    with pytest.raises(TypeError, match="quantizer_factory: key must be hashable, got"):
        door.quantizer_factory(key=["mutable"])


def test_predicates() -> None:
    assert door.MXFP8BlockScaling().mxfp8() and not door.MXFP8BlockScaling.nvfp4()
    assert door.DelayedScaling.float8_per_tensor_scaling() and door.DelayedScaling().delayed()
    assert door.CustomRecipe(lambda role: None).custom()
    assert te.get_default_recipe().current == hybridq.recipes.default_recipe()
    sizes = [te.get_align_size_for_quantization(getattr(door, name)()) for name in PLAIN]
    assert sizes == [16, 16, 32, 16, 128]
    custom = door.CustomRecipe(lambda role: None, quantization_alignment=64)
    assert te.get_align_size_for_quantization(custom) == 64


# ---- callables


def test_callables_that_say_the_same_give_the_same_bits() -> None:
    own, plain = layers()
    fp8 = {"amax_history_len": 3, "margin": 1}
    calls = []

    def largest(history: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(history.shape))
        return history.amax(0)

    got = train(own, door.DelayedScaling(amax_compute_algo=largest, **fp8), 4)
    want = train(plain, hybridq.recipes.DelayedScaling(**fp8), 4)
    assert calls and all(shape[0] == 3 for shape in calls)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_scales_are_what_the_callable_returns() -> None:
    own, _ = layers()
    seen = []

    def scale_of(amax, old_scale, fp8_max, recipe):
        seen.append((amax.clone(), old_scale.clone(), fp8_max.clone(), recipe.margin))
        return torch.full_like(old_scale, 2.0) * fp8_max / 448.0

    recipe = door.DelayedScaling(
        margin=2, scaling_factor_compute_algo=scale_of, amax_compute_algo="most_recent"
    )
    train(own, recipe, 1)
    amax, old, largest, margin = seen[0]
    assert margin == 2 and sorted(set(largest.tolist())) == [448.0, 57344.0]
    history = own.fp8_meta["scaling_fwd"]
    assert history.scale[:2].tolist() == [2.0, 2.0]
    assert own.fp8_meta["scaling_bwd"].scale[0] == 2.0 * 57344.0 / 448.0
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    assert float(x.abs().max()) in amax.tolist() and amax.shape == old.shape
    assert float(amax.min()) >= 0.0
    assert own.fp8_meta["recipe"] is recipe


def test_equal_callables_are_registered_once() -> None:
    def mean(history: torch.Tensor) -> torch.Tensor:
        return history.mean(0)

    names = {door.DelayedScaling(amax_compute_algo=mean).current.amax_compute_algo for _ in "ab"}
    assert len(names) == 1


# ---- custom recipes


def test_a_factory_is_asked_as_the_peer_asks_it() -> None:
    given = [te.QuantizerRole(), te.QuantizerRole("dpa", "qkv"), None]
    by_place = quantization.NVFP4BlockScalingRecipeState(
        door.NVFP4BlockScaling(), "forward", 3, given
    ).make_quantizers()
    assert [one.with_2d_quantization for one in by_place] == [False, True, False]
    current = door.Float8CurrentScaling()
    current.fp8_quant_fwd_inp = door.QParams(amax_epsilon=0.5, power_2_scale=True)
    state = te.RecipeState.create(current, mode="forward", num_quantizers=3)
    made = [(one.amax_epsilon, one.force_pow_2_scales) for one in state.make_quantizers()]
    assert made == [(0.5, True), (0.0, False), (0.0, False)]
    asked = []

    def factory(role):
        asked.append(role)
        if role is not None and role.tensor_type == "grad_output":
            return te.DelayedScalingRequest(amax_history_len=2)
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

    layer = te.GroupedLinear(2, 64, 32, name="experts.0")
    with te.autocast(recipe=door.CustomRecipe(factory)):
        layer(torch.randn(4, 64), [1, 3]).sum().backward()
    roles = [(role.module_type, role.tensor_type, role.name) for role in asked]
    slots = [("grouped_linear", slot, "experts.0") for slot in ("input", "weight", "grad_output")]
    assert roles == slots * 2
    asked.clear()
    plain = te.Linear(64, 32, name="proj")
    with te.autocast(recipe=door.CustomRecipe(factory)):
        y = plain(torch.randn(4, 64), fp8_output=True)
    assert asked[-1] is None and isinstance(y, hybridq.tensor.MXFP8Tensor)


def test_fresh_recipes_of_one_factory_are_one_recipe() -> None:
    asked = []

    def factory(role):
        asked.append(role)
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

    layer = te.Linear(64, 32)
    for _ in range(3):
        with te.autocast(recipe=door.CustomRecipe(factory)):
            layer(torch.randn(4, 64))
    assert len(asked) == 3


def test_what_a_factory_gives_later_changes_do_not_reach() -> None:
    given = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    layer = te.Linear(64, 32, bias=False)
    recipe = door.CustomRecipe(lambda role: given)
    x = torch.randn(4, 64)
    with te.autocast(recipe=recipe):
        first = layer(x)
        given.dtype = te.DType.kFloat8E5M2
        assert torch.equal(layer(x), first)


# ---- contexts


def test_arguments_of_contexts_lie_in_the_peers_order() -> None:
    for function, names in (
        (te.autocast, "enabled calibrating recipe amax_reduction_group _graph"),
        (te.fp8_autocast, "enabled calibrating fp8_recipe fp8_group _graph"),
        (te.quantized_model_init, "enabled recipe preserve_high_precision_init_val"),
        (te.fp8_model_init, "enabled recipe preserve_high_precision_init_val"),
    ):
        assert list(inspect.signature(function).parameters) == names.split()


def test_contexts_say_where_one_is() -> None:
    state, recipe = te.FP8GlobalStateManager, door.Float8CurrentScaling()
    assert not state.is_fp8_enabled() and not state.with_fp8_parameters()
    with te.autocast(True, False, recipe):
        assert state.is_fp8_enabled() and state.get_fp8_recipe() is recipe
        with te.autocast(enabled=False):
            assert not state.is_fp8_enabled()
        with te.fp8_autocast(True, False, door.MXFP8BlockScaling()):
            assert state.get_fp8_recipe().mxfp8()
        assert state.get_fp8_recipe() is recipe
    with te.fp8_model_init(True, recipe, True):
        assert state.with_fp8_parameters() and state.with_high_precision_init_val()
        weight = te.Linear(64, 32).weight
    assert not state.with_fp8_parameters()
    assert type(weight) is hybridq.tensor.Float8Tensor
    kept = weight.get_high_precision_init_val()
    again = hybridq.Float8CurrentScalingQuantizer("e4m3")(kept)
    assert torch.equal(again.rowwise.data, weight.rowwise.data)
    assert not te.autocast(calibrating=True).calibrating  # as there: what quantizes records itself


def test_compiled_code_takes_the_context() -> None:
    layer = te.Linear(64, 32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    x = torch.randn(4, 64)
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    with te.autocast(recipe=door.MXFP8BlockScaling()):
        assert torch.equal(compiled(x), layer(x))


# ---- factories and states


def test_the_zoos_factories_make_the_quantizers_of_hybridqs() -> None:
    from hybridq.te.custom_recipes import quantizer_factories, quantizer_factory_zoo

    roles = [
        te.QuantizerRole(module, slot)
        for module in ("linear", "grouped_linear", "dpa")
        for slot in ("input", "weight", "grad_output", "qkv")
    ]
    for own, source in (
        (quantizer_factories, hybridq.recipes.factories),
        (quantizer_factory_zoo, hybridq.recipes.zoo),
    ):
        for name in own.__all__:
            if not hasattr(source, name):
                continue
            for role in roles:
                assert getattr(own, name)(role).frozen == getattr(source, name)(role), name
            key = getattr(own, name).qfactory_key
            assert door.CustomRecipe(getattr(own, name)).qfactory_key == key
    dpa = quantizer_factory_zoo.nvfp4_linear_fp8_dpa_factory
    assert isinstance(dpa(roles[0]), te.NVFP4Quantizer)
    assert dpa(te.QuantizerRole("dpa", "s")).amax_compute_algo == "most_recent"
    assert dpa(te.QuantizerRole("dpa", "do")).dtype is te.DType.kFloat8E5M2
    assert dpa(te.QuantizerRole("", "", "a.dpa_output")).dtype is te.DType.kFloat8E4M3


def test_slots_without_a_module() -> None:
    state = te.RecipeState.create(door.Float8CurrentScaling(), mode="backward", num_quantizers=3)
    assert [one.dtype.name for one in state.make_quantizers()] == ["kFloat8E5M2"] * 3
    weights = te.RecipeState.create(door.NVFP4BlockScaling(), mode="forward", num_quantizers=5)
    is_weight = [one.with_2d_quantization for one in weights.make_quantizers()]
    assert is_weight == [False, True, False, False, True]
    asked = []

    def factory(role):
        asked.append(role)
        return te.IdentityQuantizer() if role is None else te.DelayedScalingRequest()

    roles = [te.QuantizerRole("linear", "input", "a"), None]
    made = te.RecipeState.create(
        door.CustomRecipe(factory), mode="forward", num_quantizers=2, roles=roles
    ).make_quantizers()
    assert asked == roles
    assert [type(one).__name__ for one in made] == ["Float8Quantizer", "IdentityQuantizer"]
    with pytest.raises(ValueError, match="mode must be forward or backward, got 'fwd'"):
        te.RecipeState.create(door.MXFP8BlockScaling(), mode="fwd")
    with pytest.raises(ValueError, match="roles must be 2, got 1"):
        te.RecipeState.create(
            door.MXFP8BlockScaling(), mode="forward", num_quantizers=2, roles=roles[:1]
        )


def attended(q, k, v, dy, fmt: str, grad_fmt: str) -> list[torch.Tensor]:
    """Causal attention between what operands decode to, by torch's functions and derivatives."""

    def kept(x: torch.Tensor, fmt: str) -> torch.Tensor:
        return hybridq.quantize(x.contiguous(), fmt, columnwise=None).dequantize()

    q, k, v = (kept(one, fmt) for one in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(unseen, -torch.inf), -1)
    dy, short = kept(dy, grad_fmt), kept(weights, fmt)
    dweights = dy @ v.mT
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
    dscores = kept(dscores, grad_fmt) / q.shape[-1] ** 0.5
    return [short @ v, dscores @ k, dscores.mT @ q, short.mT @ dy]


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("MXFP8BlockScaling", ("mxfp8", "mxfp8")),
        ("Float8CurrentScaling", ("fp8", "fp8_e5m2")),
        ("DelayedScaling", ("fp8", "fp8_e5m2")),
        ("NVFP4BlockScaling", ("fp8", "fp8_e5m2")),
    ],
)
def test_fp8_dpa_quantizes_attention(name: str, formats: tuple[str, str]) -> None:
    torch.manual_seed(0)
    made = getattr(door, name)(fp8_dpa=True)
    assert made.current.quantizes_attention and made.current == copy.deepcopy(made).current
    attention = te.DotProductAttention(2, 32, qkv_format="bshd")
    given = [torch.randn(1, 6, 2, 32, requires_grad=True) for _ in range(3)]
    with te.autocast(recipe=made):
        y = attention(*given)
    dy = torch.randn(1, 6, 2, 32)
    y.backward(dy.view(1, 6, 64))
    apart = [one.detach().transpose(1, 2) for one in (*given, dy)]
    want = [one.transpose(1, 2) for one in attended(*apart, *formats)]
    for got, right in zip((y.view(1, 6, 2, 32), *(one.grad for one in given)), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def test_fp8_mha_changes_no_number_and_wants_fp8_dpa() -> None:
    torch.manual_seed(0)
    layer = te.MultiheadAttention(64, 2, attention_dropout=0.0, layer_number=1)
    x, found = torch.randn(5, 2, 64), []
    for options in ({}, {"fp8_dpa": True}, {"fp8_dpa": True, "fp8_mha": True}):
        with te.autocast(recipe=door.Float8CurrentScaling(**options)):
            found.append(layer(x))
    assert torch.equal(found[1], found[2]) and not torch.equal(found[0], found[1])
    asked = []

    def factory(role):
        asked.append((role.module_type, role.tensor_type) if role else None)
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

    with te.autocast(recipe=door.CustomRecipe(factory, fp8_dpa=True)):
        layer(x)
    assert {("dpa", "qkv"), ("dpa", "s"), ("dpa", "do"), ("dpa", "dp")} <= set(asked)
    assert door.CustomRecipe(factory, fp8_dpa=True).current != door.CustomRecipe(factory).current

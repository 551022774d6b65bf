"""Experts of transformers' models: converted, they are the model's own, and compute under recipes.

Small random models, weights scaled up: with transformers' 0.02 nothing that is compared would be
larger than what is tolerated.
"""

from __future__ import annotations

import copy
from functools import cache, partial

import pytest
import torch
from torch import nn

import hybridq
from experts_oracle import HYBRID, MXFP8, relative
from hybridq.moe import Experts
from hybridq.tensor import is_quantized

transformers = pytest.importorskip("transformers")
from hybridq.integrations.transformers.experts import layout_of  # noqa: E402
from own_experts import OwnExperts  # noqa: E402

HIDDEN, INNER, EXPERTS, VOCABULARY = 64, 48, 4, 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
#: Class of the model, and what its configuration has beside `COMMON`.
FAMILIES = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "head_dim": 16},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": INNER,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 16}),
    "llama4": (
        "Llama4",
        {
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": INNER,
            "interleave_moe_layer_step": 1,
            "head_dim": 16,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": INNER,
            "moe_shared_expert_intermediate_size": INNER,
            "layers_block_type": ["attention", "moe"],
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
#: Whose routers say what they did.
WITH_AUXILIARY = ("mixtral", "qwen3_moe", "gpt_oss")


@cache
def _made(family: str) -> nn.Module:
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}{'Text' if name == 'Llama4' else ''}Config")
    config = config(**{**COMMON, **options}, use_cache=False)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for own, one in model.named_parameters():
            if one.dim() >= 2:
                one.copy_(torch.randn(one.shape) * one.shape[-1] ** -0.5)
            elif own.endswith("bias"):
                one.copy_(torch.randn(one.shape))
    return model.train()


def made(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of a family, not converted."""
    return copy.deepcopy(_made(family)).to(dtype)


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


def step(model: nn.Module, ids: torch.Tensor, recipe: str | None = None, **options):
    """Return what a model gives, after its backward."""
    model.zero_grad()
    torch.manual_seed(1)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        given = model(input_ids=ids, labels=ids, **options)
    given.loss.backward()
    return given


def experts_of(model: nn.Module) -> list[Experts]:
    return [one for one in model.modules() if isinstance(one, Experts)]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_without_a_recipe_all_bits_are_the_models_own(family: str) -> None:
    plain, model = made(family), hybridq.convert(made(family))
    found = experts_of(model)
    assert len(found) == (2 if family in ("mixtral", "qwen3_moe", "gpt_oss", "llama4") else 1)
    ids = tokens()
    options = {"output_router_logits": True} if family in WITH_AUXILIARY else {}
    want, got = step(plain, ids, **options), step(model, ids, **options)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
    if options:
        assert torch.equal(got.aux_loss, want.aux_loss)
        assert len(got.router_logits) == len(want.router_logits) == 2
        assert all(map(torch.equal, got.router_logits, want.router_logits))
    for (name, one), (other, two) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(one.grad, two.grad), name
    assert plain.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_all_products_but_heads_and_routers_are_quantized(family: str) -> None:
    """By weights, each of which meets as many tokens as its expert has."""
    made_of = hybridq.conversion(hybridq.convert(made(family)))
    allowed = ("lm_head", "gate", "router")
    assert not made_of.others or all(n.endswith(allowed) for n, _ in made_of.others)
    assert all(name.endswith(allowed) for name, _ in made_of.left_alone)
    assert any(name.endswith("experts") for name in made_of.converted)


def _of_one_expert(module: Experts, formats):
    """Return an FP64 twin of a converted module: a loop over the experts, products of planes."""
    layout = module.experts_layout
    count = module.down_proj.shape[0]
    twin = OwnExperts(layout, torch.float64, (count, *layout.features(module)))
    for name, one in module.named_parameters(recurse=False):
        getattr(twin, name).data.copy_(one.data)
    for name in ("alpha", "limit", "act_fn"):
        if hasattr(module, name):
            setattr(twin, name, getattr(module, name))
    if hasattr(module, "_apply_gate"):
        twin._apply_gate = partial(module.plain_class._apply_gate, twin)
    twin.formats = formats
    return twin


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("formats", [MXFP8, HYBRID], ids=["mxfp8", "hybrid"])
def test_result_and_gradients_under_a_recipe(family: str, formats) -> None:
    """The experts of each model against FP64 of the same planes, routed by its own router."""
    model = hybridq.convert(made(family))
    module = experts_of(model)[-1]
    calls = []
    module.register_forward_hook(lambda m, args, out: calls.append(args))
    with torch.no_grad():
        model(input_ids=tokens(4, 16))
    args = [one.detach() for one in calls[0]]
    results = []
    torch.manual_seed(2)
    dy = torch.randn(args[0].shape)
    for one, recipe, dtype in (
        (module, formats.recipe(), torch.float32),
        (_of_one_expert(module, formats), None, torch.float64),
        (_of_one_expert(module, None), None, torch.float64),
    ):
        one.zero_grad()
        leaves = [
            a.clone().to(dtype).requires_grad_() if a.is_floating_point() else a for a in args
        ]
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            y = one(*leaves)
        y.backward(dy.to(dtype))
        grads = [leaf.grad for leaf in leaves if leaf.is_floating_point()]
        weights = [getattr(one, name).grad for name, _ in module.named_parameters(recurse=False)]
        results.append([y.detach(), *grads, *weights])
    got, want, exact = results
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert relative(one, other) < 3e-3, number
    assert relative(exact[0], want[0]) > 1e-2 and relative(exact[1], want[1]) > 1e-2


@pytest.mark.parametrize("family", list(FAMILIES))
def test_ten_steps(family: str) -> None:
    """Under a recipe the loss falls as without one."""
    losses = {}
    for recipe in (None, "mxfp8"):
        model = hybridq.convert(made(family, torch.bfloat16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for number in range(10):
            found.append(step(model, tokens(seed=number % 2), recipe).loss.item())
            optimizer.step()
        losses[recipe] = found
    plain, low = losses[None], losses["mxfp8"]
    assert low[0] != plain[0] and abs(low[0] - plain[0]) < 0.05 * plain[0]
    assert low[-1] < 0.8 * low[0] and abs(low[-1] - plain[-1]) < 0.15 * plain[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_plain_checkpointing_gives_the_same_bits(family: str) -> None:
    want = hybridq.convert(made(family, torch.bfloat16))
    model = copy.deepcopy(want)
    model.gradient_checkpointing_enable()
    recipe = "mxfp8_fwd_nvfp4_bwd"
    losses = [step(one, tokens(), recipe).loss for one in (model, want)]
    assert torch.equal(*losses)
    for (name, one), two in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name


@pytest.mark.parametrize("family", list(FAMILIES))
def test_generate_save_and_load(family: str, tmp_path) -> None:
    """Greedy tokens of a loaded model are those of the saved one, under the recipe and without."""
    model = hybridq.convert(made(family, torch.bfloat16)).eval()
    model.config.use_cache = True
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    again = hybridq.convert(loaded).eval()
    assert not hasattr(again, "plain_class")
    for name, one in model.state_dict().items():
        assert torch.equal(one, again.state_dict()[name]), name
    if family == "llama4" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return  # a plain Llama 4 that is loaded has other logits there than the one that was saved
    generate = partial(type(model).generate, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for recipe in (None, "mxfp8"):
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            assert torch.equal(generate(model, tokens(1, 5)), generate(again, tokens(1, 5)))


@pytest.mark.thinned(1, "slow", few=1)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4", "nemotron_h"])
def test_a_module_compiles_into_one_graph(family: str) -> None:
    model = hybridq.convert(made(family, torch.bfloat16))
    module = experts_of(model)[-1]
    calls = []
    module.register_forward_hook(lambda m, args, out: calls.append(args))
    with torch.no_grad():
        model(input_ids=tokens(4, 16))
    module._forward_hooks.clear()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(compiled(*calls[0]), module(*calls[0]))


def test_every_implementation_of_transformers_is_the_own_one() -> None:
    for name in ("eager", "grouped_mm", "batched_mm"):
        plain, model = made("gpt_oss"), made("gpt_oss")
        for one in (plain, model):
            one.set_experts_implementation(name)
        hybridq.convert(model)
        assert torch.equal(step(model, tokens()).loss, step(plain, tokens()).loss), name


def test_activations_are_known_by_their_class() -> None:
    kinds = {
        name: layout_of(one).activation
        for name in ("mixtral", "nemotron_h", "gpt_oss")
        for one in made(name).modules()
        if hasattr(one, "_apply_gate")
    }
    assert (kinds["mixtral"], kinds["nemotron_h"]) == ("silu", "srelu")
    assert callable(kinds["gpt_oss"])
    other = next(one for one in made("mixtral").modules() if hasattr(one, "_apply_gate"))
    other.act_fn = nn.GELU()  # not by tanh
    assert callable(layout_of(other).activation)


def test_experts_of_another_quantizer_stay_and_say_why() -> None:
    model = made("mixtral")
    for one in model.modules():
        if hasattr(one, "gate_up_proj"):
            low = one.gate_up_proj.data.to(torch.float8_e4m3fn)
            one.gate_up_proj = nn.Parameter(low, requires_grad=False)
    said = str(hybridq.conversion(hybridq.convert(model)))
    assert "mlp.experts: gate_up_proj is torch.float8_e4m3fn" in said


def test_quantized_model_init_quantizes_experts() -> None:
    with hybridq.quantized_model_init("mxfp8"):
        model = hybridq.convert(made("mixtral", torch.bfloat16))
    assert all(is_quantized(one.gate_up_proj) for one in experts_of(model))
    plain = hybridq.convert(made("mixtral", torch.bfloat16))
    want = step(plain, tokens(), "mxfp8").loss
    assert torch.equal(step(model, tokens(), "mxfp8").loss, want)


def test_experts_of_one_product_are_a_linear_layer_each() -> None:
    """JetMoE's, with as many tokens as a list says; bit for bit, in both directions."""
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    torch.manual_seed(0)
    experts = JetMoeParallelExperts(3, 64, 48)
    torch.nn.init.normal_(experts.weight)
    linears = [hybridq.Linear(64, 48, bias=False) for _ in range(3)]
    for one, weight in zip(linears, experts.weight, strict=True):
        one.weight = nn.Parameter(weight.detach().clone())
    experts = hybridq.convert(nn.ModuleList([experts]))[0]
    assert isinstance(experts, Experts)
    x, sizes = torch.randn(12, 64), [5, 0, 7]
    found = []
    for several in (True, False):
        own = x.clone().requires_grad_()
        with hybridq.autocast(recipe="mxfp8"):
            if several:
                y = experts(own, sizes)
            else:
                parts = zip(linears, own.split(sizes), strict=True)
                y = torch.cat([one(rows) for one, rows in parts if len(rows)])
        y.square().sum().backward()
        found.append((y, own.grad))
    assert all(map(torch.equal, *found))
    for number, one in enumerate(linears):
        grad = torch.zeros(48, 64) if one.weight.grad is None else one.weight.grad
        assert torch.equal(experts.weight.grad[number], grad)


def test_experts_that_compute_nothing_pass_their_tokens_on() -> None:
    """LongCat-Flash's: beyond the others, which are Mixtral's with the same weights."""
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"hidden_size": 64, "expert_ffn_hidden_size": 96, "n_routed_experts": 4}
    config = transformers.LongcatFlashConfig(zero_expert_num=2, **sizes)
    longcat = LongcatFlashExperts(config)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    others = MixtralExperts(transformers.MixtralConfig(**sizes))
    others.config._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.no_grad():
        for one in (longcat.gate_up_proj, longcat.down_proj):
            one.normal_(std=0.1)
        others.gate_up_proj.copy_(longcat.gate_up_proj[:4])
        others.down_proj.copy_(longcat.down_proj)
    model = hybridq.convert(nn.ModuleList([longcat, others]))
    assert all(isinstance(one, Experts) for one in model)
    x, index, weights = torch.randn(30, 64), torch.rand(30, 6).topk(3).indices, torch.rand(30, 3)
    found = []
    for one in model:
        own, share = x.clone().requires_grad_(), weights.clone().requires_grad_()
        with hybridq.autocast(recipe="mxfp8"):
            y = one(own, index, share)
        if one is others:
            y = y + own * (share * (index >= 4)).sum(1, keepdim=True)
        y.square().sum().backward()
        grads = one.gate_up_proj.grad[:4], one.down_proj.grad
        found.append((y.detach(), own.grad, share.grad, *grads))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-4)
    assert not longcat.gate_up_proj.grad[4:].any()
    assert (index >= 4).any() and (index < 4).any()

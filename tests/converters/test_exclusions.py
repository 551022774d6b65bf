"""What `convert` leaves alone of models that say it themselves, and that it says so."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

import hybridq
from hybridq.converters.exclusions import REASONS, keeps_precision
from hybridq.errors import HybridQWarning
from hybridq.ptq import Selection
from hybridq.ptq.header import Entry


class Model(nn.Module):
    """A vocabulary, two projections and a head; what it says of itself is set by each test."""

    def __init__(self, head: str = "out", tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.block = nn.ModuleDict({"up": nn.Linear(16, 32), "wo": nn.Linear(32, 16)})
        self.add_module(head, nn.Linear(16, 48, bias=False))
        if tied:
            getattr(self, head).weight = self.embed.weight


def left(model: nn.Module, **options) -> dict[str, str]:
    """Names that stay, with their reasons; the rest was converted, and the report says so too."""
    before = hybridq.conversion(model, **options)
    hybridq.convert(model, **options)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    stayed = {name for name, m in linears.items() if not isinstance(m, hybridq.Linear)}
    assert hybridq.conversion(model, **options) == before
    assert set(before.converted) == set(linears) - stayed
    assert {name for name, _ in before.left_alone} == stayed
    return dict(before.left_alone)


def test_the_output_embeddings_are_a_head_whatever_their_name() -> None:
    class Says(Model):
        def get_output_embeddings(self):
            return self.out

    assert left(Says()) == {"out": "heads, get_output_embeddings()"}
    assert left(nn.ModuleDict({"inner": Says()})) == {"inner.out": "heads, get_output_embeddings()"}
    assert left(Says(), also=["heads"]) == {}

    class Distilled(Model):
        def get_classifier(self):
            return self.out, self.block.up

    why = "heads, get_classifier()"
    assert left(Distilled()) == {"block.up": why, "out": why}

    class Silent(Model):
        def get_output_embeddings(self):
            return None

        def get_classifier(self):
            raise NotImplementedError

    assert left(Silent()) == {}


def test_a_weight_that_an_embedding_has_too_is_a_head() -> None:
    """Whisper's proj_out, BERT's decoder."""
    why = "heads, its weight is that of the embedding embed"
    assert left(Model("proj_out", tied=True)) == {"proj_out": why}
    assert left(Model("proj_out")) == {}


@pytest.mark.parametrize(
    "keys", [["out.weight"], {"out.weight": "embed.weight"}, [r"ou\w\.weight"]]
)
def test_keys_that_are_tied_are_heads(keys) -> None:
    model = Model()
    model._tied_weights_keys = keys
    assert left(model) == {"out": "heads, _tied_weights_keys"}


SHARED_BLOCKS = {
    "a dict": {"out.weight": "embed.weight", "block.wo.weight": "block.up.weight"},
    "modules": {"out": "embed", "block.wo": "block.up"},
    "a pattern": {"out": "embed", r"block.(?!up)\w+": "block.up"},
    "a list": ["out.weight", "block.wo.weight"],
    "a source that is not there": {"out.weight": "embed.weight", "block.wo.weight": "gone.weight"},
    "a block with a table": {"out.weight": "embed.weight", "block.wo": "block"},
}


@pytest.mark.parametrize("keys", SHARED_BLOCKS.values(), ids=SHARED_BLOCKS)
def test_blocks_that_share_their_weights_are_no_heads(keys) -> None:
    """As transformers lists them, from version 5 on by what they are tied to."""
    model = Model()
    model.block["up"], model.block["bias"] = nn.Linear(32, 16), nn.Embedding(4, 16)
    model.block["wo"].weight = model.block["up"].weight
    model._tied_weights_keys = keys
    assert left(model) == {"out": "heads, _tied_weights_keys"}
    assert model.block["wo"].weight is model.block["up"].weight
    again = Model()
    again.block["wo"] = nn.Linear(16, 16)
    again._tied_weights_keys = {"block.wo.weight": "block.up.weight"}  # as configured, not tied
    assert left(again) == {}


def zamba2() -> nn.Module:
    """Layers 1 and 2 have blocks of their own with the same parameters."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Zamba2Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        num_attention_heads=2,
        num_mem_blocks=1,
        adapter_rank=16,
        mamba_d_state=8,
        mamba_headdim=16,
        mamba_ngroups=1,
        n_mamba_heads=4,
    )
    torch.manual_seed(1)
    return transformers.Zamba2ForCausalLM(config)


def blocks_of(model: nn.Module) -> list[dict[str, nn.Module]]:
    """The linear layers of both blocks, each of two modules with one parameter."""
    both = [dict(model.model.layers[n].shared_transformer.named_modules()) for n in (1, 2)]
    made = [{k: m for k, m in one.items() if isinstance(m, nn.Linear)} for one in both]
    assert made[0].keys() == made[1].keys() and len(made[0]) == 10
    for name, first in made[0].items():
        assert first is not made[1][name] and first.weight is made[1][name].weight
    return made


def test_shared_blocks_of_zamba2_are_converted_and_train_as_one() -> None:
    """The gradient is that of the sum over both: of two copies, each once, it is the sum of two.

    The recipe is deterministic, so the gradients of the copies are added up as autograd does.
    """
    model, ids = zamba2(), torch.arange(4, 20)[None]
    assert left(model) == {"lm_head": "heads, get_output_embeddings()"}
    first, second = blocks_of(model)

    def grads(of: nn.Module) -> None:
        with hybridq.autocast(recipe="mxfp8"):
            of(ids, labels=ids).loss.backward()

    grads(model)
    name = "feed_forward.down_proj"
    got, before = first[name].weight.grad.clone(), first[name].weight.detach().clone()
    apart = zamba2()
    hybridq.convert(apart)
    for n in (1, 2):
        own = apart.model.layers[n].shared_transformer.feed_forward.down_proj
        own.weight = nn.Parameter(own.weight.detach().clone())
    grads(apart)
    parts = [
        apart.model.layers[n].shared_transformer.feed_forward.down_proj.weight.grad for n in (1, 2)
    ]
    torch.testing.assert_close(got, parts[0] + parts[1], rtol=1e-5, atol=1e-8)
    torch.optim.SGD(model.parameters(), 0.5).step()
    assert torch.equal(second[name].weight, before - 0.5 * got)
    blocks_of(model)


def test_shared_blocks_of_zamba2_stay_one_parameter_when_served(caplog) -> None:
    """In high precision, quantized in each forward; the log says so, and no byte is added."""
    model = zamba2()
    before = sum(one.nbytes for one in model.parameters())
    with caplog.at_level(logging.INFO, "hybridq"):
        hybridq.quantize_model(model, "mxfp8")
    first, second = blocks_of(model)
    assert all(type(one) is hybridq.Linear for one in (*first.values(), *second.values()))
    assert not any(map(hybridq.tensor.is_quantized, (one.weight for one in first.values())))
    assert hybridq.tensor.is_quantized(model.model.layers[1].linear.weight)
    assert sum(one.nbytes for one in model.parameters()) < before
    (told,) = [one.message for one in caplog.records if "in each forward" in one.message]
    assert "layers.1.shared_transformer.self_attn.q_proj.weight" in told
    assert "and 12 more" in told
    x = torch.randn(5, 64)
    one = first["self_attn.q_proj"]
    want = hybridq.gemm(hybridq.quantize(x, "mxfp8"), hybridq.quantize(one.weight, "mxfp8"))
    assert torch.equal(one(x), want) and torch.equal(second["self_attn.q_proj"](x), want)


@pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
@pytest.mark.parametrize("kept", [["wo"], {"wo"}, ["block.wo"], ("wo.weight",)])
def test_what_a_model_keeps_in_fp32_stays(attribute, kept) -> None:
    model = Model()
    setattr(model, attribute, kept)
    assert left(model) == {"block.wo": f"kept_in_fp32, {attribute}"}
    again = Model()
    setattr(again, attribute, kept)
    assert left(again, also=("kept_in_fp32",)) == {}
    other = Model()
    setattr(other, attribute, None)
    assert left(other) == {}


def test_a_method_of_that_name_that_takes_arguments_says_nothing() -> None:
    class Several(Model):
        def get_classifier(self, task):
            return getattr(self, task)

    assert left(Several()) == {}


def test_torchs_adaptive_softmax_is_a_head() -> None:
    head = nn.AdaptiveLogSoftmaxWithLoss(32, 100, [20, 60], div_value=2.0)
    model = nn.ModuleDict({"up": nn.Linear(32, 32), "words": head})
    names = ("head", "tail.0.0", "tail.0.1", "tail.1.0", "tail.1.1")
    assert left(model) == {f"words.{one}": "heads, of an adaptive softmax" for one in names}
    x, y = torch.randn(9, 32), torch.arange(9) * 11
    plain = model["words"](x, y)
    with hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(model["words"](x, y).output, plain.output)
    assert left(model, also=["heads"]) == {}


@pytest.mark.parametrize("name", ["fc", "head"])
def test_the_heads_of_torchvision_are_known_by_its_classes(name) -> None:
    own = type("Swin", (Model,), {"__module__": "torchvision.models.swin_transformer"})
    assert left(own(name)) == {name: f"heads, {name} of torchvision's Swin"}
    inner = nn.ModuleDict({"backbone": own(name)})
    assert left(inner) == {f"backbone.{name}": f"heads, {name} of torchvision's Swin"}
    assert left(own(name), also=["heads"]) == {}
    assert left(Model(name)) == {}


NAMES = {
    "heads": [
        *("lm_head", "model.lm_head", "embed_out", "output", "score", "classifier", "pooler.dense"),
        *("bert.pooler.dense", "classifier.out_proj", "qa_outputs", "cls.predictions.decoder"),
        *("cls.predictions.transform.dense", "cls.seq_relationship", "vocab_projector"),
        *("class_embed.1", "model.decoder.bbox_embed.0.layers.2", "ctc_head"),
        *("to_logits", "net.to_logits.2", "heads.head"),
        *("roi_heads.box_predictor.cls_score", "roi_heads.box_predictor.bbox_pred"),
        *("head.classification_head.cls_logits", "mask_predictor.mask_fcn_logits"),
        "head.regression_head.module_list.0.1",  # of SSDlite, 1x1
    ],
    "routers": ["layers.0.mlp.gate", "layers.0.router.classifier", "moe.shared_expert_gate"],
    "adapters": [
        *("layers.0.q_proj.lora_A.default", "layers.0.q_proj.lora_B.default"),
        *("layers.0.attn.q_proj.lora_a", "layers.0.attn.q_proj.lora_b"),  # torchtune
        *("unet.to_q.lora_down", "unet.to_q.lora_up"),
    ],
}


@pytest.mark.parametrize("reason", NAMES)
def test_heads_routers_and_adapters_are_known_by_name(reason) -> None:
    """The same list for modules of a model and for tensors of a file."""
    for name in NAMES[reason]:
        model = nn.Module()
        inner = model
        for part in name.split(".")[:-1]:
            inner.add_module(part, nn.Module())
            inner = getattr(inner, part)
        inner.add_module(name.split(".")[-1], nn.Linear(16, 16))
        model.add_module("proj", nn.Linear(16, 16))
        assert left(model) == {name: f"{reason}, the name {name}"}
        assert keeps_precision(name)
        entry = Entry(f"{name}.weight", "BF16", (16, 16), 0, 512)
        chosen = Selection(hybridq.quantizer("mxfp8", None))
        assert chosen.quantizer_of(entry) is None
        assert Selection(chosen.quantizer, include=("*",)).quantizer_of(entry) is not None
    for name in ("decoder.layers.0.fc1", "attention.output.dense", "blocks.0.proj_out", "head"):
        assert not keeps_precision(name)


@pytest.mark.parametrize("more", [0, 1])
def test_what_makes_the_labels_at_the_top_of_a_model_is_a_head(more) -> None:
    """DETR's class_labels_classifier, which makes one more for no object."""

    class Detector(Model):
        base_model_prefix = "model"

        def __init__(self) -> None:
            super().__init__("class_predictor")
            self.class_predictor = nn.Linear(16, 32 + more)

    model = Detector()
    assert left(model) == {}
    model = Detector()
    model.config = type("Config", (), {"num_labels": 32})()
    why = f"heads, its {32 + more} features are the labels of the configuration"
    assert left(model) == {"class_predictor": why}  # and not block.up, which makes 32
    assert left(Detector(), also=["heads"]) == {}


class Gated(nn.Module):
    """An MLP with a gated activation, whose gate is called so and no more."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)


def test_the_gate_of_an_activation_is_no_router(caplog, monkeypatch) -> None:
    """It makes more features than it takes; a router makes one for each expert."""
    model = nn.ModuleDict({"mlp": Gated(16, 64), "narrow": Gated(16, 8), "even": Gated(16, 16)})
    with caplog.at_level(logging.INFO, "hybridq"):
        stays = left(model)
    assert stays == {f"{one}.gate": f"routers, the name {one}.gate" for one in ("narrow", "even")}
    assert "convert: mlp.gate: more features out than in" in caplog.text
    model = nn.ModuleDict({"gate": nn.Linear(16, 32), "shared_experts": Gated(16, 32)})
    model["experts"] = nn.ModuleList([Gated(16, 32) for _ in range(32)])
    stays = left(nn.ModuleDict({"moe": model}))
    assert stays == {"moe.gate": "routers, the name moe.gate"}
    assert not hybridq.converters.default_filter(nn.Linear(16, 8), "mlp.gate")
    assert hybridq.converters.default_filter(nn.Linear(16, 64), "mlp.gate")
    chosen = Selection(hybridq.quantizer("mxfp8", None))
    for rows, is_chosen in ((64, True), (16, False), (8, False)):
        entry = Entry("mlp.gate.weight", "BF16", (rows, 16), 0, rows * 32)
        assert chosen.chooses(entry) == is_chosen


def test_narrow_modules_gain_nothing() -> None:
    model = nn.ModuleList([nn.Linear(64, 4), nn.Linear(7, 64), nn.Linear(8, 64)])
    assert left(model) == {
        "0": "narrow, 64 to 4 features",
        "1": "narrow, 7 to 64 features",
    }
    assert left(nn.ModuleList([nn.Linear(64, 4)]), least_width=0) == {}
    model = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 64)])
    assert left(model, least_width=64) == {"0": "narrow, 64 to 32 features"}
    narrow = Entry("a.weight", "BF16", (64, 4), 0, 512)
    assert Selection(hybridq.quantizer("mxfp8", None)).quantizer_of(narrow) is None


def test_a_filter_decides_alone() -> None:
    model = Model("lm_head", tied=True)
    model._keep_in_fp32_modules = ["wo"]
    assert left(model, filter_fn=lambda module, name: name != "block.up") == {
        "block.up": "filter_fn"
    }


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"also": "heads"}, TypeError, "also must be a collection of texts, as a list, got"),
        ({"also": ["head"]}, ValueError, f"also takes {', '.join(REASONS)}, got head"),
        ({"least_width": 1.5}, TypeError, "least_width must be an int, got float"),
        ({"least_width": -1}, ValueError, "least_width must not be negative, got -1"),
    ],
)
def test_wrong_arguments_change_nothing(options, kind, text) -> None:
    for function in (hybridq.convert, hybridq.conversion):
        model = Model()
        with pytest.raises(kind, match=text):
            function(model, **options)
        assert type(model.block["up"]) is nn.Linear


# ---- what it says


class Experts(nn.Module):
    """Stacked experts, as newer models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 32))


def test_a_line_in_the_log_says_what_was_left_alone(caplog) -> None:
    with caplog.at_level(logging.INFO, "hybridq"), warnings.catch_warnings():
        warnings.simplefilter("error")
        hybridq.convert(Model("lm_head"))
    (record,) = caplog.records
    assert record.message == (
        "convert: 2 of 3 nn.Linear, 57.1% of the weights; left alone: lm_head (heads, the name "
        "lm_head); see hybridq.summary(model)"
    )


def test_little_or_nothing_converted_is_a_warning() -> None:
    with pytest.warns(HybridQWarning, match=r"convert: 0 of 1 nn.Linear, 0.0% .* lm_head \(heads"):
        hybridq.convert(nn.ModuleDict({"lm_head": nn.Linear(16, 48)}))
    with pytest.warns(HybridQWarning, match="convert: 0 of 0 nn.Linear"):
        hybridq.convert(nn.ReLU())
    model = nn.ModuleDict({"attention": nn.Linear(16, 16), "experts": Experts()})
    with pytest.warns(HybridQWarning, match=r"3.0% of the weights; not known: experts \(Exp"):
        hybridq.convert(model)
    assert "not known   experts: Experts, no converter takes the class; converted with" in str(
        hybridq.conversion(model)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybridq.convert(nn.Sequential(hybridq.Linear(8, 8)))


@pytest.mark.parametrize("kind", ["bert", "whisper", "t5"])
def test_heads_of_transformers_models(kind) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 1, "vocab_size": 96}
    made = {
        "bert": lambda: transformers.BertForPreTraining(
            transformers.BertConfig(hidden_size=32, num_attention_heads=2, **small)
        ),
        "whisper": lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                vocab_size=96,
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                pad_token_id=0,
            )
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=96, d_model=32, num_layers=1, num_heads=2)
        ),
    }[kind]()
    stayed = {name.rsplit(".", 1)[-1] for name in left(made)}
    want = {
        "bert": {"dense", "decoder", "seq_relationship"},
        "whisper": {"proj_out"},
        "t5": {"lm_head", "wo"},
    }
    assert stayed == want[kind]

"""Where scales of input channels go into the layer before: a table by class of block.

Source: arXiv:2211.10438, section 4 and figure 5; arXiv:2306.00978, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import nn

from ..errors import must_be_one_of

__all__ = ["Fold", "folds_of", "register_folds"]

_SOURCES: Final = ("norm", "zero_centered_norm", "linear")


@dataclass(frozen=True)
class Fold:
    """In a block of some class: which layers multiply what which layer makes, and nothing else.

    Between the source and the consumers every channel goes its own way, times factors that do not
    depend on it: then what the source's channel is divided by, the consumers' column can be
    multiplied with.

    Args:
        source: path in the block of the layer that makes the input.
        consumers: paths of all linear layers that multiply it. Nothing else reads it.
        kind: of the source: `"norm"`; `"zero_centered_norm"`, which multiplies by `1 + weight`;
            `"linear"`.
        attention: path of the module whose `head_dim` (or `attention_head_size`) is the width of a
            head, where attention stands between: several heads of the consumer's input may come
            from one head of the source.
        experts: path of a module of experts whose first products multiply it as well; there may
            be no other consumers then.
        routers: paths of modules that multiply it by their `weight` `[n, channels]` and stay in
            high precision. Scales are powers of two then, so that routers choose what they did:
            such a scale rounds nothing.

    Raises:
        ValueError: another kind, no tuple of consumers, experts without a norm before them, or
            routers behind a norm that multiplies by `1 + weight`, whose scales round.
    """

    source: str
    consumers: tuple[str, ...]
    kind: str = "norm"
    attention: str | None = None
    experts: str | None = None
    routers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _SOURCES:
            raise ValueError(f"Fold: kind {must_be_one_of(_SOURCES, self.kind)}")
        given: object = self.consumers
        if not (given or self.experts) or not isinstance(given, tuple):
            raise ValueError(f"Fold: consumers must be a tuple of paths, got {given!r}")
        if (self.experts or self.routers) and self.kind != "norm":
            raise ValueError(f"Fold: experts and routers stand behind a 'norm', got {self.kind!r}")

    @property
    def readers(self) -> tuple[str, ...]:
        """Paths of all whose columns are multiplied."""
        return (*self.consumers, *filter(None, [self.experts]), *self.routers)


_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION: Final = (
    Fold("input_layernorm", _QKV),
    Fold("self_attn.v_proj", ("self_attn.o_proj",), "linear", "self_attn"),
)
_MLP: Final = (
    Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Fold("mlp.up_proj", ("mlp.down_proj",), "linear"),
)
_LLAMA: Final = (*_ATTENTION, *_MLP)
_MIXTURE: Final = (
    Fold("post_attention_layernorm", (), experts="mlp.experts", routers=("mlp.gate",)),
)
#: Its attention may clamp values between v and o.
_OLMOE: Final = (_ATTENTION[0], *_MIXTURE)
#: Each layer is a mixture or an MLP.
_QWEN3_MOE: Final = (*_ATTENTION, *_MIXTURE, *_MLP)
_QWEN2_MOE: Final = (
    *_ATTENTION,
    Fold(
        "post_attention_layernorm",
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        experts="mlp.experts",
        routers=("mlp.gate", "mlp.shared_expert_gate"),
    ),
    Fold("mlp.shared_expert.up_proj", ("mlp.shared_expert.down_proj",), "linear"),
    *_MLP,
)
_GPT_OSS: Final = (
    *_ATTENTION,
    Fold("post_attention_layernorm", (), experts="mlp.experts", routers=("mlp.router",)),
)
_GEMMA: Final = tuple(
    Fold(one.source, one.consumers, one.kind.replace("norm", "zero_centered_norm"), one.attention)
    for one in _LLAMA
)
#: Norms stand behind the residual sum: their result goes on beside the layer, too.
_BERT: Final = (
    Fold("attention.self.value", ("attention.output.dense",), "linear", "attention.self"),
)
#: By module and class; each is held by a test that compares models in FP64.
_FOLDS: dict[str, tuple[Fold, ...]] = {
    f"transformers.models.{family}.modeling_{family}.{name}": folds
    for family, name, folds in (
        ("llama", "LlamaDecoderLayer", _LLAMA),
        ("mistral", "MistralDecoderLayer", _LLAMA),
        ("qwen2", "Qwen2DecoderLayer", _LLAMA),
        ("qwen3", "Qwen3DecoderLayer", _LLAMA),
        ("granite", "GraniteDecoderLayer", _LLAMA),
        ("gemma", "GemmaDecoderLayer", _GEMMA),
        ("mixtral", "MixtralDecoderLayer", (*_ATTENTION, *_MIXTURE)),
        ("olmoe", "OlmoeDecoderLayer", _OLMOE),
        ("qwen2_moe", "Qwen2MoeDecoderLayer", _QWEN2_MOE),
        ("qwen3_moe", "Qwen3MoeDecoderLayer", _QWEN3_MOE),
        ("gpt_oss", "GptOssDecoderLayer", _GPT_OSS),
        ("bert", "BertLayer", _BERT),
        ("roberta", "RobertaLayer", _BERT),
    )
}


def _key(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def register_folds(kind: type[nn.Module], folds: tuple[Fold, ...]) -> None:
    """Make known where scales go in blocks of a class.

    Args:
        kind: the class of a block, exactly.
        folds: what holds of every block of the class; in order of execution.

    Raises:
        TypeError: `kind` is no class of modules, or a fold is none.
        ValueError: other folds of that class are known.
    """
    given: object = kind
    if not (isinstance(given, type) and issubclass(given, nn.Module)):
        raise TypeError(f"register_folds: kind must be a class of nn.Module, got {kind!r}")
    if not all(isinstance(one, Fold) for one in folds):
        raise TypeError(f"register_folds: takes Fold records, got {folds!r}")
    if _FOLDS.setdefault(_key(kind), tuple(folds)) != tuple(folds):
        raise ValueError(f"register_folds: {kind.__qualname__} has other folds already")


def folds_of(kind: type[nn.Module]) -> tuple[Fold, ...]:
    """Return the folds of a class of blocks; none are known of most.

    Args:
        kind: a class.
    """
    return _FOLDS.get(_key(kind), ())

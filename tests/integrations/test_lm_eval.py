"""lm-eval's interface: a model `hybridq`, on a task of a few lines that lies beside it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import hf_models
import hybridq

pytestmark = pytest.mark.judges
lm_eval = pytest.importorskip("lm_eval", minversion="0.4.13")
for needed in ("datasets", "sacrebleu"):  # of lm-eval, which does not look for them itself
    pytest.importorskip(needed)

from lm_eval.api.instance import Instance  # noqa: E402 (after the skip)
from lm_eval.tasks import TaskManager  # noqa: E402
from transformers import EncoderDecoderCache  # noqa: E402

from hybridq.integrations.lm_eval import HybridQLM  # noqa: E402
from hybridq.integrations.transformers import HybridQCache  # noqa: E402

TASK = """
task: small
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = hf_models.saved("llama", tmp_path_factory.mktemp("model"))
    hf_models.save_tokenizer(made)
    return made


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [
        {"question": f"w{i} w{i + 1}", "choices": [f"w{i + 2}", f"w{7 * i % 80}"], "answer": i % 2}
        for i in range(1, 9)
    ]
    file = tmp_path / "small.json"
    file.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "small.yaml").write_text(TASK.format(file=file))
    return tmp_path


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def test_likelihoods_are_those_of_the_quantized_model(folder) -> None:
    options = {"device": "cpu", "batch_size": 1, "dtype": "float32"}
    model = HybridQLM(str(folder), "nvfp4_1d_weight", **options)
    asked = ("w3 w4 w5", " w6 w7")
    ((found, _),) = model.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    twin = hybridq.quantize_model(
        hf_models.load(folder, dtype=torch.float32).eval(), "nvfp4_1d_weight"
    )
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        chances = torch.log_softmax(twin(ids[:, :-1]).logits.float(), -1)[0]
    want = chances[2, 8] + chances[3, 9]
    assert found == pytest.approx(float(want), rel=1e-3)
    with torch.no_grad():
        plain = torch.log_softmax(
            hf_models.load(folder, dtype=torch.float32)(ids[:, :-1]).logits.float(), -1
        )[0]
    assert abs(float(plain[2, 8] + plain[3, 9]) - found) > 1e-2


def test_generation_has_the_cache_that_was_asked_for(folder) -> None:
    options = {"device": "cpu", "batch_size": 1, "kv_cache": "nvfp4"}
    model = HybridQLM(str(folder), "mxfp8", activations="high_precision", **options)
    asked = requests("generate_until", ("w3 w4 w5", {"until": ["w999"], "max_gen_toks": 4}))
    (found,) = model.generate_until(asked, disable_tqdm=True)
    assert len(found.split()) == 4
    with pytest.raises(ValueError, match="blocks lie in one token"):
        HybridQLM(str(folder), "mxfp8", device="cpu", kv_cache="nvfp4_16x16")


def test_a_decoder_behind_an_encoder_generates_with_a_cache_of_each_attention(tmp_path) -> None:
    """A request's tokens are those of `generate` with the same cache: one for both read others."""
    torch.manual_seed(0)
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "init_std": 0.2}
    widths = {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "forced_eos_token_id": None}
    config = hf_models.transformers.BartConfig(vocab_size=96, **heads, **widths, **layers)
    hf_models.transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path)
    hf_models.save_tokenizer(tmp_path)
    options = {"device": "cpu", "batch_size": 1, "kv_cache": "fp8", "dtype": "float32"}
    model = HybridQLM(str(tmp_path), "mxfp8", activations="high_precision", **options)
    asked = requests("generate_until", ("w3 w4 w5", {"until": ["w999"], "max_gen_toks": 8}))
    (found,) = model.generate_until(asked, disable_tqdm=True)
    ids = model.tokenizer("w3 w4 w5", return_tensors="pt").input_ids
    own = HybridQCache(model.model, "fp8")
    both = EncoderDecoderCache(own.self_attention_cache, own.cross_attention_cache)
    plan = {"max_new_tokens": 8, "do_sample": False}
    (want,) = model.model.generate(ids, **plan, **{hf_models.CACHE: both})
    words = model.tokenizer.decode(want, skip_special_tokens=True).split()
    assert len(words) >= 6 and found.split()[: len(words)] == words  # lm-eval's limit is later


def test_a_task_runs_by_the_models_name(folder, tasks) -> None:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    made = lm_eval.simple_evaluate(
        model="hybridq",
        model_args=f"pretrained={folder},recipe=nvfp4",
        tasks=["small"],
        task_manager=manager,
        device="cpu",
        bootstrap_iters=0,
    )
    assert 0.0 <= made["results"]["small"]["acc,none"] <= 1.0
    assert made["n-samples"]["small"]["effective"] == 8


@pytest.mark.more  # a process that imports all of lm-eval
def test_the_command_line_knows_the_model(folder, tasks) -> None:
    command = [sys.executable, "-m", "hybridq.integrations.lm_eval", "run", "--model", "hybridq"]
    command += ["--model_args", f"pretrained={folder},recipe=mxfp8", "--tasks", "small"]
    command += ["--include_path", str(tasks), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "small" in done.stdout and "hybridq" in done.stdout

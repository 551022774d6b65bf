"""Weights that a model keeps as `[in, out]`: their blocks run along in."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

import hybridq
from checkpoint_tools import assert_same_planes, convert, digests
from export_tools import run
from hybridq.ptq import Selection

WIDTH = 32
SHAPES = {
    "h.0.attn.c_attn": (WIDTH, 3 * WIDTH),
    "h.0.attn.c_proj": (WIDTH, WIDTH),
    "h.0.mlp.c_fc": (WIDTH, 4 * WIDTH),
    "h.0.mlp.c_proj": (4 * WIDTH, WIDTH),
    "h.0.crossattention.q_attn": (WIDTH, WIDTH),
}


def write(folder, shapes, config=None):
    """A model's folder; its weights by name."""
    folder.mkdir()
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors["other.up.weight"] = torch.randn(64, WIDTH)  # a linear layer beside them
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("quantizer", [("nvfp4", None), ("mxfp8", "nvfp4")], ids=str)
def test_planes_are_those_of_the_transposed_weight(quantizer, tmp_path) -> None:
    quantizer = hybridq.quantizer(*quantizer)
    tensors = write(tmp_path / "in", SHAPES)
    notes = convert(tmp_path / "in", tmp_path / "out", quantizer)
    assert len(notes.warnings) == 1 and "5 weights are kept as [in, out]" in notes.warnings[0]
    found = hybridq.load_checkpoint(tmp_path / "out")
    for name, weight in tensors.items():
        if name == "other.up.weight":
            assert_same_planes(found[name], quantizer(weight))
            continue
        want, got = quantizer(weight.T.contiguous()), found[name].mT
        assert got.shape == want.shape
        for own, other in ((got.rowwise, want.rowwise), (got.columnwise, want.columnwise)):
            assert (own is None) == (other is None)
            if own is not None:
                assert own.spec == other.spec
                assert all(
                    torch.equal(a, b) for a, b in zip(own.tensors, other.tensors, strict=True)
                )


SQUARE = {"h.0.attn.c_proj": (WIDTH, WIDTH)}


@pytest.mark.parametrize(
    ("shapes", "config", "is_transposed"),
    [
        (SHAPES, None, True),
        (SQUARE, None, False),
        (SQUARE, {"model_type": "gpt2"}, True),
        (SQUARE, {"model_type": "none", "decoder": {"model_type": "gpt2"}}, True),
        (SQUARE, {"model_type": "llama"}, False),
        # The same names, of linear layers: shapes have the last word.
        ({name: shape[::-1] for name, shape in SHAPES.items()}, {"model_type": "gpt2"}, False),
    ],
)
def test_shapes_tell_or_else_the_configuration(shapes, config, is_transposed, tmp_path) -> None:
    write(tmp_path / "in", shapes, config)
    notes = convert(tmp_path / "in", tmp_path / "out", Selection(recipe="mxfp8"))
    assert bool(notes.warnings) == is_transposed


def test_decoded_rows_cannot_be_swapped(tmp_path) -> None:
    write(tmp_path / "in", SHAPES)
    quantizer = hybridq.HybridQuantizer(
        rowwise_quantizer=hybridq.MXFP8Quantizer(),
        columnwise_quantizer=hybridq.NVFP4Quantizer(),
        columnwise_source="rowwise_dequantized",
    )
    with pytest.raises(hybridq.errors.SpecError, match=r"is kept as .* exclude pattern"):
        convert(tmp_path / "in", tmp_path / "out", quantizer)


def test_what_selects(tmp_path) -> None:
    save_file({"up.weight": torch.randn(32, 64)}, tmp_path / "a.safetensors")
    made = []
    for number, selection in enumerate(
        ("mxfp8", hybridq.quantizer("mxfp8", None), Selection(hybridq.quantizer("mxfp8", None)))
    ):
        path = tmp_path / f"{number}.safetensors"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hybridq.convert_checkpoint(tmp_path / "a.safetensors", path, selection)
        made.append(path.read_bytes())
    assert made[0] == made[1] == made[2]
    for wrong in (None, {"mxfp8": 1}, 8):
        with pytest.raises(TypeError, match="selection must be a Selection, a Quantizer or the"):
            hybridq.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", wrong)
    with pytest.raises(hybridq.errors.SpecError, match="mxfp9"):
        hybridq.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", "mxfp9")


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_model_in_memory_is_refused_as_its_files_are(layout, tmp_path) -> None:
    """Its codes would have their blocks along out, and readers would take them for `[out, in]`."""
    names = {"c_attn": (WIDTH, 3 * WIDTH), "c_fc": (WIDTH, 4 * WIDTH)}
    modules = {name: torch.nn.Linear(shape[1], shape[0]) for name, shape in names.items()}
    model = torch.nn.ModuleDict(modules)
    with pytest.raises(hybridq.CheckpointError, match=r"keeps it as \[in, out\]"):
        hybridq.export(model, tmp_path / "out", layout=layout, format="mxfp8")
    assert not (tmp_path / "out").exists()


def gpt2(recipe):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 96, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return hybridq.quantize_model(transformers.GPT2LMHeadModel(config).eval(), recipe)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "fp8"])
def test_quantized_ones_keep_their_planes(format, tmp_path) -> None:
    """In the layout hybridq: bytes of the model's planes, and its outputs from what is loaded."""
    transformers = pytest.importorskip("transformers")
    model = gpt2(hybridq.recipe(fprop=format))
    options = {"layout": "hybridq", "format": hybridq.quantizer(format, None)}
    run(model, tmp_path / "out", **options)
    found = hybridq.load_checkpoint(tmp_path / "out")
    own = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, hybridq.QuantizedTensor)
    }
    assert len(own) == 4
    for name, weight in own.items():
        plane = weight.tensor_storage.columnwise
        assert weight.tensor_storage.rowwise is None and plane is not None
        got = found[name].tensor_storage
        assert got.rowwise is None
        assert all(map(torch.equal, got.columnwise.tensors, plane.tensors))
    run(tmp_path / "out", tmp_path / "again", **options)
    file = "model.safetensors"
    assert digests(tmp_path / "again")[file] == digests(tmp_path / "out")[file]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a weight of another format would be quantized again
        hybridq.quantize_model(back, hybridq.recipe(fprop=format))
    ids = torch.arange(12)[None]
    assert torch.equal(back(ids).logits, model(ids).logits)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_quantized_ones_are_refused_by_name(layout, tmp_path) -> None:
    model = gpt2("mxfp8")
    with pytest.raises(hybridq.CheckpointError, match=r"c_attn.*keeps it as \[in, out\].*bf16"):
        hybridq.export(model, tmp_path / "out", layout=layout)
    assert not run(model, tmp_path / "plain", layout="bf16").warnings
    back = hybridq.load_checkpoint(tmp_path / "plain")
    weight = model.transformer.h[0].attn.c_attn.weight
    assert torch.equal(back["transformer.h.0.attn.c_attn.weight"], weight.dequantize().bfloat16())

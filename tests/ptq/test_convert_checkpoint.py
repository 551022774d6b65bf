"""Checkpoints converted and read back: the planes that the quantizer makes, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import (
    INDEX,
    Notes,
    assert_planes_of,
    convert,
    relative_error,
    shard_name,
    write_raw,
    write_sharded,
)
from hybridq.ptq import Selection, select
from hybridq.ptq.budget import Budget

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tensors are converted in tiles of at most 600 values, or the smallest that cut no block."""
    monkeypatch.setattr(Budget, "most_values", lambda self, record: 600)


def round_trip(folder: Path, tensors, selection, **options):
    save_file(tensors, folder / "in.safetensors")
    target = folder / "out.safetensors"
    target.unlink(missing_ok=True)
    notes = convert(folder / "in.safetensors", target, selection, **options)
    assert notes.done == notes.total == sum(tensor.nbytes for tensor in tensors.values())
    return hybridq.load_checkpoint(target), notes.outcome


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_gives_the_quantizers_planes(fmt, dtype, tmp_path):
    if hybridq.formats.format(fmt).is_identity:
        with pytest.raises(hybridq.SpecError, match="the quantizer must quantize"):
            Selection(hybridq.quantizer(fmt))
        return
    tensors = {"a.weight": torch.randn(37, 75).to(dtype), "a.bias": torch.randn(37)}
    for quantizer in (hybridq.quantizer(fmt, None), hybridq.quantizer(fmt)):
        checkpoint, _ = round_trip(tmp_path, tensors, quantizer)
        assert_planes_of(checkpoint, "a.weight", tensors["a.weight"], quantizer)
        assert checkpoint.record("a.weight").quantizer == quantizer
        assert checkpoint["a.weight"].quantizer == quantizer
        assert torch.equal(checkpoint["a.bias"], tensors["a.bias"])


PAIRS = [
    {"rowwise": "mxfp8", "columnwise": "nvfp4"},
    {"rowwise": "mxfp8", "columnwise": "nvfp4", "columnwise_source": "rowwise_dequantized"},
    {"rowwise": "nvfp4", "columnwise": "fp8_e4m3", "columnwise_source": "rowwise_dequantized"},
    {"rowwise": "nvfp4", "columnwise": "nvfp4", "hadamard": True},
    {"rowwise": "nvfp4", "columnwise": "nvfp4", "row_scaled": True, "hadamard": True},
    {
        "rowwise": "nvfp4",
        "columnwise": "nvfp4",
        "row_scaled": True,
        "columnwise_source": "rowwise_dequantized",
    },
    {"rowwise": "nvfp4_16x16", "columnwise": "nvfp4_16x16", "four_over_six": "mse"},
    {"rowwise": "nvfp4", "columnwise": "nvfp4", "four_over_six": "mae"},
    {"rowwise": "fp8_e4m3", "columnwise": "fp8_e5m2"},
    {"rowwise": "mxfp8", "columnwise": "bf16"},
    {
        "rowwise": "fp8_128x128",
        "columnwise": "identity",
        "columnwise_source": "rowwise_dequantized",
    },
    {
        "rowwise": "identity",
        "columnwise": "mxfp8_32x32",
        "columnwise_source": "rowwise_dequantized",
    },
    {"rowwise": None, "columnwise": "nvfp4"},
]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("options", PAIRS, ids=lambda one: f"{one['rowwise']}-{one['columnwise']}")
@pytest.mark.parametrize("size", ["whole", "tiles"])
def test_pairs_whole_and_in_tiles(options, size, tmp_path, request):
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    quantizer = hybridq.quantizer(
        options["rowwise"],
        options["columnwise"],
        **{key: value for key, value in options.items() if "wise" not in key or "source" in key},
    )
    tensors = {"a.weight": torch.randn(161, 290).bfloat16(), "b.weight": torch.randn(64, 128)}
    checkpoint, _ = round_trip(tmp_path, tensors, quantizer)
    for name, source in tensors.items():
        assert_planes_of(checkpoint, name, source, quantizer)
    columnwise_only = quantizer.with_usage(rowwise=False)
    if not columnwise_only.is_identity:
        checkpoint, _ = round_trip(tmp_path, tensors, columnwise_only)
        assert_planes_of(checkpoint, "a.weight", tensors["a.weight"], columnwise_only)


@given(
    rows=st.integers(0, 70),
    cols=st.integers(0, 150),
    tile=st.integers(100, 5000),
    pair=st.sampled_from(PAIRS),
    dtype=st.sampled_from(DTYPES),
    data=st.integers(0, 1 << 30),
)
def test_odd_shapes_in_tiles_of_any_size(tmp_path_factory, rows, cols, tile, pair, dtype, data):
    torch.manual_seed(data)
    options = dict(pair)
    quantizer = hybridq.quantizer(options.pop("rowwise"), options.pop("columnwise"), **options)
    source = (torch.randn(rows, cols) * torch.randn(rows, 1).exp()).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "most_values", lambda self, record: tile)
        patch.setattr(select, "LEAST_WIDTH", 0)
        checkpoint, _ = round_trip(
            tmp_path_factory.mktemp("odd"), {"a.weight": source}, quantizer, measure=False
        )
    assert_planes_of(checkpoint, "a.weight", source, quantizer)


@pytest.mark.parametrize("special", [float("inf"), float("nan"), 0.0, 1e-40, 3e38])
def test_special_values_in_tiles(special, tmp_path, small_tiles):
    source = torch.randn(70, 96)
    source[40, 33] = special
    if special == 0.0:
        source.zero_()
    quantizer = hybridq.quantizer("fp8_e4m3", "nvfp4", hadamard=True)
    checkpoint, outcome = round_trip(tmp_path, {"a.weight": source}, quantizer)
    assert_planes_of(checkpoint, "a.weight", source, quantizer)
    found = outcome.tensors["a.weight"]
    assert found.num_nonfinite == int(not torch.isfinite(source).all())
    if special == 0.0:
        assert all(error.relative == 0.0 for error in found.errors.values())


def test_a_backend_that_is_forced_is_used(backend, tmp_path):
    source = torch.randn(40, 80).bfloat16()
    quantizer = hybridq.quantizer("mxfp8", "nvfp4")
    checkpoint, _ = round_trip(tmp_path, {"a.weight": source}, quantizer)
    assert_planes_of(checkpoint, "a.weight", source, quantizer)


def test_a_stack_is_quantized_matrix_by_matrix(tmp_path, small_tiles):
    experts = torch.randn(3, 50, 70).bfloat16() * torch.tensor([1.0, 30.0, 0.01])[:, None, None]
    tensors = {"mlp.experts": experts.bfloat16(), "none.experts": torch.zeros(0, 4, 8)}
    quantizer = hybridq.quantizer("nvfp4", "mxfp8_32x32")
    checkpoint, outcome = round_trip(tmp_path, tensors, Selection(quantizer, include=("*experts",)))
    for name, source in tensors.items():
        assert_planes_of(checkpoint, name, source, quantizer)
    assert set(outcome.tensors) == set(tensors)
    # The experts' buffers are views of one, which a grouped product takes without a copy.
    stack = checkpoint["mlp.experts"]
    assert len({one.rowwise.data.untyped_storage().data_ptr() for one in stack}) == 1
    x = torch.randn(6, 70).bfloat16()
    y = hybridq.grouped_gemm(x, stack, torch.tensor([1, 4, 6], dtype=torch.int32))
    want = torch.cat(
        [hybridq.gemm(x[a:b], stack[i]) for i, (a, b) in enumerate(((0, 1), (1, 4), (4, 6)))]
    )
    assert torch.equal(y, want)


def test_what_is_derivable_is_stored_once(tmp_path):
    source = torch.randn(64, 96)
    sizes = {}
    for fmt in ("mxfp8_32x32", "mxfp8"):
        quantizer = hybridq.quantizer(fmt)
        checkpoint, outcome = round_trip(tmp_path, {"a.weight": source}, quantizer)
        assert_planes_of(checkpoint, "a.weight", source, quantizer)
        sizes[fmt] = outcome.target_nbytes
        assert set(outcome.tensors["a.weight"].errors) == (
            {"rowwise"} if fmt == "mxfp8_32x32" else {"rowwise", "columnwise"}
        )
    assert sizes == {"mxfp8_32x32": 64 * 96 + 6, "mxfp8": 2 * (64 * 96 + 64 * 3)}
    # Columns of decoded rows are of other values, and have an amax of their own.
    decoded = hybridq.quantizer("nvfp4_16x16", columnwise_source="rowwise_dequantized")
    checkpoint, _ = round_trip(tmp_path, {"a.weight": source}, decoded)
    assert_planes_of(checkpoint, "a.weight", source, decoded)
    names = load_file(tmp_path / "out.safetensors").keys()
    assert "a.weight.columnwise.data" in names and "a.weight.columnwise.amax" in names


def test_the_buffers_have_names_for_any_reader(tmp_path):
    source = torch.randn(20, 48).bfloat16()
    quantizer = hybridq.quantizer("nvfp4", "mxfp8")
    round_trip(tmp_path, {"a.weight": source, "a.norm.weight": torch.ones(3)}, quantizer)
    found = load_file(tmp_path / "out.safetensors")
    made = quantizer(source)
    want = {
        f"a.weight.{plane.direction}.{name}": buffer
        for plane in made.tensor_storage.planes
        for name, buffer in plane.buffers.items()
    }
    assert found.keys() == {*want, "a.norm.weight"}
    assert all(torch.equal(found[name], buffer) for name, buffer in want.items())
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        record = json.loads(file.metadata()["hybridq"])
    assert record == {
        "version": 1,
        "tensors": {"a.weight": {"quantizer": quantizer.text, "shape": [20, 48], "dtype": "BF16"}},
    }


#: Every dtype of the format with its bits.
ALL_DTYPES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


def test_every_dtype_is_copied_bit_for_bit(tmp_path):
    header, data = {}, b""
    for dtype, bits in ALL_DTYPES.items():
        piece = torch.randint(0, 2 if dtype == "BOOL" else 256, (12 * bits // 8,)).to(torch.uint8)
        place = [len(data), len(data) + len(piece)]
        header[f"x.{dtype}"] = {"dtype": dtype, "shape": [3, 4], "data_offsets": place}
        data += piece.numpy().tobytes()
    weight = torch.randn(32, 32)
    header["a.weight"] = {
        "dtype": "F32",
        "shape": [32, 32],
        "data_offsets": [len(data), len(data) + weight.nbytes],
    }
    source = write_raw(tmp_path / "in.safetensors", header, data + weight.numpy().tobytes())
    convert(source, tmp_path / "out.safetensors", hybridq.quantizer("mxfp8", None))
    raw = (tmp_path / "out.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    made = json.loads(raw[8 : 8 + size])
    checkpoint = hybridq.load_checkpoint(tmp_path / "out.safetensors")
    for dtype in ALL_DTYPES:
        before, after = header[f"x.{dtype}"], made[f"x.{dtype}"]
        assert (before["dtype"], before["shape"]) == (after["dtype"], after["shape"])
        begin, end = (8 + size + place for place in after["data_offsets"])
        assert raw[begin:end] == data[slice(*before["data_offsets"])], dtype
        if dtype.startswith("F6_"):  # torch has none: everything else of the file can be read
            with pytest.raises(hybridq.CheckpointError, match=rf"no dtype .* {dtype}"):
                checkpoint[f"x.{dtype}"]
        else:
            loaded = checkpoint[f"x.{dtype}"]
            assert loaded.shape == ((3, 2) if dtype == "F4" else (3, 4))
            assert loaded.reshape(-1).view(torch.uint8).numpy().tobytes() == raw[begin:end]


def sharded_model():
    torch.manual_seed(7)
    embed = {"model.embed_tokens.weight": torch.randn(50, 32).bfloat16()}
    layers = [
        {
            f"model.layers.{i}.q_proj.weight": torch.randn(64, 32).bfloat16(),
            f"model.layers.{i}.mlp.gate.weight": torch.randn(4, 32).bfloat16(),
            f"model.layers.{i}.mlp.gate_proj.weight": torch.randn(96, 32).bfloat16(),
            f"model.layers.{i}.input_layernorm.weight": torch.randn(32).bfloat16(),
        }
        for i in range(2)
    ]
    return [embed | layers[0], layers[1], {"lm_head.weight": torch.randn(50, 32).bfloat16()}]


CHOSEN = {
    f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("q_proj", "mlp.gate_proj")
}


def test_a_sharded_folder(tmp_path):
    shards = sharded_model()
    source = write_sharded(tmp_path / "in", shards, total_parameters=7)
    (source / "code").mkdir()
    (source / "code" / "model.py").write_text("pass\n")
    for name in ("pytorch_model.bin", "consolidated.safetensors", ".gitattributes"):
        (source / name).write_bytes(b"x")
    quantizer = hybridq.quantizer("nvfp4", None)
    notes = convert(source, tmp_path / "out", quantizer)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *(shard_name(i, 3) for i in range(3)),
        *(INDEX, "config.json", "tokenizer.json", "code", "hybridq.json", ".hybridq-convert"),
    }
    for name in ("config.json", "tokenizer.json", "code/model.py"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    checkpoint = hybridq.load_checkpoint(tmp_path / "out")
    tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert checkpoint.keys() == tensors.keys()
    assert {name for name in checkpoint if checkpoint.record(name)} == CHOSEN
    for name, tensor in tensors.items():
        if name in CHOSEN:
            assert_planes_of(checkpoint, name, tensor, quantizer)
        else:
            assert torch.equal(checkpoint[name], tensor)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    by_file = {}
    for number in range(3):
        file = shard_name(number, 3)
        found = load_file(tmp_path / "out" / file)
        by_file |= dict.fromkeys(found, file)
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    assert index["weight_map"] == by_file
    total = notes.outcome.target_nbytes
    assert index["metadata"] == {"total_size": total, "total_parameters": 7}
    record = json.loads((tmp_path / "out" / "hybridq.json").read_text())
    assert record["version"] == 1 and record["tensors"].keys() == CHOSEN
    assert record["tensors"]["model.layers.1.q_proj.weight"] == {
        "quantizer": quantizer.text,
        "shape": [64, 32],
        "dtype": "BF16",
        "file": shard_name(1, 3),
    }
    assert (len(notes.outcome.tensors), notes.outcome.num_copied) == (4, 6)


def test_a_folder_of_links_as_a_cache_has_it(tmp_path):
    blobs = write_sharded(tmp_path / "blobs", sharded_model())
    source = tmp_path / "snapshot"
    source.mkdir()
    for path in blobs.iterdir():
        (source / path.name).symlink_to(path)
    convert(source, tmp_path / "out", hybridq.quantizer("mxfp8", None))
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert len(hybridq.load_checkpoint(tmp_path / "out")) == 10
    assert (tmp_path / "out" / "config.json").read_bytes() == (blobs / "config.json").read_bytes()


def test_a_folder_of_one_file(tmp_path):
    (tmp_path / "in").mkdir()
    save_file({"a.weight": torch.ones(32, 32)}, tmp_path / "in" / "model.safetensors")
    convert(tmp_path / "in", tmp_path / "out", hybridq.quantizer("mxfp8", None))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "hybridq.json", ".hybridq-convert"}
    assert hybridq.load_checkpoint(tmp_path / "out")["a.weight"].dequantize().eq(1).all()


def test_include_and_exclude(tmp_path):
    source = write_sharded(tmp_path / "in", sharded_model())
    quantizer = hybridq.quantizer("mxfp8", None)

    def chosen(**globs):
        target = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        return set(convert(source, target, Selection(quantizer, **globs)).outcome.tensors)

    assert chosen() == CHOSEN
    assert chosen(exclude=("*.0.*",)) == {name for name in CHOSEN if ".1." in name}
    assert chosen(include=("lm_head.*", "*.q_proj.*"), exclude=("*.1.*",)) == {
        "lm_head.weight",
        "model.layers.0.q_proj.weight",
    }
    # Vectors cannot be quantized, whatever a pattern says.
    assert "model.layers.0.input_layernorm.weight" not in chosen(include=("*",))


def test_patterns_that_match_nothing_are_said(tmp_path):
    """Of `convert_checkpoint`, and of `export` of a folder and of a model, in every layout."""
    source = write_sharded(tmp_path / "in", sharded_model())
    globs = {"include": ("*.weight", "*.q_porj.*"), "exclude": ("*.up_porj.*", "*.0.*")}
    notes = convert(source, tmp_path / "0", Selection(hybridq.quantizer("mxfp8", None), **globs))
    said = [notes.warnings]
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(torch.nn.Linear(64, 64))})
    for number, (origin, layout) in enumerate(
        (one, layout) for one in (source, model) for layout in ("hybridq", "compressed-tensors")
    ):
        notes = Notes()
        options = {"layout": layout, "format": "mxfp8", **globs, "exclude": ("*.up_porj.*",)}
        hybridq.export(origin, tmp_path / f"e{number}", observer=notes, **options)
        said.append(notes.warnings)
    for texts in said:
        unused = [one for one in texts if "matches no tensor" in one]
        assert len(unused) == 2, texts
        assert "include pattern '*.q_porj.*'" in unused[0]
        assert "exclude pattern '*.up_porj.*'" in unused[1]


def test_a_pattern_is_no_collection_of_letters(tmp_path):
    """`include="*.up.*"` would choose by `*`: everything, embeddings and heads too."""
    quantizer = hybridq.quantizer("mxfp8", None)
    source = write_sharded(tmp_path / "in", sharded_model())
    for name in ("include", "exclude"):
        for bad, what in (
            ("*.up.*", "must be a collection of texts"),
            ([3], "must hold texts only, got 3"),
        ):
            with pytest.raises(TypeError, match=f"Selection: {name} {what}"):
                Selection(quantizer, **{name: bad})
            with pytest.raises(TypeError, match=f"export: {name} {what}"):
                hybridq.export(
                    source, tmp_path / "q", layout="modelopt", format="nvfp4", **{name: bad}
                )
    assert Selection(quantizer, include=["*"]).include == ("*",)


def test_a_recipe_is_asked_by_role(tmp_path):
    roles = []

    def factory(role):
        roles.append(role)
        if role.name.endswith("q_proj"):
            return hybridq.IdentityQuantizer()
        return hybridq.NVFP4Quantizer(with_2d_quantization=True)

    source = write_sharded(tmp_path / "in", sharded_model())
    notes = convert(source, tmp_path / "out", Selection(recipe=hybridq.CustomRecipe(factory)))
    assert set(notes.outcome.tensors) == {name for name in CHOSEN if "gate_proj" in name}
    assert set(roles) == {
        hybridq.QuantizerRole("linear", "weight", name.removesuffix(".weight")) for name in CHOSEN
    }


@pytest.mark.parametrize("recipe", hybridq.recipes.names())
def test_every_recipe(recipe, tmp_path):
    source = torch.randn(40, 80).bfloat16()
    stack = torch.randn(2, 40, 80)
    tensors = {"blocks.0.up.weight": source, "blocks.0.experts.weight": stack}
    own = hybridq.recipes.get(recipe)
    made = [
        own.quantizer(
            hybridq.QuantizerRole(kind, "weight", name.removesuffix(".weight"))
        ).undelayed()
        for kind, name in zip(("linear", "grouped_linear"), tensors, strict=True)
    ]
    selection = Selection(recipe=recipe, include=("*",))
    if all(quantizer.is_identity for quantizer in made):
        with pytest.raises(hybridq.CheckpointError, match=r"no tensor of .* is chosen"):
            round_trip(tmp_path, tensors, selection)
        return
    checkpoint, _ = round_trip(tmp_path, tensors, selection)
    for (name, tensor), quantizer in zip(tensors.items(), made, strict=True):
        assert_planes_of(checkpoint, name, tensor, quantizer)


def test_errors_are_those_of_the_planes(tmp_path):
    quantizer = hybridq.quantizer("mxfp8", "nvfp4")
    tensors = {"a.weight": torch.randn(200, 3000) * 1e-12, "b.weight": torch.randn(70, 33).half()}
    _, outcome = round_trip(tmp_path, tensors, quantizer)
    for name, source in tensors.items():
        made, found = quantizer(source), outcome.tensors[name]
        assert found.amax == float(source.float().abs().max())
        for plane in made.tensor_storage.planes:
            want = relative_error(plane.dequantize(), source)
            error = found.errors[plane.direction]
            assert error.relative == pytest.approx(want, rel=2e-5)
            assert error.sqnr_db == pytest.approx(-20 * torch.tensor(want).log10().item(), rel=1e-4)
    worst = max(outcome.tensors, key=lambda name: outcome.tensors[name].worst)
    assert outcome.worst == (worst, outcome.tensors[worst].worst)
    assert not round_trip(tmp_path, tensors, quantizer, measure=False)[1].tensors["a.weight"].errors


def test_a_checkpoint_is_a_mapping_that_reads_lazily(tmp_path):
    source = write_sharded(tmp_path / "in", sharded_model())
    convert(source, tmp_path / "out", hybridq.quantizer("mxfp8", None))
    checkpoint = hybridq.load_checkpoint(tmp_path / "out")
    assert len(dict(checkpoint)) == len(checkpoint) == 10
    assert "model.embed_tokens.weight" in checkpoint and "x" not in checkpoint
    with pytest.raises(KeyError):
        checkpoint["x"]
    assert "10 tensors, 4 quantized" in repr(checkpoint)
    # Each read gives memory of its own, which can be written.
    one, other = checkpoint["lm_head.weight"], checkpoint["lm_head.weight"]
    one.zero_()
    assert other.any()
    # Only what is asked for is read: another file may be gone.
    (tmp_path / "out" / shard_name(1, 3)).unlink()
    assert checkpoint["model.layers.0.q_proj.weight"].shape == (64, 32)
    with pytest.raises(hybridq.CheckpointError, match="cannot read"):
        checkpoint["model.layers.1.q_proj.weight"]


def test_a_loaded_weight_trains(tmp_path):
    save_file({"up.weight": torch.randn(48, 32)}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", hybridq.quantizer("mxfp8"))
    weight = torch.nn.Parameter(hybridq.load_checkpoint(tmp_path / "out.safetensors")["up.weight"])
    before = weight.dequantize().detach().clone()
    torch.nn.functional.linear(torch.randn(4, 32), weight).sum().backward()
    torch.optim.SGD([weight], lr=1.0).step()
    assert not torch.equal(weight.dequantize(), before)

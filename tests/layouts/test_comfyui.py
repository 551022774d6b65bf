"""ComfyUI's files, by hand and by its own kernels: the same codes, and values that are equal."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import Notes
from hybridq import layouts
from hybridq.errors import CheckpointError
from hybridq.layouts.comfyui import METADATA
from hybridq.ptq import ConvertOptions, options, steps
from layout_cases import swizzled

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])
FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Scales in their tiles, in ComfyUI's shape."""
    rows, blocks = scales.shape
    return swizzled(scales).reshape(-(-rows // 128) * 128, -(-blocks // 4) * 4)


def nvfp4(rows: int, cols: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of one weight, and what they mean."""
    codes = torch.randint(0, 16, (rows, cols), dtype=torch.uint8)
    scales = torch.rand(rows, cols // 16).mul(400).to(torch.float8_e4m3fn)
    factor = torch.tensor(3.0) / torch.tensor(2688.0)
    values = E2M1[codes.int()].double() * scales.double().repeat_interleave(16, 1) * factor.double()
    return {
        "weight": codes[:, ::2] << 4 | codes[:, 1::2],
        "weight_scale": in_tiles(scales),
        "weight_scale_2": factor,
    }, values.float()


def mxfp8(rows: int, cols: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes = torch.randn(rows, cols).mul(40).to(torch.float8_e4m3fn)
    scales = torch.randint(115, 130, (rows, cols // 32), dtype=torch.uint8)
    values = codes.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale": in_tiles(scales)}, values


def fp8(dtype: torch.dtype, scale: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes = torch.randn(48, 40).mul(40).to(dtype)
    factor = torch.tensor(0.0173)
    return {"weight": codes, scale: factor}, codes.float() * factor


def marked(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    said = torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)
    return {**tensors, "comfy_quant": said}


def named(tensors: dict[str, torch.Tensor], module: str = "model.diffusion_model.a.qkv"):
    return {f"{module}.{key}": value for key, value in tensors.items()}


def weights(read) -> dict[str, torch.Tensor]:
    return {
        name: one.rowwise.dequantize(torch.float32)
        for name, one in read.items()
        if hasattr(one, "rowwise")
    }


@pytest.mark.parametrize("where", ["tensors", "metadata"])
@pytest.mark.parametrize("dtype", [torch.uint8, None])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_scales_in_tiles_are_read(kind, dtype, where, tmp_path) -> None:
    """128 rows and 64 columns: the shapes are ModelOpt's, and only the description says more."""
    rows, cols = (128, 64) if kind == "nvfp4" else (160, 160)
    made, values = nvfp4(rows, cols) if kind == "nvfp4" else mxfp8(rows, cols)
    if dtype is not None:
        made["weight_scale"] = made["weight_scale"].view(dtype)
    elif kind == "mxfp8":
        made["weight_scale"] = made["weight_scale"].view(torch.float8_e8m0fnu)
    tensors, metadata = named(marked(kind, made)), {}
    if where == "metadata":
        tensors = named(made)
        said = {"format_version": "1.0", "layers": {"a.qkv": {"format": kind}}}
        metadata = {METADATA: json.dumps(said)}
    save_file({**tensors, "norm.weight": torch.ones(8)}, tmp_path / "in.safetensors", metadata)
    read = hybridq.load_checkpoint(tmp_path / "in.safetensors")
    assert sorted(read) == ["model.diffusion_model.a.qkv.weight", "norm.weight"]
    assert torch.equal(weights(read)["model.diffusion_model.a.qkv.weight"], values)
    hybridq.export(tmp_path / "in.safetensors", tmp_path / "bf16.safetensors", layout="bf16")
    plain = load_file(tmp_path / "bf16.safetensors")
    assert sorted(plain) == sorted(read)
    assert torch.equal(plain["model.diffusion_model.a.qkv.weight"], values.bfloat16())
    header = (tmp_path / "bf16.safetensors").read_bytes()[:400]
    assert METADATA.encode() not in header, "it would be read as quantized again"


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("is_old", [False, True])
def test_fp8_with_one_scale_is_read(name, is_old, tmp_path) -> None:
    made, values = fp8(FP8[name], "scale_weight" if is_old else "weight_scale")
    tensors = named(made if is_old else marked(name, made))
    tensors["model.diffusion_model.a.qkv.scale_input" if is_old else "a.qkv.bias"] = torch.tensor(
        1.0
    )
    if is_old:
        tensors["scaled_fp8"] = torch.empty(0, dtype=FP8[name])
    # Older files hold what ComfyUI has only cast in the same dtype.
    tensors["a.emb.weight"] = torch.ones(4, 4).to(FP8[name])
    save_file(tensors, tmp_path / "in.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = hybridq.load_checkpoint(tmp_path / "in.safetensors")
    assert torch.equal(weights(read)["model.diffusion_model.a.qkv.weight"], values)
    assert read["a.emb.weight"].dtype == FP8[name]
    assert not any(key.endswith(("comfy_quant", "scaled_fp8")) for key in read)


def test_e5m2_is_read_where_the_layout_is_said(tmp_path) -> None:
    made, values = fp8(torch.float8_e5m2, "weight_scale")
    save_file(named(made, "a"), tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="E5M2 with scales"):
        hybridq.load_checkpoint(tmp_path / "in.safetensors")
    read = hybridq.load_checkpoint(tmp_path / "in.safetensors", "comfyui")
    assert torch.equal(weights(read)["a.weight"], values)


def test_fp8_with_a_scale_per_row_is_read(tmp_path) -> None:
    codes, scale = torch.randn(48, 40).mul(40).to(FP8["float8_e4m3fn"]), torch.rand(48) + 0.5
    tensors = marked("float8_e4m3fn_rowwise", {"weight": codes, "weight_scale": scale})
    save_file(named(tensors, "a"), tmp_path / "in.safetensors")
    read = weights(hybridq.load_checkpoint(tmp_path / "in.safetensors"))
    assert torch.equal(read["a.weight"], codes.float() * scale[:, None])


def test_what_it_cannot_tell_is_an_error(tmp_path) -> None:
    made, _ = nvfp4(128, 64)
    kinds = {
        "integers": {
            "weight": torch.zeros(8, 8, dtype=torch.int8),
            "weight_scale": torch.ones(8, 1),
        },
        "cannot tell what": {**made, "weight_scale": made["weight_scale"][:64]},
        "cannot tell": {key: made[key] for key in ("weight", "weight_scale")},
    }
    for number, (match, tensors) in enumerate(kinds.items()):
        file = tmp_path / f"{number}.safetensors"
        save_file(named(marked("any", tensors)), file)
        with pytest.raises(CheckpointError, match=match):
            hybridq.load_checkpoint(file)
        with pytest.raises(CheckpointError, match=match):
            hybridq.export(file, tmp_path / "out.safetensors", layout="bf16")
    tensors = named(marked("nvfp4", {**made, "pre_quant_scale": torch.ones(64)}))
    save_file(tensors, tmp_path / "smooth.safetensors")
    with pytest.raises(CheckpointError, match="scales the input"):
        hybridq.load_checkpoint(tmp_path / "smooth.safetensors")


@pytest.mark.parametrize("scheme", [one.name for one in layouts.COMFYUI.schemes])
def test_files_have_a_description_of_each_layer(scheme, tmp_path) -> None:
    torch.manual_seed(0)
    source = {f"blocks.{i}.proj.weight": torch.randn(96, 64).bfloat16() for i in range(2)}
    source |= {"blocks.0.proj.bias": torch.ones(96), "out.weight": torch.randn(20, 64)}
    save_file(source, tmp_path / "in.safetensors")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hybridq.export(
            tmp_path / "in.safetensors",
            tmp_path / "out.safetensors",
            layout="comfyui",
            format=scheme,
        )
    told = [str(one.message) for one in told]
    rows = layouts.COMFYUI.scheme(scheme).rows
    assert any(f"rows in multiples of {rows}" in one for one in told) == (rows > 1)
    found = load_file(tmp_path / "out.safetensors")
    assert found["blocks.0.proj.bias"].equal(source["blocks.0.proj.bias"])
    is_left = rows > 1
    assert ("out.comfy_quant" in found) != is_left
    assert (found["out.weight"].dtype == torch.float32) == is_left
    said = json.loads(bytes(found["blocks.1.proj.comfy_quant"].tolist()))
    names = {"fp8_tensor": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    assert said == {"format": names.get(scheme, scheme)}


def test_inputs_and_folders(tmp_path) -> None:
    """A folder of diffusers has no model_type, and ComfyUI reads no configuration."""
    from hybridq.calibration import Calibration

    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"proj.weight": torch.randn(32, 64).bfloat16()}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    calibration = Calibration({"proj": {"input": torch.tensor(5.0)}}, {}, {})
    notes = Notes()
    hybridq.export(
        folder, tmp_path / "out", layout="comfyui", format="nvfp4", calibration=calibration,
        observer=notes,
    )  # fmt: skip
    assert not any("no program will load" in one for one in notes.warnings), notes.warnings
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "_class_name": "FluxTransformer2DModel"
    }
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["proj.input_scale"].equal(torch.tensor(5.0) / torch.tensor(2688.0))


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8", "nvfp4_16x16", "mxfp8_32x32"])
def test_tiles_of_a_large_matrix_have_the_bytes_of_the_whole(scheme, tmp_path, monkeypatch) -> None:
    """Cut in rows and columns, on the way there, on the way back, and both at once."""
    torch.manual_seed(0)
    source = {"a.weight": torch.randn(1056, 2080), "b.weight": torch.randn(528 * 2, 64 * 65)}
    save_file(source, tmp_path / "in.safetensors")
    whole = export(tmp_path / "in.safetensors", tmp_path / "whole", format=scheme)
    monkeypatch.setattr(options, "_LEAST_MEMORY", 0)
    counts: list[int] = []
    tiles_of = steps.tiles_of

    def counted(*given):
        made = list(tiles_of(*given))
        counts.append(len(made))
        return iter(made)

    monkeypatch.setattr(steps, "tiles_of", counted)
    small = {"options": ConvertOptions(memory=19 << 20, measure=False)}
    parts = export(tmp_path / "in.safetensors", tmp_path / "parts", format=scheme, **small)
    assert parts.read_bytes() == whole.read_bytes()
    other = export(parts, tmp_path / "other", layout="modelopt", **small)
    straight = export(tmp_path / "in.safetensors", tmp_path / "s", layout="modelopt", format=scheme)
    assert other.read_bytes() == straight.read_bytes()
    back = export(other, tmp_path / "back", source_layout="modelopt", **small)
    assert back.read_bytes() == whole.read_bytes()
    assert max(counts) > 4


def export(source, folder, layout="comfyui", **given):
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybridq.export(source, folder / "o.safetensors", layout=layout, **given)
    return folder / "o.safetensors"


@pytest.mark.judges
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "fp8"])
def test_comfy_kitchen_reads_and_writes_the_same(kind, tmp_path) -> None:
    kitchen = pytest.importorskip("comfy_kitchen")
    from comfy_kitchen import tensor as theirs
    from comfy_kitchen.backends.eager.quantization import dequantize_nvfp4

    torch.manual_seed(0)
    x = torch.randn(192, 160)
    name, layout, fmt = {
        "nvfp4": ("nvfp4", theirs.TensorCoreNVFP4Layout, "nvfp4"),
        "mxfp8": ("mxfp8", theirs.TensorCoreMXFP8Layout, "mxfp8"),
        "fp8": ("float8_e4m3fn", theirs.TensorCoreFP8Layout, "fp8_tensor"),
    }[kind]

    def decoded(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        if kind == "nvfp4":
            own = (tensors[key] for key in ("weight", "weight_scale_2", "weight_scale"))
            return dequantize_nvfp4(*own, torch.float64).float()  # FP32 rounds twice
        scale = tensors["weight_scale"]
        if kind == "mxfp8":
            own = scale.view(torch.float8_e8m0fnu)
            return kitchen.dequantize_mxfp8(tensors["weight"], own, torch.float32)
        return kitchen.dequantize_per_tensor_fp8(tensors["weight"], scale, torch.float32)

    codes, params = layout.quantize(x)
    made = {f"weight{key}": one for key, one in layout.state_dict_tensors(codes, params).items()}
    save_file(named(marked(name, made), "m"), tmp_path / "theirs.safetensors")
    read = hybridq.load_checkpoint(tmp_path / "theirs.safetensors")
    assert torch.equal(weights(read)["m.weight"], decoded(made))

    save_file({"m.weight": x}, tmp_path / "in.safetensors")
    ours = load_file(export(tmp_path / "in.safetensors", tmp_path / "ours", format=fmt))
    own = {key.removeprefix("m."): one for key, one in ours.items()}
    read = hybridq.load_checkpoint(tmp_path / "ours" / "o.safetensors")
    assert torch.equal(weights(read)["m.weight"], decoded(own))

"""What servers look for in a checkpoint: names, dtypes and shapes that their sources state.

Facts read from vLLM (`vllm/model_executor/layers/quantization`: modelopt.py at commit 00155cde,
fp8.py at 0071b24b, `compressed_tensors/schemes/*`, `quark/schemes/*` at 925c0080) and SGLang
(modelopt_quant.py of `python/sglang/srt/layers/quantization` at 003ca3e5): the parameters that they
register for a linear layer before they load a file. Neither runs here.
"""

from __future__ import annotations

import pytest
import torch

from hybridq import layouts
from hybridq.formats import PlaneSpec
from layout_cases import SPECS

E4M3, U8, F32 = torch.float8_e4m3fn, torch.uint8, torch.float32
E8M0, I8 = torch.float8_e8m0fnu, torch.int8
N, K = 256, 512

#: Layout, scheme: what is registered of `[N, K]`: name to dtype and shape. What has a value for
#: each linear that is stacked there is a scalar in a file.
SERVERS = {
    # vLLM ModelOptNvFp4LinearMethod, SGLang ModelOptFp4LinearMethod
    ("modelopt", "nvfp4"): {
        "weight": (U8, (N, K // 2)),
        "weight_scale": (E4M3, (N, K // 16)),
        "weight_scale_2": (F32, ()),
        "input_scale": (F32, ()),
    },
    # vLLM ModelOptFp8LinearMethod, SGLang ModelOptFp8LinearMethod
    ("modelopt", "fp8_tensor"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, ()),
        "input_scale": (F32, ()),
    },
    # vLLM ModelOptMxFp8LinearMethod
    ("modelopt", "mxfp8"): {"weight": (E4M3, (N, K)), "weight_scale": (U8, (N, K // 32))},
    # vLLM ModelOptFp8PcPtLinearMethod
    ("modelopt", "fp8_channel"): {"weight": (E4M3, (N, K)), "weight_scale": (F32, (N,))},
    # vLLM ModelOptFp8PbWoLinearMethod
    ("modelopt", "fp8_block"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, (N // 128, 1, K // 128, 1)),
    },
    # vLLM CompressedTensorsW4A4Fp4
    ("compressed-tensors", "nvfp4"): {
        "weight_packed": (U8, (N, K // 2)),
        "weight_scale": (E4M3, (N, K // 16)),
        "weight_global_scale": (F32, (1,)),
        "input_global_scale": (F32, (1,)),
    },
    # vLLM CompressedTensorsW8A8Mxfp8
    ("compressed-tensors", "mxfp8"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (U8, (N, K // 32)),
    },
    # vLLM CompressedTensorsW4A16Mxfp4
    ("compressed-tensors", "mxfp4"): {
        "weight_packed": (U8, (N, K // 2)),
        "weight_scale": (U8, (N, K // 32)),
    },
    # vLLM CompressedTensorsW8A8Fp8, by strategy
    ("compressed-tensors", "fp8_tensor"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, (1,)),
        "input_scale": (F32, (1,)),
    },
    ("compressed-tensors", "fp8_channel"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, (N, 1)),
        "input_scale": (F32, (1,)),
    },
    ("compressed-tensors", "fp8_block"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, (N // 128, K // 128)),
    },
    # vLLM Fp8LinearMethod with weight_block_size, as DeepSeek-V3
    ("fine-grained-fp8", "fp8_block"): {
        "weight": (E4M3, (N, K)),
        "weight_scale_inv": (F32, (N // 128, K // 128)),
    },
    # transformers FP8Linear with weight_block_size None
    ("fine-grained-fp8", "fp8_tensor"): {
        "weight": (E4M3, (N, K)),
        "weight_scale_inv": (F32, ()),
        "activation_scale": (F32, ()),
    },
    # vLLM Fp8LinearMethod without weight_block_size
    ("auto-fp8", "fp8_tensor"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, ()),
        "input_scale": (F32, ()),
    },
    # vLLM QuarkOCP_MX
    ("quark", "mxfp4"): {"weight": (U8, (N, K // 2)), "weight_scale": (U8, (N, K // 32))},
    # vLLM QuarkW8A8Fp8, by qscheme
    ("quark", "fp8_tensor"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, ()),
        "input_scale": (F32, ()),
    },
    ("quark", "fp8_channel"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, (N,)),
        "input_scale": (F32, ()),
    },
    # transformers renames `scale` for deepseek_v4; FP8Experts with expert_dtype "fp4"
    ("deepseek-v4", "mxfp4"): {"weight": (I8, (N, K // 2)), "scale": (E8M0, (N, K // 32))},
    ("deepseek-v4", "fp8_block"): {"weight": (E4M3, (N, K)), "scale": (F32, (N // 128, K // 128))},
    ("deepseek-v4", "mxfp8_32x32"): {
        "weight": (E4M3, (N, K)),
        "scale": (E8M0, (N // 32, K // 32)),
    },
    # vLLM mistral_mapping
    ("mistral", "fp8_tensor"): {
        "weight": (E4M3, (N, K)),
        "qscale_weight": (F32, ()),
        "qscale_act": (F32, ()),
    },
    # vLLM FBGEMMFp8LinearMethod, transformers FbgemmFp8Linear
    ("fbgemm-fp8", "fp8_channel"): {"weight": (E4M3, (N, K)), "weight_scale": (F32, (N, 1))},
    # mlx.nn.QuantizedLinear
    ("mlx", "mxfp4"): {"weight": (torch.uint32, (N, K // 8)), "scales": (U8, (N, K // 32))},
    ("mlx", "mxfp8"): {"weight": (torch.uint32, (N, K // 4)), "scales": (U8, (N, K // 32))},
    # ComfyUI comfy.ops, comfy-kitchen's layouts; scales fill whole tiles of 128 x 4
    ("comfyui", "nvfp4"): {
        "weight": (U8, (N, K // 2)),
        "weight_scale": (E4M3, (N, K // 16)),
        "weight_scale_2": (F32, ()),
        "input_scale": (F32, ()),
    },
    ("comfyui", "mxfp8"): {"weight": (E4M3, (N, K)), "weight_scale": (U8, (N, K // 32))},
    ("comfyui", "fp8_tensor"): {
        "weight": (E4M3, (N, K)),
        "weight_scale": (F32, ()),
        "input_scale": (F32, ()),
    },
    ("comfyui", "fp8_e5m2"): {
        "weight": (torch.float8_e5m2, (N, K)),
        "weight_scale": (F32, ()),
        "input_scale": (F32, ()),
    },
    # transformers FP8Linear with weight_block_size [1, 32]
    ("fine-grained-fp8", "mxfp8"): {
        "weight": (E4M3, (N, K)),
        "weight_scale_inv": (U8, (N, K // 32)),
    },
}


def test_every_scheme_of_linears_has_a_row() -> None:
    ours = {(name, s.name) for name in layouts.names() for s in layouts.get(name).schemes}
    assert ours - {("gpt-oss-mxfp4", "mxfp4")} == set(SERVERS)


@pytest.mark.parametrize(("name", "scheme"), SERVERS, ids=map("-".join, SERVERS))
def test_names_shapes_and_dtypes(name, scheme) -> None:
    layout = layouts.get(name)
    own = layout.scheme(scheme)
    spec = PlaneSpec.parse(SPECS[scheme][0].format(cols=K))
    weight = layout.stored("model.up_proj.weight", spec, (N, K))
    made = {one.name: (one.dtype, one.shape) for one in weight.tensors}
    if own.input is not None:
        made[own.input.file_name("model.up_proj")] = (F32, own.input.shape)
    wanted = SERVERS[name, scheme]
    assert made == {f"model.up_proj.{key}": value for key, value in wanted.items()}


def test_scales_of_caches() -> None:
    """vLLM's `maybe_remap_kv_scale_name` and `get_cache_scale` make its attention's of them."""
    written = {
        name: [part.file_name("layers.0.self_attn") for part in layouts.get(name).kv["fp8"]]
        for name in ("modelopt", "compressed-tensors", "quark", "auto-fp8")
    }
    at = "layers.0.self_attn"
    assert written == {
        "modelopt": [f"{at}.k_proj.k_scale", f"{at}.v_proj.v_scale"],
        "compressed-tensors": [f"{at}.k_scale", f"{at}.v_scale"],
        "quark": [f"{at}.k_proj.output_scale", f"{at}.v_proj.output_scale"],
        "auto-fp8": [f"{at}.k_proj.output_scale", f"{at}.v_proj.output_scale"],
    }


def test_fields_that_servers_require() -> None:
    """vLLM raises without these in ModelOpt's file, and for other algorithms."""
    layout = layouts.get("modelopt")
    known = {"FP8", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION"}
    known |= {"FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"}
    for scheme in layout.schemes:
        for inputs in scheme.inputs:
            said = layout.hf_quant_json({"a": scheme}, inputs=inputs)
            assert said is not None
            own = said["quantization"]
            assert own["quant_algo"] in known
            assert {"kv_cache_quant_algo", "exclude_modules"} <= set(own)
            assert ("group_size" in own) == (scheme.name not in ("fp8_tensor", "fp8_channel"))

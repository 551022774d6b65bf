"""What scripts import below Transformer Engine's paths, and what the door itself imports."""

from __future__ import annotations

import ast
import importlib

import pytest
import torch

import hybridq
import hybridq.te as te
from hybridq.te.aliases import PATHS
from hybridq.te.refused import REFUSED
from places import ROOT

DOOR = ROOT / "src" / "hybridq" / "te"
IMPORTS = {
    "attention.dot_product_attention.utils": "get_attention_backend",
    "attention.inference": "InferenceParams",
    "distributed": "CudaRNGStatesTracker checkpoint prepare_te_modules_for_fsdp",
    "attention.rope": "RotaryPositionEmbedding apply_rotary_pos_emb",
    "fp8": "get_default_fp8_recipe FP8GlobalStateManager",
    "module.base": "TransformerEngineBaseModule",
    "optimizers": "FusedAdam multi_tensor_applier multi_tensor_l2norm multi_tensor_scale",
    "optimizers.multi_tensor_apply": "MultiTensorApply multi_tensor_applier",
    "permutation": "moe_permute_with_probs moe_permute_and_pad_with_probs moe_unpermute",
    "quantized_tensor": "QuantizedTensor prepare_for_saving restore_from_saved",
    "tensor.quantized_tensor": "QuantizedTensor prepare_for_saving restore_from_saved",
    "tensor": "cast_master_weights_to_fp8 post_all_gather_processing replace_raw_data",
    "tensor.utils": "quantize_master_weights cast_master_weights_to_nvfp4",
    "utils": "attention_mask_func init_method_normal is_bf16_compatible scaled_init_method_normal",
}


@pytest.mark.parametrize("path", IMPORTS)
def test_a_path_has_what_scripts_import_of_it(path):
    module = importlib.import_module(f"hybridq.te.pytorch.{path}")
    assert [name for name in IMPORTS[path].split() if not hasattr(module, name)] == []


def test_what_changes_no_result_says_so_once(caplog):
    """Transformer Engine's example of FSDP calls the first, BioNeMo's models wrap the second."""
    from hybridq.te.pytorch.attention.dot_product_attention import utils

    layer = te.Linear(8, 8)
    with caplog.at_level("WARNING", logger="hybridq"):
        te.distributed.prepare_te_modules_for_fsdp(layer)
        te.distributed.prepare_te_modules_for_fsdp(layer)
    assert [one.message[:44] for one in caplog.records] == [
        "prepare_te_modules_for_fsdp: has no effect; "
    ]
    assert torch.compiler.disable(utils.get_attention_backend)(None)[-1] == [False, False, True]


@pytest.mark.parametrize("kind", ["fp8", "mxfp8", "nvfp4", "fp8_block_scaling"])
def test_the_state_manager_says_why_beside_whether(kind):
    is_there, reason = getattr(te.FP8GlobalStateManager, f"is_{kind}_available")()
    assert (is_there, reason) == (True, "")


def test_modules_are_of_the_base_class():
    from hybridq.te.pytorch.module.base import TransformerEngineBaseModule as Base

    modules = te.Linear(8, 8), te.LayerNormMLP(8, 16), te.GroupedLinear(1, 8, 8)
    assert all(isinstance(one, Base) for one in modules)
    assert not isinstance(torch.nn.Linear(8, 8), Base)


def test_what_is_refused_says_why_where_it_is_imported_from_its_own_module():
    with pytest.raises(ImportError, match="onnx_export is not here: ONNX has no operators"):
        from hybridq.te.pytorch.export import onnx_export  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'unknown'"):
        from hybridq.te.pytorch.export import unknown  # noqa: F401
    with pytest.raises(ImportError, match="FusedScaleMaskSoftmax is not here: attention takes"):
        from hybridq.te.pytorch.softmax import FusedScaleMaskSoftmax  # noqa: F401
    with pytest.raises(ImportError, match="no_torch_dynamo is not here: modules are compiled"):
        from hybridq.te.pytorch.jit import no_torch_dynamo  # noqa: F401


@pytest.mark.parametrize("root", ["hybridq.te", "hybridq.te.pytorch"])
def test_a_path_is_an_attribute_of_what_it_lies_in(root):
    """As scripts write it: `te.module.base.TransformerEngineBaseModule`, `te.fp8.fp8_autocast`."""
    for place, paths in PATHS.items():
        for path in (place, *paths):
            if path.rpartition(".")[2] in REFUSED:
                continue
            module = importlib.import_module(root)
            for name in path.split("."):
                module = getattr(module, name)
            assert module is importlib.import_module(f"{root}.{path}"), path
    assert te.fp8.fp8_autocast is te.fp8_autocast
    assert te.attention.DotProductAttention is te.DotProductAttention


@pytest.mark.parametrize("name", ["initialize_ub", "UserBufferQuantizationMode"])
def test_user_buffers_say_why_they_are_refused_wherever_a_script_asks(name):
    """Megatron-Core imports `module` and calls `module.base.initialize_ub`."""
    text = rf"te\.{name} is not here: collectives are not hidden under GEMMs by user buffers"
    for place in (te.module, te.module.base):
        with pytest.raises(AttributeError, match=text):
            getattr(place, name)
        assert not hasattr(place, name)
    for path in ("module", "module.base", "pytorch.module.base"):
        with pytest.raises(ImportError, match=text):
            exec(f"from hybridq.te.{path} import {name}", {})
    with pytest.raises(ImportError, match="cannot import name 'unknown'"):
        exec("from hybridq.te.module.base import unknown", {})
    with pytest.raises(ImportError, match=r"te\.ops\.SiTUGLU is not here: hybridq.nn.Activation"):
        exec("from hybridq.te.ops import SiTUGLU", {})


@pytest.mark.parametrize("package", ["hybridq.te", "hybridq.te.pytorch"])
def test_what_is_refused_says_why_where_it_is_imported_beside_others(package):
    """Python keeps nothing of an AttributeError that `from package import name` meets."""
    with pytest.raises(ImportError, match=r"te\.onnx_export is not here: ONNX has no operators"):
        exec(f"from {package} import Linear, onnx_export", {})
    with pytest.raises(ImportError, match="cannot import name 'unknown'"):
        exec(f"from {package} import Linear, unknown", {})
    assert not hasattr(te, "onnx_export")


def test_a_recipe_says_the_dtypes_of_its_codes():
    """Largest values: those of torch's dtypes."""
    from hybridq.te.pytorch import fp8

    from hybridq.te.common import recipe

    hybrid, same = recipe.DelayedScaling(), recipe.MXFP8BlockScaling()
    for own, is_forward, kind in (
        (hybrid, True, torch.float8_e4m3fn),
        (hybrid, False, torch.float8_e5m2),
        (same, False, torch.float8_e4m3fn),
    ):
        assert fp8.get_fp8_torch_dtype(own, is_forward) == kind
        assert fp8.get_fp8_max(own, is_forward) == torch.finfo(kind).max
        name = {torch.float8_e4m3fn: "kFloat8E4M3", torch.float8_e5m2: "kFloat8E5M2"}[kind]
        assert fp8.get_fp8_te_dtype(own, is_forward) == te.DType[name]
    assert fp8.get_fp4_te_dtype(recipe.NVFP4BlockScaling()) == te.DType.kFloat4E2M1


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_a_cache_is_made_with_the_sizes_of_heads(layout):
    """Generation step by step sees what one forward of all tokens sees."""
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": layout}
    layer = te.TransformerLayer(32, 48, 4, num_gqa_groups=2, layer_number=1, **options).eval()
    sizes = {"num_heads_kv": 2, "head_dim_k": 8, "dtype": torch.float32, "qkv_format": layout}
    cache = te.InferenceParams(max_batch_size=2, max_sequence_length=8, **sizes)
    assert cache.allocate_memory(1) is None  # as BioNeMo's models ask for before they generate
    axis = 1 if layout == "bshd" else 0
    x = torch.randn(2, 7, 32).transpose(0, 1 - axis)
    made = []
    with torch.no_grad():
        for part in x.split((4, 1, 2), axis):
            cache.pre_step({0: part.shape[axis], 1: part.shape[axis]})
            made.append(layer(part, inference_params=cache))
        torch.testing.assert_close(torch.cat(made, axis), layer(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"te\.InferenceParams: is_paged must be False"):
        te.InferenceParams(2, 8, is_paged=True)


def test_weights_are_filled_with_the_deviation_asked_for():
    from hybridq.te.pytorch.utils import init_method_normal, scaled_init_method_normal

    torch.manual_seed(0)
    weights = init_method_normal(0.5), scaled_init_method_normal(0.5, 8)
    stds = [fill(torch.empty(256, 256)).std().item() for fill in weights]
    assert stds == pytest.approx([0.5, 0.125], rel=0.02)


def test_scores_are_hidden_where_the_mask_is_true():
    from hybridq.te.pytorch.utils import attention_mask_func

    scores, hidden = torch.randn(2, 3), torch.tensor([True, False, False])
    before = scores.clone()
    made = attention_mask_func(scores, hidden)
    assert made is scores and torch.equal(made[:, 0], torch.full((2,), -torch.inf))
    assert torch.equal(made[:, 1:], before[:, 1:])


def rotated(t, angles, position):
    """One row of features by the formula: halves (a, b) to (a cos - b sin, b cos + a sin)."""
    half = angles.shape[-1] // 2
    a, b = t[..., :half].double(), t[..., half : 2 * half].double()
    angle = angles[position, 0, 0, :half].double()
    both = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat([*both, t[..., 2 * half :].double()], -1)


def test_rotary_positions_by_the_formula():
    from hybridq.te.pytorch.attention.rope import apply_rotary_pos_emb

    torch.manual_seed(0)
    angles = te.RotaryPositionEmbedding(6)(9)
    t = torch.randn(5, 2, 3, 8)  # two of the features are left as they are
    first = torch.tensor([0, 4])
    for starts in (None, first):
        begin = [0, 0] if starts is None else starts.tolist()
        want = torch.stack(
            [
                torch.stack([rotated(t[i, b], angles, begin[b] + i) for b in range(2)])
                for i in range(5)
            ]
        )
        made = apply_rotary_pos_emb(t, angles, start_positions=starts)
        torch.testing.assert_close(made.double(), want, rtol=1e-6, atol=1e-6)
        batch_first = apply_rotary_pos_emb(t.transpose(0, 1), angles, "bshd", starts)
        assert torch.equal(batch_first.transpose(0, 1), made)
        packed = apply_rotary_pos_emb(
            t.transpose(0, 1).reshape(10, 3, 8), angles, "thd", starts,
            cu_seqlens=torch.tensor([0, 5, 10]),
        )  # fmt: skip
        assert torch.equal(packed.view(2, 5, 3, 8).transpose(0, 1), made)
    bad = [
        (NotImplementedError, "cp_size must be 1", {"cp_size": 2}),
        (ValueError, "'thd' needs cu_seqlens", {"tensor_format": "thd"}),
        (
            ValueError,
            "tensor_format must be sbhd, bshd or thd, got 'bhsd'",
            {"tensor_format": "bhsd"},
        ),
    ]
    for error, text, options in bad:
        with pytest.raises(error, match=text):
            apply_rotary_pos_emb(t, angles, **options)


def test_storages_are_made_of_their_buffers_alone():
    x = torch.randn(32, 64)
    for quantizer, storage in (
        (te.MXFP8Quantizer(te.DType.kFloat8E4M3), te.MXFP8TensorStorage),
        (te.NVFP4Quantizer(), te.NVFP4TensorStorage),
        (te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3), te.Float8TensorStorage),
    ):
        made = quantizer(x)
        again = storage(**made.get_metadata(), fake_dtype=torch.bfloat16)
        assert (again.shape, again.dtype) == (made.shape, torch.bfloat16)
        assert torch.equal(again.dequantize(dtype=torch.float32), made.dequantize())
    own = te.IdentityTensorStorage(hp_data=x, fake_dtype=torch.bfloat16)
    assert torch.equal(own.dequantize(), x.bfloat16())
    with pytest.raises(ValueError, match="without data it must be given its shape"):
        te.MXFP8TensorStorage(columnwise_scale_inv=x)


def test_values_of_a_columnwise_plane_are_read_as_they_lie():
    identity = te.IdentityQuantizer(dtype=torch.bfloat16), te.IdentityQuantizer()
    both = te.HybridQuantizer(rowwise_quantizer=identity[0], columnwise_quantizer=identity[1])
    x = torch.randn(4, 6)
    made = both(x)
    assert torch.equal(made.rowwise_sub_storage._hp_data, x.bfloat16())
    assert torch.equal(made.columnwise_sub_storage._hp_data, x)


def imported() -> list[tuple[str, str, str]]:
    """Every name that the door imports of hybridq: file, package, name."""
    found = []
    for file in DOOR.rglob("*.py"):
        below = len(file.relative_to(DOOR).parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > below:
                package = ".".join(["hybridq", *([node.module] if node.module else [])])
                found += [(file.name, package, alias.name) for alias in node.names]
    return found


def test_the_door_imports_public_names_only():
    private = [
        (file, package, name)
        for file, package, name in imported()
        if package != "hybridq._log"  # the logger that every package writes to
        and (package.count(".") > 1 or name not in importlib.import_module(package).__all__)
        and not (package == "hybridq" and importlib.import_module(f"hybridq.{name}").__all__)
    ]
    assert imported() and private == []
    assert hybridq.nn.BiasApart.__module__.startswith("hybridq.nn")


@pytest.mark.parametrize("kind", ["causal", "no_mask"])
def test_a_mask_that_the_type_says_nothing_of_is_set_aside(kind):
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, layer_type="decoder",
        self_attn_mask_type=kind,
    )  # fmt: skip
    x, other = torch.randn(6, 2, 32), torch.randn(5, 2, 32)
    hidden = torch.rand(1, 1, 6, 6) < 0.5
    given = {"encoder_output": other, "enc_dec_attn_mask": torch.ones(2, 1, 1, 5) > 0}
    plain = layer(x, encoder_output=other)
    assert torch.equal(layer(x, hidden, **given), plain)
    core = te.DotProductAttention(4, 8, attn_mask_type=kind)
    qkv = [torch.randn(6, 2, 4, 8) for _ in range(3)]
    assert torch.equal(core(*qkv, hidden), core(*qkv))
    # A type of the call's own is looked at.
    assert not torch.equal(core(*qkv, hidden, attn_mask_type="arbitrary"), core(*qkv))


def test_initial_values_are_there_where_they_are_kept():
    with te.fp8_model_init(preserve_high_precision_init_val=True):
        kept = te.Linear(8, 8).weight
    with te.fp8_model_init():
        plain = te.Linear(8, 8).weight
    assert torch.equal(kept._high_precision_init_val, kept.get_high_precision_init_val())
    assert not hasattr(plain, "_high_precision_init_val")
    assert not hasattr(plain, "clear_high_precision_init_val")
    kept.clear_high_precision_init_val()
    assert not hasattr(kept, "_high_precision_init_val")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_under_autocast_is_the_layer_of_its_dtype(dtype):
    torch.manual_seed(0)
    layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(6, 2, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y, short = layer(x), layer(x.to(dtype))
    assert y.dtype == dtype and torch.equal(y, short)
    y.sum().backward()
    assert {x.grad.dtype, *(p.grad.dtype for p in layer.parameters())} == {torch.float32}

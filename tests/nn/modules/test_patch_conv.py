"""Convolutions that are products: torch's bits without a recipe, a linear layer's under one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hybridq
from hybridq.nn import Linear, PatchConv1d, PatchConv2d, PatchConv3d
from linear_model import draw_like_a_module, equal, quantized_linear, run

#: A convolution of torch's, the shape of an input whose last patches are cut off, and its class.
CASES = {
    "1d": (lambda **o: nn.Conv1d(24, 40, 3, 3, **o), (2, 24, 20), PatchConv1d),
    "2d": (lambda **o: nn.Conv2d(3, 40, (4, 2), (4, 2), **o), (2, 3, 13, 9), PatchConv2d),
    "valid": (lambda **o: nn.Conv2d(3, 40, 4, 4, "valid", **o), (2, 3, 12, 8), PatchConv2d),
    "3d": (lambda **o: nn.Conv3d(3, 40, (2, 4, 4), (2, 4, 4), **o), (2, 3, 4, 9, 8), PatchConv3d),
    "one": (lambda **o: nn.Conv2d(24, 40, 1, bias=False, **o), (2, 24, 5, 7), PatchConv2d),
}


def make(case: str, dtype=torch.float32):
    """A convolution, its input, and the patches as rows, taken by torch's own unfold."""
    torch.manual_seed(4)
    build, shape, made = CASES[case]
    conv, x = build(dtype=dtype), torch.randn(shape, dtype=dtype)
    rows = x
    for axis, kernel in enumerate(conv.kernel_size):
        rows = rows.unfold(2 + axis, kernel, kernel)
    dims = len(conv.kernel_size)
    rows = rows.movedim(1, 1 + dims).flatten(1 + dims)  # [batch, *grid, channels * kernel]
    return conv, x, rows, made


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_recipe_the_bits_are_torchs(case, dtype) -> None:
    conv, x, _, made = make(case, dtype)
    dy = torch.randn_like(conv(x))
    want = run(copy.deepcopy(conv), x, dy, enabled=False)
    weight = conv.weight
    assert hybridq.convert(conv) is conv and type(conv) is made and conv.weight is weight
    assert equal(run(conv, x, dy, enabled=False), want)
    assert str(conv).startswith(f"hybridq.{made.__name__}(")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fwd_nvfp4_bwd", "fp8_delayed"])
def test_under_a_recipe_it_is_a_linear_of_the_patches(case, recipe) -> None:
    conv, x, rows, _ = make(case)
    twin = Linear(rows.shape[-1], 40, bias=conv.bias is not None)
    with torch.no_grad():
        twin.weight.copy_(conv.weight.flatten(1))
        if conv.bias is not None:
            twin.bias.copy_(conv.bias)
    plain = conv(x)
    hybridq.convert(conv)
    dy = torch.randn_like(plain)
    for _ in range(2):  # of delayed scaling, the first step's scales are 1
        torch.manual_seed(6)
        y, dx, *grads = run(conv, x, dy, recipe=recipe)
        torch.manual_seed(6)
        want = run(twin, rows, dy.movedim(1, -1), recipe=recipe)
        hybridq.update_scaling(conv), hybridq.update_scaling(twin)
    assert y.is_contiguous() and y.shape == plain.shape and not torch.equal(y, plain)
    assert equal([y.movedim(1, -1), grads[0].flatten(1), *grads[1:]], [want[0], *want[2:]])
    back, patches = torch.zeros_like(x), want[1]
    view = back
    for axis, kernel in enumerate(conv.kernel_size):
        view = view.unfold(2 + axis, kernel, kernel)
    dims = len(conv.kernel_size)
    view.movedim(1, 1 + dims).copy_(patches.view(*view.movedim(1, 1 + dims).shape))
    assert torch.equal(dx, back)


def test_it_is_the_product_of_the_planes_in_fp64() -> None:
    conv, x, rows, _ = make("2d")
    hybridq.convert(conv)
    dy = torch.randn_like(conv(x))
    torch.manual_seed(6)
    y, _, dw, _ = run(conv, x, dy, recipe="mxfp8")
    torch.manual_seed(6)
    flat = dy.movedim(1, -1).reshape(-1, 40)
    weight = conv.weight.detach().flatten(1)
    seed = draw_like_a_module()
    matrix = rows.reshape(-1, weight.shape[1])
    model = quantized_linear(matrix, weight, conv.bias.detach(), flat, "mxfp8", seed)
    found = {"y": y.movedim(1, -1).reshape(-1, 40), "dw": dw.flatten(1)}
    for name, value in found.items():
        assert ((value.double() - model[name].value).abs() <= model[name].bound).all(), name


def test_layouts_and_single_samples() -> None:
    conv, x, _, _ = make("2d")
    hybridq.convert(conv)
    with hybridq.autocast(recipe="mxfp8"):
        y = conv(x)
        last = conv(x.to(memory_format=torch.channels_last))
        assert torch.equal(conv(x[0]), y[0])
        with pytest.raises(RuntimeError, match="expected input"):
            conv(x[:, :2])
        with pytest.raises(RuntimeError, match="can't be greater than actual input"):
            conv(x[:, :, :2])
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), y)
    assert torch.equal(last, y) and last.is_contiguous(memory_format=torch.channels_last)


def test_only_products_are_converted() -> None:
    model = nn.ModuleList(
        [
            nn.Conv2d(16, 16, 3, 3),
            nn.Conv2d(16, 16, 3, 1),
            nn.Conv2d(16, 16, 3, 3, padding=1),
            nn.Conv2d(16, 16, 3, 3, dilation=2),
            nn.Conv2d(16, 16, 3, 3, groups=2),
            nn.Conv2d(16, 16, 3, 1, padding="same"),
            nn.ConvTranspose2d(16, 16, 3, 3),
            nn.Conv2d(16, 4, 1),
            nn.Linear(16, 16),
        ]
    )
    report = hybridq.conversion(model)
    hybridq.convert(model)
    assert [type(m).__module__.split(".")[0] == "hybridq" for m in model] == [
        *(True, False, False, False, False, False, False, False, True)
    ]
    assert report.converted == ("0", "8") and report.others == ()
    assert report.left_alone == (("7", "narrow, 16 to 4 features"),)
    assert hybridq.conversion(model).converted == ("0", "8")


def test_its_weight_stays_plain_where_matrices_are_quantized_or_sharded() -> None:
    with hybridq.quantized_model_init("mxfp8"):
        model = hybridq.convert(nn.ModuleList([nn.Conv1d(16, 16, 2, 2), nn.Linear(16, 16)]))
    assert [type(m.weight.data) is torch.Tensor for m in model] == [True, False]
    model = hybridq.convert(nn.ModuleList([nn.Conv1d(16, 16, 2, 2)]))
    hybridq.distributed.prepare_fsdp2(model)
    assert type(model[0].weight.data) is torch.Tensor


def test_constructed_ones_are_checked() -> None:
    assert PatchConv2d(3, 8, 4).stride == (4, 4)
    with pytest.raises(ValueError, match=r"PatchConv2d: stride must be kernel_size, got \(2, 2\)"):
        PatchConv2d(3, 8, 4, 2)
    with pytest.raises(ValueError, match="padding must be 0"):
        PatchConv2d(3, 8, 4, padding=1)
    with pytest.raises(ValueError, match="groups must be 1, got 2"):
        PatchConv1d(4, 8, 4, groups=2)
    assert PatchConv1d(4, 8, 4, name="stem").name == "stem"

"""Parts that had to be decoded: they are read as any tensor, and refuse to be written."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hybridq
from hybridq import QuantizedTensor
from hybridq.tensor import DecodedPart
from tensor_tools import same_planes


@pytest.fixture
def weight() -> QuantizedTensor:
    """A [128, 160] tensor whose 128x128 blocks every part here cuts."""
    return hybridq.quantize(torch.randn(128, 160), "fp8_128x128")


WRITES = {
    "column": lambda w: w[:, 3].zero_(),
    "step": lambda w: w[::2].zero_(),
    "value": lambda w: w[0, 0].fill_(9),
    "rows": lambda w: w[3:9].mul_(2.0),
    "diagonal": lambda w: w.diagonal().zero_(),
    "part of a flat view": lambda w: w.view(-1)[5:7].zero_(),
    "reshape": lambda w: w.reshape(64, 320).zero_(),
    "flatten": lambda w: w.flatten()[:7].zero_(),
    "expand": lambda w: w.expand(2, 128, 160).zero_(),
    "unfold": lambda w: w.unfold(0, 2, 2).zero_(),
    "transpose": lambda w: w[:, 3:5].t().zero_(),
    "view of a part": lambda w: w[:, 3].view(2, 64)[0].add_(1),
    "detached": lambda w: w[:, 3].detach().zero_(),
    "data": lambda w: w[:, 3].data.zero_(),
    "split": lambda w: w.split(50, dim=1)[1].zero_(),
    "unbind": lambda w: w.unbind(1)[0].zero_(),
    "augmented": lambda w: w[:, 3].__iadd__(1),
    "index of a part": lambda w: w[:, 3].__setitem__(0, 1.0),
    "mask of a part": lambda w: w[:, 3].__setitem__(torch.arange(128) > 3, 1.0),
    "out": lambda w: torch.add(torch.ones(128), 1, out=w[:, 3]),
    "foreach": lambda w: torch._foreach_mul_([w[:, 3], torch.ones(2)], 2.0),
    "of the transposed": lambda w: w.T[5].copy_(torch.ones(128)),
    "a quantized source": lambda w: w[:, 1:129].copy_(w[:, :128]),
    "set_": lambda w: w[:, 3].set_(torch.ones(3)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_decoded_part_is_refused_and_says_what_writes(weight, name) -> None:
    before = weight.clone()
    with pytest.raises(RuntimeError, match=r"would not reach the tensor.*t\[index\] = values"):
        WRITES[name](weight)
    same_planes(weight, before)


def test_the_forms_that_the_error_names_do_write(weight) -> None:
    want = weight.dequantize()
    want[:, 3] += 1.0
    weight[:, 3] = weight[:, 3] + 1.0
    same_planes(weight, weight.quantizer(want))
    assert not weight[:, 3].clone().zero_().any(), "a copy of one's own"


READS = {
    "arithmetic": lambda p: p + 1.0,
    "product": lambda p: p @ torch.ones(7, 2),
    "clone": torch.clone,
    "dequantize": lambda p: p.dequantize(),
    "to": lambda p: p.to(torch.float64),
    "cat": lambda p: torch.cat([p, p]),
    "index": lambda p: p[torch.tensor([0, 5])],
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "empty_like": lambda p: torch.zeros_like(p),
    "where": lambda p: torch.where(p > 0, p, 0.0),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_made_of_a_part_is_plain(weight, name) -> None:
    made = READS[name](weight[:, 2:9])
    assert type(made) is torch.Tensor
    assert torch.equal(made, READS[name](weight.dequantize()[:, 2:9]))


def test_a_part_is_read_as_any_tensor(weight) -> None:
    part, plain = weight[:, 2:9], weight.dequantize()[:, 2:9]
    assert isinstance(part, DecodedPart) and part.shape == plain.shape
    assert part.tolist() == plain.tolist() and (part.numpy() == plain.numpy()).all()
    assert part[3, 4].item() == plain[3, 4].item() and len(part) == 128
    assert repr(part) == f"DecodedPart({plain!r})"
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), plain)
    wide = part.dequantize(dtype=torch.float64)
    assert wide.dtype == torch.float64 and torch.equal(wide, plain.double())
    made, want = hybridq.quantize(part, "mxfp8"), hybridq.quantize(plain, "mxfp8")
    same_planes(made, want)
    assert torch.equal(hybridq.gemm(part, want), hybridq.gemm(plain, want))
    torch.testing.assert_close(nn.functional.linear(part, want), hybridq.gemm(plain, want))


def test_gradients_go_through_a_part() -> None:
    w = nn.Parameter(hybridq.quantize(torch.randn(128, 160), "fp8_128x128"))
    grad = torch.randn(5, 128)
    (w[:, 3:8].t() * grad).sum().backward()
    assert torch.equal(w.grad[:, 3:8], grad.t()) and not w.grad[:, 8:].any()
    with pytest.raises(RuntimeError, match="leaf"):
        w[:, 3].zero_()
    with torch.no_grad(), pytest.raises(RuntimeError, match="would not reach"):
        w[:, 3].zero_()


@pytest.mark.parametrize("name", ["column", "view of a part", "reshape"])
def test_compiled_code_refuses_too_and_reads(weight, name) -> None:
    torch._dynamo.reset()
    before = weight.clone()
    write = torch.compile(WRITES[name], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="would not reach the tensor"):
        write(weight)
    same_planes(weight, before)

    def read(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return w[:, 3:9] * 2.0, w[:, 3].view(2, 64)

    product, part = torch.compile(read, fullgraph=True, backend="aot_eager")(weight)
    assert torch.equal(product, read(weight)[0]) and isinstance(part, DecodedPart)
    assert torch.equal(part, read(weight)[1])


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128x128"])
def test_views_in_inference_mode(fmt) -> None:
    w = hybridq.quantize(torch.randn(128, 160), fmt)
    plain = w.dequantize()
    views = {
        "view": lambda t: t.view(-1),
        "detach": lambda t: t.detach(),
        "t": lambda t: t.t(),
        "transpose": lambda t: t.transpose(0, 1),
        "permute": lambda t: t.permute(1, 0),
        "unsqueeze": lambda t: t.unsqueeze(0),
        "chunk": lambda t: t.chunk(2)[1],
        "rows": lambda t: t[32:64],
        "cut rows": lambda t: t[3:5],
        "columns": lambda t: t[:, 32:],
        "column": lambda t: t[:, 3],
        "part of a part": lambda t: t[3:5][:1],
        "unbind": lambda t: t.unbind()[7],
        "reshape": lambda t: t.reshape(64, 320),
        "expand": lambda t: t.expand(2, 128, 160),
        "as_strided": lambda t: t.as_strided(t.size(), t.stride()),
    }
    for name, view in views.items():
        with torch.inference_mode():
            got = view(w)
            assert torch.equal(got + 0, view(plain) + 0), name
            made_inside = view(hybridq.quantize(plain, fmt))
            assert torch.equal(made_inside + 0, view(plain) + 0), name
        assert not got.is_inference(), name
        scale = torch.ones((), requires_grad=True)
        (got * scale).sum().backward()  # saved for a backward, as a view that was made outside
        assert scale.grad is not None
    with torch.inference_mode():
        w[32:64].zero_() if fmt == "mxfp8" else w.zero_()
    assert not w[32:64].any()


def test_composites_of_torch_that_fill_a_buffer_of_the_kind() -> None:
    x = torch.randn(1, 2, 8, 8)
    q = hybridq.quantize(x, "mxfp8")
    pad = lambda t: nn.functional.pad(t, (1, 1, 1, 1), mode="circular")  # noqa: E731
    assert torch.equal(pad(q), pad(q.dequantize()))
    layer = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", bias=False)
    assert torch.equal(layer(q), layer(q.dequantize()))
    y = torch.where(torch.randn(1, 2, 8, 8) > 0, 1.0, -1.0)
    loss = nn.functional.hinge_embedding_loss
    assert torch.equal(loss(q, y), loss(q.dequantize(), y))
    kernel, plain = hybridq.quantize(torch.randn(8, 8, 3), "mxfp8"), torch.empty(8, 8, 3)
    assert torch.equal(nn.init.dirac_(kernel).dequantize(), nn.init.dirac_(plain))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("squeeze_", ()),
        ("unsqueeze_", (0,)),
        ("transpose_", (0, 1)),
        ("t_", ()),
        ("swapaxes_", (0, 1)),
        ("as_strided_", ((2, 2), (1, 1))),
        ("resize_", (3,)),
        ("set_", (torch.ones(3),)),
    ],
)
def test_a_tensor_keeps_its_shape(weight, name, arguments) -> None:
    with pytest.raises(RuntimeError, match=r"_: a quantized tensor keeps its shape.*; use \w+"):
        getattr(weight, name)(*arguments)
    assert weight.shape == (128, 160)


def test_a_tensor_appears_as_what_it_can_be_decoded_to(weight) -> None:
    with pytest.raises(TypeError, match="make: dtype must be float32, bfloat16 or float16"):
        QuantizedTensor.make(weight.tensor_storage, weight.shape, torch.uint8)
    layer = nn.Linear(160, 128)
    layer.weight = nn.Parameter(weight)
    with pytest.raises(TypeError, match="data: a plain tensor must be float32"):
        layer.double()


def test_module_to_empty_stays_quantized(weight) -> None:
    layer = nn.Linear(160, 128)
    layer.weight = nn.Parameter(weight.clone())
    for device in ("cpu", "meta", "cpu"):
        layer.to_empty(device=device)
        assert type(layer.weight) is type(weight) and layer.weight.device.type == device
        assert layer.weight.quantizer == weight.quantizer

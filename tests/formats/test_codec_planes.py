"""Codecs that say nothing of their buffers, and lay rows out as they like."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq.distributed import prepare_fsdp2
from hybridq.distributed.collectives.wire import wire_quantizer, wire_text
from hybridq.formats import Codec, Format, PlaneSpec, register_codec
from hybridq.kernels.choice import EncodeRequest
from hybridq.shards import Cut, Shards, StorageShards, encode_cut

pytestmark = pytest.mark.usefixtures("registries")


class Squares(Codec):
    """8-bit integers with an FP32 scale per 4x4 block: several rows share one."""

    def encode(self, matrix):
        scale = self.blocks(matrix.float()).abs().amax((1, 3), keepdim=True).clamp_min(1e-30) / 127
        codes = (self.blocks(matrix.float()) / scale).round().to(torch.int8)
        rows, cols = matrix.shape
        high, wide = scale.shape[0] * 4, scale.shape[2] * 4
        return [codes.reshape(high, wide)[:rows, :cols].contiguous(), scale[:, 0, :, 0]]

    def decode(self, buffers, rows, cols):
        scale = buffers[1].repeat_interleave(4, 0).repeat_interleave(4, 1)
        return buffers[0].float() * scale[:rows, :cols]

    @staticmethod
    def blocks(x):
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 4, 0, -x.shape[0] % 4))
        return x.reshape(x.shape[0] // 4, 4, x.shape[1] // 4, 4)


class Transposed(Codec):
    """BF16 values whose buffer is the transpose: its first axis is not the matrix's rows."""

    def encode(self, matrix):
        return [matrix.t().to(torch.bfloat16).contiguous()]

    def decode(self, buffers, rows, cols):
        return buffers[0].t().float()


class WholeBlocks(Codec):
    """Integers of 4 bits, an FP32 scale per 1x32: rows of whole blocks alone, and no others."""

    def encode(self, matrix):
        blocks = matrix.float().reshape(matrix.shape[0], matrix.shape[1] // 32, 32)
        scale = blocks.abs().amax(2).clamp_min(1e-30) / 7
        codes = (blocks / scale[:, :, None]).round().to(torch.int8)
        return [codes.reshape(matrix.shape), scale]

    def decode(self, buffers, rows, cols):
        blocks = buffers[0].float().reshape(rows, cols // 32, 32)
        return (blocks * buffers[1][:, :, None]).reshape(rows, cols)


@pytest.fixture(params=[Squares, Transposed])
def own(request) -> Format:
    return register_codec(f"own_{request.param.__name__.lower()}", request.param())


def recipe_of(fmt: Format) -> hybridq.CustomRecipe:
    return hybridq.CustomRecipe(qfactory=lambda role: hybridq.quantizer(fmt))


@pytest.mark.parametrize("shape", [(0, 12), (12, 0), (0, 0)])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_empty_has_empty_planes(own: Format, shape, is_first: bool) -> None:
    if not is_first:
        hybridq.quantize(torch.randn(5, 8), own)
    t = hybridq.quantize(torch.empty(shape), own)
    assert t.dequantize().shape == shape
    # A size that came first does not decide how many buffers there are.
    x = torch.randn(5, 8)
    assert (hybridq.quantize(x, own).dequantize() - x).norm() < 0.01 * x.norm()


def test_a_layer_takes_a_batch_without_tokens(own: Format) -> None:
    layer = hybridq.Linear(12, 8)
    x = torch.empty(0, 12, requires_grad=True)
    with hybridq.autocast(recipe=recipe_of(own)):
        y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 8) and x.grad.shape == (0, 12)
    assert not layer.weight.grad.any() and not layer.bias.grad.any()


@pytest.mark.parametrize("columnwise", [False, True])
def test_rows_are_those_of_what_the_plane_decodes_to(own: Format, columnwise: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 9)  # as many columns, so that rows of the wrong axis could be taken
    t = hybridq.quantize(x, own, columnwise=own if columnwise else None)
    whole, index = t.dequantize(), torch.tensor([7, 2, 2])
    assert torch.equal(t[3:6].dequantize(), whole[3:6])
    assert torch.equal(t[:, 2:5].dequantize(), whole[:, 2:5])
    assert t[4:4].dequantize().shape == (0, 9)
    assert torch.equal(torch.index_select(t, 0, index), whole[index])
    assert torch.equal(t[index], whole[index])
    assert torch.equal(torch.nn.functional.embedding(index, t), whole[index])


def test_a_plane_is_prepared(own: Format) -> None:
    t = hybridq.quantize(torch.randn(9, 16), own)
    assert hybridq.prepare(t.rowwise) >= 0
    y = hybridq.gemm(hybridq.quantize(torch.randn(5, 16), "mxfp8"), t)
    assert y.shape == (5, 9)


def test_a_model_is_exported_and_read_back(own: Format, tmp_path) -> None:
    model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(20, 12)))
    hybridq.export(model, tmp_path / "made", recipe=recipe_of(own), layout="hybridq")
    read = hybridq.load_checkpoint(tmp_path / "made")["0.weight"]
    wanted = hybridq.quantize(model[0].weight.detach(), own).dequantize()
    assert torch.equal(read.dequantize(), wanted)


def test_show_counts_what_a_plane_decodes_to(own: Format, monkeypatch) -> None:
    monkeypatch.setattr("hybridq.report.measure._BAND", 16)  # a codec's plane is not cut
    x = torch.randn(9, 12)
    x[2:5] = 0.0
    t = hybridq.quantize(x, own, columnwise="mxfp8")
    view = hybridq.show(t, original=x)
    mine, other = view.planes
    assert (mine.codes.total, mine.codes.num_nan) == (108, 0)
    assert mine.codes.num_zero == int((t.dequantize() == 0).sum())
    error = (t.dequantize() - x).double().norm() / x.double().norm()
    assert mine.error.relative == pytest.approx(float(error), rel=1e-6)
    assert "values     108 fp32" in str(view) and "codes      108 e4m3" in str(view)
    assert other.codes.total == 108


def test_a_codec_may_take_whole_blocks_alone(tmp_path) -> None:
    own = register_codec("own_whole_blocks", WholeBlocks())
    torch.manual_seed(0)
    x, layer = torch.randn(32, 64), hybridq.Linear(64, 32, bias=False)
    t = hybridq.quantize(x, own, columnwise=own)
    codec = WholeBlocks()
    wanted = codec.decode(codec.encode(x), 32, 64)
    assert torch.equal(t.dequantize(), wanted)
    with hybridq.autocast(recipe=recipe_of(own)):
        y = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)
    weight = codec.decode(codec.encode(layer.weight.detach()), 32, 64)
    torch.testing.assert_close(y, wanted @ weight.t())
    torch.save(t, tmp_path / "t.pt")
    assert torch.equal(torch.load(tmp_path / "t.pt").dequantize(), wanted)
    assert hybridq.quantize(torch.empty(0, 64), own).dequantize().shape == (0, 64)
    with pytest.raises(RuntimeError, match="shape"):  # its own error
        hybridq.quantize(torch.randn(4, 30), own)


def test_what_several_ranks_have_is_no_codecs(own: Format) -> None:
    spec = PlaneSpec(own)
    plan = StorageShards(spec, spec, "original", Shards((6, 2), 12))
    assert "a codec is given whole matrices" in plan.problem
    assert plan.nbytes(0) > 0  # what its shards would have, for what FSDP2 says
    for made in (own, hybridq.quantizer(own)):
        with pytest.raises(hybridq.PlaneError, match="message is a part of a tensor"):
            wire_text("all_gather", wire_quantizer("all_gather", made).text, torch.float32)


def test_errors_advise_no_sizes_that_there_are_not(own: Format) -> None:
    """A codec cannot be cut: no number of rows would do, and none is named."""
    text = PlaneSpec(own).resolve(torch.float32).plain_text(torch.float32)
    cut = Cut("group", 0, (20, 12), 1, 4)
    with pytest.raises(hybridq.PlaneError, match="cannot be cut, since a codec is given"):
        encode_cut(cut.padded(torch.ones(4, 20), 1), text, None, EncodeRequest(), cut)
    with hybridq.quantized_model_init(recipe_of(own)):
        layer = prepare_fsdp2(hybridq.Linear(16, 8))
    with pytest.raises(NotImplementedError, match="whole matrices; take another format, or high"):
        layer.weight.detach().split(4)  # as fully_shard deals rows out

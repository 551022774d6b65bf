"""Every operator of torch on quantized arguments: the decoded tensors' result, or an error.

Products take the plane that they contract along; of a hybrid tensor they are decoded here as
everything else is, so that one rule holds for the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hybridq
from hybridq import QuantizedTensor
from hybridq.tensor import DecodedPart
from hybridq.tensor.table import TABLE

KINDS = {
    "hybrid": hybridq.quantizer("mxfp8", columnwise="nvfp4"),
    "one scale": hybridq.quantizer("fp8_e4m3"),
}


@pytest.fixture(params=sorted(KINDS))
def quantizer(request, monkeypatch) -> Iterator[Any]:
    if request.param == "hybrid":
        for product in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            monkeypatch.delitem(TABLE, product)
    return KINDS[request.param]


_SIGNS = torch.arange(8 * 64).reshape(8, 64) % 2 * 2.0 - 1.0
#: Composites that make buffers, take views or write in pieces, and the operators they are made of.
CALLS: dict[str, Callable[[Any], Any]] = {
    "pad circular": lambda t: F.pad(t.view(1, 8, 8, 8), (1, 1, 1, 1), mode="circular"),
    "pad reflect": lambda t: F.pad(t.view(1, 8, 8, 8), (1, 1, 1, 1), mode="reflect"),
    "pad constant": lambda t: F.pad(t, (1, 2), value=3.0),
    "hinge": lambda t: F.hinge_embedding_loss(t, _SIGNS),
    "triplet": lambda t: F.triplet_margin_loss(t, t + 1, t - 1),
    "cosine": lambda t: F.cosine_embedding_loss(t, t + 1, torch.ones(8)),
    "kl_div": lambda t: F.kl_div(t.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "layer_norm": lambda t: F.layer_norm(t, (64,)),
    "group_norm": lambda t: F.group_norm(t, 4),
    "batch_norm": lambda t: F.batch_norm(t, None, None, training=True),
    "normalize": F.normalize,
    "attention": lambda t: F.scaled_dot_product_attention(*[t.view(2, 4, 64)] * 3),
    "interpolate": lambda t: F.interpolate(t.view(1, 8, 64), scale_factor=2),
    "unfold": lambda t: F.unfold(t.view(1, 8, 8, 8), 3),
    "fold": lambda t: F.fold(t.reshape(1, 4, 128)[..., :4], (3, 3), 2),
    "bilinear": lambda t: F.bilinear(t, t, torch.ones(2, 64, 64)),
    "pixel_shuffle": lambda t: F.pixel_shuffle(t.view(8, 8, 8), 2),
    "max_pool": lambda t: F.max_pool1d(t.view(1, 8, 64), 2),
    "linear": lambda t: F.linear(t, t),
    "matmul": lambda t: t.view(2, 4, 64) @ t.t(),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "tensordot": lambda t: torch.tensordot(t, t, dims=([1], [1])),
    "diff": torch.diff,
    "cumsum": lambda t: t.cumsum(1),
    "gradient": lambda t: torch.gradient(t)[0],
    "block_diag": lambda t: torch.block_diag(t, t),
    "cdist": lambda t: torch.cdist(t, t),
    "cov": torch.cov,
    "combinations": lambda t: torch.combinations(t[0, :8]),
    "meshgrid": lambda t: torch.meshgrid(t[0], t[1], indexing="ij")[1],
    "diag_embed": torch.diag_embed,
    "tril": torch.tril,
    "roll": lambda t: t.roll(3, 1),
    "rot90": torch.rot90,
    "repeat_interleave": lambda t: t.repeat_interleave(2, 1),
    "index_add": lambda t: t.index_add(0, torch.tensor([1]), torch.ones(1, 64)),
    "select_scatter": lambda t: t.select_scatter(torch.ones(64), 0, 2),
    "slice_scatter": lambda t: t.slice_scatter(torch.ones(8, 2), 1, 3, 5),
    "masked_fill": lambda t: t.masked_fill(_SIGNS > 0, 2.0),
    "scatter_reduce": lambda t: t.scatter_reduce(1, torch.zeros(8, 64).long(), t, "sum"),
    "nan_to_num": torch.nan_to_num,
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "sort": lambda t: t.sort(1).values,
    "topk": lambda t: t.topk(3).values,
    "unique": torch.unique,
    "histc": torch.histc,
    "fft": lambda t: torch.fft.rfft(t).abs(),
    "svdvals": torch.linalg.svdvals,
    "norm": torch.linalg.matrix_norm,
    "stack": lambda t: torch.stack([t[:, 3], t[:, 4]]),
    "hstack": lambda t: torch.hstack([t[:, :5], t[:, 5:]]),
    "movedim": lambda t: t.view(2, 4, 64).movedim(0, -1),
    "zeros_like": torch.zeros_like,
    "full": lambda t: t.new_full((2, 2), 3.0),
    "complex": lambda t: torch.complex(t, t).abs(),
}


@pytest.mark.parametrize("name", CALLS)
def test_composites_give_what_the_values_give(name, quantizer) -> None:
    torch.manual_seed(1)
    t = quantizer(torch.randn(8, 64))
    got, expected = CALLS[name](t), CALLS[name](t.dequantize())
    got = got.dequantize() if isinstance(got, QuantizedTensor | DecodedPart) else got
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("with_others", [False, True], ids=["first", "all"])
def test_the_whole_table_of_torch(part, with_others, quantizer) -> None:
    """Out of place the decoded tensors' result, in place that result quantized; or an error."""
    from operator_table import OPERATORS, TWO_WRITES, in_place, out_of_place

    wrong, refused, ran = [], set(), 0
    for name in sorted(OPERATORS)[part::8]:
        op = OPERATORS[name]
        runs = [out_of_place]
        if op.inplace_variant is not None and not any(one in name for one in TWO_WRITES):
            runs.append(in_place)
        for run in runs:
            try:
                errors = run(op, quantizer, with_others, 3)
            except AssertionError as error:
                wrong.append(f"{name} {run.__name__}: {error}")
                continue
            ran += 1
            refused |= {f"{name} {run.__name__}" for error in errors}
    assert not wrong, "\n".join(wrong)
    assert ran > 60 and len(refused) < ran / 10, sorted(refused)

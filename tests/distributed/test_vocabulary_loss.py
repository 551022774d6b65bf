"""Cross-entropy over parts of the vocabulary: see `vocabulary_program.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridq.distributed import parallel_cross_entropy
from rank_runs import needs_gloo, run


@needs_gloo
def test_two_ranks_are_one_process(tmp_path) -> None:
    run(2, tmp_path / "store", "losses", "refused", program="vocabulary_program.py")


@pytest.mark.more
@needs_gloo
def test_four_ranks_are_one_process(tmp_path) -> None:
    run(4, tmp_path / "store", "losses", "refused", program="vocabulary_program.py")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_is_torchs_in_fp32(dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(6, 11)).to(dtype).requires_grad_()
    target = torch.tensor([0, 10, -100, 3, 4, 4])
    loss = parallel_cross_entropy(logits, target, 0.1)
    wide = logits.detach().double().requires_grad_()
    want = F.cross_entropy(wide, target, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
    dy = torch.randn(6)
    loss.backward(dy), want.backward(dy.double())
    unit = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=unit, atol=1e-7)
    assert logits.grad.dtype == dtype and logits.grad[2].eq(0).all()


def test_a_second_derivative_is_refused_beside_what_has_one() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = parallel_cross_entropy(logits, torch.tensor([0, 1, 4]), reduce_loss=True)
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.*a loss over ranks"):
        (loss + grad.square().sum()).backward()


def test_labels_that_are_no_class_and_bad_arguments() -> None:
    logits = torch.zeros(3, 4)
    assert parallel_cross_entropy(logits, torch.tensor([0, 4, -1])).isnan().tolist() == [0, 1, 1]
    for text, args in (
        ("logits must be", (logits, torch.zeros(2, dtype=torch.long))),
        ("label_smoothing must be in", (logits, torch.zeros(3, dtype=torch.long), 1.5)),
    ):
        with pytest.raises(ValueError, match=f"parallel_cross_entropy: {text}"):
            parallel_cross_entropy(*args)
    with pytest.raises(TypeError, match="target must be integers"):
        parallel_cross_entropy(logits, torch.zeros(3))
    with pytest.raises(TypeError, match=r"layout of logits must be strided, got .*csr"):
        parallel_cross_entropy(logits.to_sparse_csr(), torch.zeros(3, dtype=torch.long))

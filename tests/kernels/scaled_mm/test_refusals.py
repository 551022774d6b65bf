"""What cuBLASLt refuses goes another way, once for all, with one message."""

from __future__ import annotations

import logging

import pytest
import torch

from gemm_cases import decoded, make
from hybridq.formats import PlaneSpec
from hybridq.kernels import OpQuery, described
from hybridq.kernels import folded_backend as fold
from hybridq.kernels.choice import choose
from hybridq.kernels.choice.arguments import GemmArgs, Operand
from hybridq.kernels.choice.registry import forget_choices
from hybridq.kernels.scaled_mm import backend as native
from hybridq.kernels.scaled_mm import refusals
from scaled_mm_oracle import scaled_mm

HOPPER, BLACKWELL = described("sm_90"), described("sm_100")
CASES = [("native", "mxfp8", BLACKWELL), ("native", "fp8_1x128", HOPPER), ("fold", "mxfp8", HOPPER)]
NOT_SUPPORTED = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgo...`\nmore"


class Library:
    """torch's product, which says no while `says` is a text."""

    says, calls = "", 0

    def __call__(self, *args, **rest):
        self.calls += 1
        if self.says:
            raise RuntimeError(self.says)
        return scaled_mm(*args, **rest)


@pytest.fixture
def library(monkeypatch) -> Library:
    made = Library()
    monkeypatch.setattr(native, "scaled_mm", made)
    for name, empty in (("_worked", set()), ("_refused", {}), ("_lost", set())):
        monkeypatch.setattr(refusals, name, empty)
    forget_choices()
    yield made
    forget_choices()


def multiplied(name: str, rows: int, text: str, chip) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backend makes, and the product of the decoded planes in FP64."""
    planes = [make(torch.randn(n, 256), text) for n in (rows, 640)]
    a, b = (Operand(plane.tensors, plane.spec, *plane.matrix) for plane in planes)
    backend = {"native": native.NATIVE, "fold": fold.FOLD}[name]
    y = backend.ops["gemm"](a, b, GemmArgs(None, None, torch.float32, chip=chip))
    first, second = (torch.from_numpy(decoded(plane)) for plane in planes)
    return y, first @ second.t()


def chosen(text: str, chip, rows: int = 512) -> str:
    """The backend of a call on that chip."""
    spec = PlaneSpec.parse(text)
    query = OpQuery("gemm", "cuda", torch.float32, spec, spec, sizes=(rows, 640, 256), chip=chip)
    return choose(query).chosen.name


@pytest.mark.parametrize("name, text, chip", CASES)
def test_a_kind_that_never_ran_is_given_up_with_one_message(
    library: Library, caplog, name: str, text: str, chip
) -> None:
    assert chosen(text, chip) == name
    library.says = NOT_SUPPORTED
    with caplog.at_level(logging.WARNING, logger="hybridq"):
        for rows in (512, 512, 600):
            y, want = multiplied(name, rows, text, chip)
            assert torch.allclose(y.double(), want, rtol=1e-5, atol=1e-4)
    (message,) = [r.message for r in caplog.records if "refused" in r.message]
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in message and "all shapes" in message
    assert "more" not in message
    assert chosen(text, chip) != name and chosen(text, chip, rows=4096) != name
    assert chosen("fp8_e4m3", chip) == "native"  # another kind, which nobody has refused


@pytest.mark.parametrize("name, text, chip", CASES)
def test_of_a_kind_that_has_run_a_shape_is_given_up(
    library: Library, name: str, text: str, chip
) -> None:
    multiplied(name, 512, text, chip)
    library.says = NOT_SUPPORTED
    y, want = multiplied(name, 600, text, chip)
    assert torch.allclose(y.double(), want, rtol=1e-5, atol=1e-4)
    assert chosen(text, chip, rows=600) != name and chosen(text, chip, rows=512) == name


def test_other_errors_are_raised(library: Library) -> None:
    library.says = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        multiplied("native", 512, "mxfp8", BLACKWELL)
    assert chosen("mxfp8", BLACKWELL) == "native"

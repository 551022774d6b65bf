"""Quantized collectives against one process, bit for bit: see `collectives_program.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hybridq
from hybridq import PlaneSpec
from hybridq.distributed import all_gather, all_reduce, all_to_all, reduce_scatter
from hybridq.distributed.collectives import calls
from rank_runs import needs_gloo, run

pytestmark = needs_gloo


def test_two_ranks_are_one_process(tmp_path) -> None:
    names = ("values", "along", "uneven", "ratios", "gradients")
    run(2, tmp_path / "store", *names, program="collectives_program.py")


def test_rounding_and_planes_of_two_ranks(tmp_path) -> None:
    names = ("stochastic", "feedback", "planes")
    run(2, tmp_path / "store", *names, program="collectives_program.py")


def test_ranks_that_differ_all_raise(tmp_path) -> None:
    run(2, tmp_path / "store", "dtensors", "differ", "late", program="collectives_program.py")


@pytest.mark.more
def test_compiled_code_is_one_graph(tmp_path) -> None:
    run(2, tmp_path / "store", "compiled", "compiled_differ", program="collectives_program.py")


@pytest.mark.more
def test_compiled_code_with_symbolic_sizes(tmp_path) -> None:
    run(2, tmp_path / "store", "compiled_symbolic", program="collectives_program.py")


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path) -> None:
    names = ("values", "along", "uneven", "gradients", "stochastic", "feedback", "planes")
    run(4, tmp_path / "store", *names, program="collectives_program.py")
    run(4, tmp_path / "again", "differ", program="collectives_program.py")


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


X = torch.ones(4, 64)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: all_gather([1.0], "mxfp8"), "x must be a tensor, got list"),
        (lambda: all_gather(X.to_sparse_csr(), "mxfp8"), "layout of x must be strided, got .*csr"),
        (lambda: reduce_scatter(X.to_sparse(), "mxfp8"), "layout of x must be strided, got .*coo"),
        (lambda: all_to_all(X.to_sparse_csr(), "mxfp8"), "layout of x must be strided, got .*csr"),
        (lambda: all_reduce(torch.nested.nested_tensor([X]), "mxfp8"), "x must be no nested"),
        (lambda: all_gather(torch.ones(()), "mxfp8"), "at least one dimension"),
        (lambda: all_gather(X, "mxfp8", dim=2), "dim must name a dimension of 2, got 2"),
        (lambda: all_gather(X.double(), "mxfp8"), "dtype must be float32, bfloat16 or float16"),
        (lambda: all_gather(X, 8), "quantizer must be a Quantizer, a format or its name"),
        (lambda: all_gather(X, "mxpf8"), "mxfp8"),
        (lambda: all_gather(X, hybridq.quantizer(None, "mxfp8")), "rowwise planes travel"),
        (lambda: all_gather(X, "mxfp8", group=3), "group must be a ProcessGroup, its name"),
        (lambda: all_gather(X, "mxfp8", group="nowhere"), "there must be a group of that name"),
        (lambda: all_gather(X, "mxfp8", sizes=[5]), r"sizes\[0\] must be this rank's size"),
        (lambda: all_gather(X, "mxfp8", sizes=[4, 4]), "sizes must be 1 sizes"),
        (lambda: all_gather(X, None, as_planes=True), "as_planes takes a quantizer"),
        (lambda: reduce_scatter(X, "mxfp8", sizes=[5]), "sizes must add up to"),
        (lambda: reduce_scatter(X, "mxfp8", op="max"), "op must be one of"),
        (lambda: all_to_all(X, "mxfp8", input_split_sizes=[4]), "both split sizes or neither"),
        (lambda: all_reduce(X, "mxfp8", seed=torch.zeros(2)), "seed"),
        (lambda: all_reduce(X, "mxfp8", seed=3), "seed must be an int64 tensor"),
        (
            lambda: all_reduce(X, "mxfp8", error_feedback=hybridq.distributed.ErrorFeedback()),
            r"residual of one tensor, feedback\[name\]",
        ),
        (
            lambda: all_reduce(
                X.clone().requires_grad_(), "mxfp8", error_feedback=hybridq.distributed.Residual()
            ),
            "error feedback is for gradients",
        ),
    ],
)
def test_what_is_refused(one_rank, call, text) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        call()


def test_no_group() -> None:
    for group in (None, "0"):
        with pytest.raises(RuntimeError, match="must be initialized"):
            all_reduce(X, "mxfp8", group)


def test_a_residual_is_of_one_shape(one_rank) -> None:
    residual = hybridq.distributed.Residual()
    all_reduce(X, "mxfp8", error_feedback=residual)
    with pytest.raises(ValueError, match="a residual belongs to one tensor"):
        all_reduce(X[:2], "mxfp8", error_feedback=residual)


def test_a_mesh_of_two_dimensions_names_one(one_rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert all_reduce(X, None, (mesh, "a")).equal(X)
    with pytest.raises(ValueError, match=r"give one of them as group=\(mesh, dimension\)"):
        all_reduce(X, None, mesh)


def test_a_handle_gives_the_same_tensor(one_rank) -> None:
    handle = all_gather(X, "mxfp8", async_op=True)
    assert handle.wait() is handle.wait()


def test_sums_are_in_the_order_of_ranks() -> None:
    """Of three parts, which only in this order lose the middle one, as FP32."""
    parts = torch.tensor([2.0**25, 1.0, -(2.0**25)], dtype=torch.bfloat16)
    one, sizes = parts[:, None].expand(3, 8), (1, 1, 1)
    text = PlaneSpec.parse("bf16").resolve(torch.bfloat16).text
    payload = torch.cat([calls.encode_parts(row[None], text, 0, [1]) for row in one])
    call = calls.Call("scatter", text, text, "", 0, 3, 0, sizes, sizes, False, False)
    flight = calls.Flight(payload, None, None)
    assert not calls.finish(call, flight, (3, 8), torch.float32).any()
    mean = call._replace(is_mean=True)
    other = calls.Flight(payload.view(3, -1).flip(0).flatten(), None, None)
    assert not calls.finish(mean, other, (3, 8), torch.float32).any()
    last = calls.Flight(payload.view(3, -1)[[0, 2, 1]].flatten(), None, None)
    assert calls.finish(call, last, (3, 8), torch.float32).eq(1.0).all()

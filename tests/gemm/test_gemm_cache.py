"""Operands that planes keep: from the second GEMM on, until any write, bounded and mortal."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hybridq
from hybridq.kernels import operand_cache_nbytes
from hybridq.kernels.decoded import decoded_sides as exact
from hybridq.kernels.inputs import operand_cache as kept

#: More rows than read codes.
X = torch.randn(16, 64)


@pytest.fixture
def decodes(monkeypatch) -> list[str]:
    """The spec of every operand that is decoded."""
    seen: list[str] = []
    decode = exact.SideDecoder.decode

    def spy(decoder, operand):
        seen.append(operand.spec.text)
        return decode(decoder, operand)

    monkeypatch.setattr(exact.SideDecoder, "decode", spy)
    return seen


def weight(name: str = "mxfp8", columnwise: str | None = None) -> torch.Tensor:
    """A quantized `[32, 64]`."""
    return hybridq.quantize(torch.randn(32, 64), name, columnwise=columnwise or name)


def used(w: torch.Tensor) -> torch.Tensor:
    """Use w until it is kept; return the product."""
    hybridq.gemm(X, w)
    y = hybridq.gemm(X, w)
    assert w.rowwise.operand_cache.nbytes > 0
    return y


def test_kept_from_the_second_gemm_on(decodes: list[str]) -> None:
    w = weight()
    first = hybridq.gemm(X, w)
    assert w.rowwise.operand_cache.nbytes == 0  # an activation is used once, and costs nothing
    results = [hybridq.gemm(X, w) for _ in range(3)]
    assert len(decodes) == 2
    assert all(torch.equal(first, result) for result in results)
    assert w.rowwise.operand_cache.nbytes == 32 * 64 * 4  # FP32 on a CPU, since X is
    assert operand_cache_nbytes() >= w.rowwise.operand_cache.nbytes


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4;rows", "fp8_e4m3", "fp8_1x128"])
def test_the_same_bits_as_without(name: str) -> None:
    spec = hybridq.PlaneSpec.parse(name)
    w = hybridq.Quantizer(rowwise=spec, columnwise=None).quantize(torch.randn(32, 64).bfloat16())
    x = hybridq.quantize(torch.randn(8, 64).bfloat16(), "mxfp8")
    for dtype in (torch.bfloat16, torch.float32):
        with hybridq.gemm_cache(0):
            want = hybridq.gemm(x, w, out_dtype=dtype)
        for _ in range(3):
            assert torch.equal(hybridq.gemm(x, w, out_dtype=dtype), want)


def test_another_stream_makes_its_own(decodes: list[str], monkeypatch) -> None:
    """What one stream has queued, another may read too early; its memory, free too early."""
    w = weight()
    used(w)
    assert len(decodes) == 2
    monkeypatch.setattr(kept, "stream_of", lambda device: 7)
    first = w.rowwise.operand_cache.nbytes
    used(w)
    assert len(decodes) == 4 and w.rowwise.operand_cache.nbytes == 2 * first
    monkeypatch.undo()
    hybridq.gemm(X, w)
    w.zero_()  # one write ends both
    hybridq.gemm(X, w)
    assert w.rowwise.operand_cache.nbytes == 0


def test_operators_of_torch_share_it(decodes: list[str]) -> None:
    """`linear` transposes the weight each time: the mirrored planes keep in the same place."""
    w = torch.nn.Parameter(weight())
    for _ in range(4):
        x = torch.randn(16, 64, requires_grad=True)
        torch.nn.functional.linear(x, w).sum().backward()
    planes = w.tensor_storage
    assert planes.rowwise.operand_cache.nbytes and planes.columnwise.operand_cache.nbytes
    assert len(decodes) == 4  # twice for the forward, twice for the input's gradient


def _step(w: torch.Tensor) -> None:
    w.requires_grad_()
    w.grad = torch.randn(32, 64)
    torch.optim.SGD([w], lr=0.5).step()
    w.requires_grad_(False)


def _load(w: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(w, requires_grad=False)
    module.load_state_dict({"w": torch.randn(32, 64)})


def _assign(w: torch.Tensor) -> None:
    w.data = torch.randn(32, 64)


def _part(w: torch.Tensor) -> None:
    w[3:5].copy_(torch.randn(2, 64))


def _foreach(w: torch.Tensor) -> None:
    torch._foreach_mul_([w], 3.0)


WRITES = {
    "copy_": lambda w: w.copy_(torch.randn(32, 64)),
    "copy_ of planes": lambda w: w.copy_(weight()),
    "copy_ into the mirror": lambda w: w.t().copy_(torch.randn(64, 32)),
    "in place": lambda w: w.mul_(2.0),
    "optimizer": _step,
    "foreach": _foreach,
    "quantize_": lambda w: w.quantize_(torch.randn(32, 64)),
    "update_quantized": lambda w: w.quantizer.update_quantized(torch.randn(32, 64), w),
    "load_state_dict": _load,
    "data": _assign,
    "data.copy_": lambda w: w.data.copy_(torch.randn(32, 64)),
    "detach().copy_": lambda w: w.detach().copy_(torch.randn(32, 64)),
    "part": _part,
    "flat view": lambda w: w.view(-1).copy_(torch.randn(2048)),
    "codes": lambda w: w.rowwise.data.zero_(),
    "scales": lambda w: w.rowwise.scale.add_(1),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_every_write_ends_it(write: str, name: str) -> None:
    w = weight(name)
    if write == "scales" and name == "nvfp4":
        pytest.skip("adding one to an E4M3 byte may make a NaN")
    before = used(w)
    WRITES[write](w)
    after = hybridq.gemm(X, w)
    assert not torch.equal(before, after)
    with hybridq.gemm_cache(0):
        assert torch.equal(after, hybridq.gemm(X, w))


def test_writes_inside_operators_raise_the_buffers_versions() -> None:
    """Torch counts none there, and autograd would use a saved plane that has changed since."""
    w = weight()
    before = [buffer._version for buffer in w.tensor_storage.flatten()[0]]
    w.copy_(torch.randn(32, 64))
    w.mul_(2.0)
    after = [buffer._version for buffer in w.tensor_storage.flatten()[0]]
    assert all(new >= old + 2 for new, old in zip(after, before, strict=True))


def test_a_write_frees_what_was_kept_at_the_next_use() -> None:
    w = weight()
    used(w)
    w.copy_(torch.randn(32, 64))
    hybridq.gemm(X, w)
    assert w.rowwise.operand_cache.nbytes == 0


def test_memory_behind_torchs_back_needs_forget() -> None:
    w = weight()
    before = used(w)
    w.rowwise.data.numpy()[:] = 0  # no version is raised
    assert torch.equal(before, hybridq.gemm(X, w))
    hybridq.forget(w.rowwise)
    assert not hybridq.gemm(X, w).any()


def test_forget_without_planes_drops_everything() -> None:
    planes = [weight(), weight()]
    for w in planes:
        used(w)
    hybridq.forget()
    assert operand_cache_nbytes() == 0 and not any(w.rowwise.operand_cache.nbytes for w in planes)


def test_it_dies_with_the_plane() -> None:
    gc.collect()
    before = operand_cache_nbytes()
    w = weight()
    used(w)
    assert operand_cache_nbytes() > before
    view = w.t()
    del w
    gc.collect()
    assert operand_cache_nbytes() > before  # its mirror lives
    del view
    gc.collect()
    assert operand_cache_nbytes() == before


def test_the_limit_drops_what_was_used_longest_ago() -> None:
    gc.collect()
    one = 32 * 64 * 4
    with hybridq.gemm_cache(operand_cache_nbytes() + 2 * one):
        first, second, third = weight(), weight(), weight()
        used(first)
        used(second)
        hybridq.gemm(X, first)
        used(third)
        assert [w.rowwise.operand_cache.nbytes for w in (first, second, third)] == [one, 0, one]
    with hybridq.gemm_cache(one - 1):
        fourth = weight()
        hybridq.gemm(X, fourth)
        hybridq.gemm(X, fourth)
        assert fourth.rowwise.operand_cache.nbytes == 0  # larger than the limit


def test_zero_keeps_nothing_and_frees() -> None:
    w = weight()
    used(w)
    hybridq.forget(w.rowwise)
    assert w.rowwise.operand_cache.nbytes == 0
    with hybridq.gemm_cache(0):
        for _ in range(3):
            hybridq.gemm(X, w)
        assert hybridq.prepare(w.rowwise) == 0
    assert w.rowwise.operand_cache.nbytes == 0


@pytest.mark.usefixtures("without_tiles")
def test_prepare_keeps_at_once(decodes: list[str]) -> None:
    w, x = weight(), hybridq.quantize(X.bfloat16(), "mxfp8")
    assert hybridq.prepare(w.rowwise, x.rowwise) > 0
    count = len(decodes)
    hybridq.gemm(x, w, out_dtype=torch.bfloat16)
    assert decodes[count:] == [x.rowwise.spec.text]
    assert hybridq.prepare(x.rowwise, w.rowwise, side="a") > 0
    with pytest.raises(ValueError, match="side must be"):
        hybridq.prepare(w.rowwise, side="c")
    with pytest.raises(TypeError, match=r"prepare: plane must be a plane, .* got MXFP8Tensor"):
        hybridq.prepare(w)
    with pytest.raises(TypeError, match=r"prepare: other must be a plane, .* got MXFP8Tensor"):
        hybridq.prepare(w.rowwise, x)
    with pytest.raises(TypeError, match="forget: what it takes must be a plane"):
        hybridq.forget(w)
    with pytest.raises(ValueError, match="contraction length, got 64 and 32"):
        hybridq.prepare(w.rowwise, w.columnwise)
    assert hybridq.prepare(hybridq.Plane.of(X)) == 0  # nothing to prepare


def test_nothing_is_kept_where_codes_become_tiles(tiles: None, decodes: list[str]) -> None:
    """They are decoded about as fast as what is kept would be read."""
    w, x = weight(), hybridq.quantize(X.bfloat16(), "mxfp8")
    assert hybridq.prepare(w.rowwise, x.rowwise) == 0
    for _ in range(3):
        hybridq.gemm(x, w, out_dtype=torch.bfloat16)
    assert not decodes
    assert w.rowwise.operand_cache is None or w.rowwise.operand_cache.nbytes == 0


def test_copies_and_pickles_do_not_bring_it_along() -> None:
    w = weight()
    used(w)
    for copied in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), w.clone(), w.to(torch.float16)):
        plane = copied.rowwise
        assert plane.operand_cache is None or plane.operand_cache.nbytes == 0
    plane = pickle.loads(pickle.dumps(w.rowwise))
    assert plane.operand_cache is None or plane.operand_cache.nbytes == 0
    w[:4]  # a part is another plane
    assert w[:4].rowwise.operand_cache is None


def test_nothing_is_kept_while_torch_traces_or_differentiates() -> None:
    w = weight()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        return x @ w.t()

    for _ in range(3):
        run(X)
    assert w.rowwise.operand_cache is None or w.rowwise.operand_cache.nbytes == 0

    x = X.clone().requires_grad_()
    for _ in range(3):
        hybridq.gemm(x, w).sum().backward()
    assert x.grad is not None
    assert w.rowwise.operand_cache is None or w.rowwise.operand_cache.nbytes == 0

    with FakeTensorMode() as mode:
        fake = w.tensor_storage.map(mode.from_tensor).rowwise
        for _ in range(3):
            hybridq.gemm(torch.empty(4, 64), fake)
    assert fake.operand_cache is None or fake.operand_cache.nbytes == 0

    with torch.inference_mode():
        frozen = weight()
        for _ in range(3):
            hybridq.gemm(X, frozen)  # such tensors have no versions
    assert frozen.rowwise.operand_cache is None or frozen.rowwise.operand_cache.nbytes == 0


def test_threads_share_a_plane() -> None:
    w = weight()
    want = used(w)
    wrong = []

    def work() -> None:
        for _ in range(200):
            if not torch.equal(hybridq.gemm(X, w), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        hybridq.forget(w.rowwise)
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, "1"])
def test_limits_are_numbers_of_bytes(nbytes) -> None:
    with (
        pytest.raises(ValueError, match="gemm_cache: nbytes must be an integer"),
        hybridq.gemm_cache(nbytes),
    ):
        pass

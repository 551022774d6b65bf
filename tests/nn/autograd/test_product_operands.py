"""In which specs a linear module encodes for the products of a chip, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hybridq
from cuda_costs import _Held, backward, fake_gpu
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import OpQuery, choose
from hybridq.kernels.inputs.device import Chip
from hybridq.nn.autograd.prepared_linear import prepared_for
from hybridq.recipes import Plan, bind, get

FOLDED = "e4m3/1x128/fp32/folded/float8_block"


@pytest.fixture
def hopper(monkeypatch) -> Iterator[None]:
    with fake_gpu(monkeypatch):
        yield


def texts(plan: Plan) -> list[str]:
    """The specs of all planes: of input, weight and gradient, rows before columns."""
    slots = (plan.input, plan.weight, plan.grad_output)
    return [plane.spec for slot in slots for plane in (slot.row, slot.col)]


def planned(recipe: hybridq.Recipe, rows: int = 4096, has_weight: bool = False) -> list[str]:
    w = torch.empty(2048, 1024, dtype=torch.bfloat16, device="cuda")
    return texts(prepared_for(bind(recipe), rows, w, has_weight).plan)


def test_hopper_folds_all_planes_of_mxfp8(hopper) -> None:
    assert planned(get("mxfp8")) == [FOLDED] * 6
    e5m2 = planned(hybridq.recipes.MXFP8BlockScaling(fp8_format="hybrid"))
    assert e5m2[:4] == [FOLDED] * 4 and e5m2[4:] == [FOLDED.replace("e4m3", "e5m2")] * 2


def test_planes_that_others_want_stay(hopper) -> None:
    own = texts(bind(get("mxfp8")))
    assert planned(get("mxfp8"), has_weight=True) == [FOLDED] * 2 + own[2:4] + [FOLDED] * 2
    exact = hybridq.recipes.MXFP8BlockScaling(precision="exact")
    assert planned(exact) == texts(bind(exact))
    for recipe in map(get, ("nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd")):
        assert planned(recipe) == texts(bind(recipe))
    # A few rows are multiplied another way, which decodes; the gradient of the weight is not.
    assert planned(get("mxfp8"), rows=4)[0] == own[0]


def test_scales_of_1x128_lie_as_the_product_reads_them(hopper) -> None:
    own = texts(bind(get("fp8_block")))
    down = [f"{own[0]};scales=down"] * 2
    assert planned(get("fp8_block")) == down + own[2:4] + down


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_other_chips_take_planes_as_they_are(monkeypatch, capability: tuple[int, int]) -> None:
    with fake_gpu(monkeypatch, capability):
        assert planned(get("mxfp8")) == texts(bind(get("mxfp8")))


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_blackwell_takes_scales_in_tiles(monkeypatch, capability: tuple[int, int]) -> None:
    with fake_gpu(monkeypatch, capability):
        for recipe in map(get, ("mxfp8", "nvfp4")):
            own = texts(bind(recipe))
            tiles = [f"{spec};scales=tiles" for spec in own]
            assert planned(recipe) == tiles
            # Edges of tiles take padding, which the swizzle writes.
            assert planned(recipe, rows=4100) == own


def saved(recipe: str) -> int:
    """Bytes that a Linear saves for its backward."""
    layer = hybridq.Linear(1024, 2048, bias=False, device="meta", dtype=torch.bfloat16)
    w = torch.empty(layer.weight.shape, dtype=torch.bfloat16, device="cuda")
    layer.weight = torch.nn.Parameter(w)
    x = torch.empty(4096, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with hybridq.autocast(recipe=recipe):
        layer(x)
    held = _Held.made[-1].saved
    made = sum(one.numel() * one.element_size() for one in held)
    memory = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in held}
    assert sum(memory.values()) <= made + 256 * len(held)  # nothing else lies beside
    backward(torch.empty(4096, 2048, dtype=torch.bfloat16, device="cuda"))
    return made


def test_no_more_is_saved_than_planes(hopper) -> None:
    spec = PlaneSpec.parse("mxfp8")
    assert saved("mxfp8") == spec.nbytes(1024, 4096) + spec.nbytes(1024, 2048)


def test_the_forced_backend_takes_what_it_asked_for() -> None:
    specs = [PlaneSpec.parse(FOLDED)] * 2
    query = OpQuery(
        "gemm", "cuda", torch.bfloat16, *specs, "auto", (256, 256, 256), Chip.of("cuda", (9, 0))
    )
    with hybridq.backend("fold"):
        chosen = choose(query).chosen
    assert chosen is not None and chosen.name == "fold"

"""What is imported as soon as another library has been, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("peft")

MODEL = """
import hybridq, torch
with hybridq.quantized_model_init("mxfp8", frozen=True):
    base = torch.nn.Sequential(hybridq.Linear(64, 64), torch.nn.Tanh(), hybridq.Linear(64, 64))
before = base[0].weight.rowwise.data.clone()
"""
ADAPTERS = """
given = peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False)
model = peft.get_peft_model(base, given)
x = torch.randn(8, 64)
y = model(x)
layer = model.base_model.model[0]
print(type(layer).__module__)
model.merge_adapter()
assert not torch.equal(layer.base_layer.weight.rowwise.data, before)
model.unmerge_adapter()
assert torch.equal(layer.base_layer.weight.rowwise.data, before)
assert torch.equal(model(x), y)
"""


def said(code: str) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("order", ["after", "before"])
def test_adapters_of_modules_that_nobody_converted_can_be_taken_back(order) -> None:
    """PEFT's own layers would unmerge other bits than those that were there."""
    parts = [MODEL, "import peft", ADAPTERS]
    if order == "before":
        parts = ["import peft", MODEL, ADAPTERS]
    assert said("\n".join(parts)) == "hybridq.integrations.peft"


def test_the_library_is_as_without_it_and_asking_for_it_imports_nothing() -> None:
    code = """
import importlib.util, inspect, sys
import hybridq.nn
assert importlib.util.find_spec("peft").origin
assert "peft" not in sys.modules and "hybridq.integrations.peft" not in sys.modules
import peft
assert peft.__loader__ is peft.__spec__.loader and "LoraConfig" in inspect.getsource(peft)
assert not [one for one in sys.meta_path if type(one).__module__.startswith("hybridq")]
print("hybridq.integrations.peft" in sys.modules)
"""
    assert said(code) == "True"


def test_a_version_that_is_not_known_to_work_is_named_and_imported() -> None:
    code = """
import warnings
import hybridq.nn
from hybridq import integrations
integrations.version = lambda library: "0.1.0"
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    import peft
assert peft.LoraConfig
print([str(one.message) for one in found if "modules of peft" in str(one.message)])
"""
    assert "needs peft" in said(code) and "got version 0.1.0" in said(code)

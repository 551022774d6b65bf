"""The index of messages, against errors that are raised here, and against the sources."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys

import pytest
import torch

import hybridq
from places import ROOT

SCRIPT = ROOT / "docs" / "error_index.py"


@pytest.fixture(scope="module")
def index():
    spec = importlib.util.spec_from_file_location("error_index", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def by_linear():
    hybridq.Linear(32, 16)(torch.zeros(4, 32, dtype=torch.int64))


def by_quantize():
    hybridq.quantize(torch.zeros(4, 32), "mxfp9")


def by_gemm():
    hybridq.gemm(torch.zeros(4, 32), torch.zeros(4, 16))


def by_recipe():
    hybridq.recipes.get("nvfp")


def by_spec():
    hybridq.formats.PlaneSpec.parse("mxfp8;sideways")


def by_imported_constant():
    with hybridq.autocast(recipe="mxfp8"):
        hybridq.Linear(32, 16)(torch.nested.nested_tensor([torch.ones(2, 32)]))


def by_imported_function():
    role = hybridq.QuantizerRole("linear", "input", "up")
    hybridq.recipes.get("fp8_delayed").ask(role)(torch.ones(2, 32))


RAISED = [by_linear, by_quantize, by_gemm, by_recipe, by_spec]
IMPORTED = [by_imported_constant, by_imported_function]


@pytest.mark.parametrize("raises", RAISED + IMPORTED)
def test_an_error_is_found_by_its_text(index, raises) -> None:
    with pytest.raises(Exception) as raised:
        raises()
    found = index.find(str(raised.value))
    assert found
    assert type(raised.value).__name__ in {one.kind for one in found}
    if raises in IMPORTED:
        assert found[0].words > 40 and found[0].kind == type(raised.value).__name__


def test_parts_of_messages_are_listed(index) -> None:
    """Reasons stand where a message has `…`, and are looked up by themselves."""
    plane = hybridq.quantize(torch.ones(32, 40), "mxfp8").rowwise
    with pytest.raises(hybridq.SpecError) as raised:
        hybridq.layouts.get("modelopt").stored("up.weight", plane.spec, (32, 40))
    said = "readers of mxfp8 need columns in multiples of 32"
    assert said in str(raised.value)
    [one] = index.find(said)
    assert (one.kind, one.place) == ("reason", "hybridq/layouts/scheme.py, reason_against")


def test_what_is_filled_in_is_left_out(index) -> None:
    one = index.Message("ValueError", "f: n must be one of …, got …", "a.py, f")
    assert one.is_of("f: n must be one of 1, 2, got 3") and not one.is_of("f: n must be 1, got 3")
    assert one.words == len("f: n must be one of , got ")


def test_every_raised_text_is_in_the_index(index) -> None:
    """Counted another way: texts behind `raise Kind(`, by walking the sources here."""
    known = {(one.place.partition(",")[0], one.kind) for one in index.messages()}
    raised = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and call.args and isinstance(call.func, ast.Name):
                text = call.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                has_words = any(
                    isinstance(one, ast.Constant) and re.search("[A-Za-z]{3}", str(one.value))
                    for one in parts
                )
                if has_words and call.func.id.endswith("Error"):
                    raised.add((path.relative_to(ROOT / "src").as_posix(), call.func.id))
    missing = {(file, kind) for file, kind in raised - known if not kind.startswith("_")}
    assert len(raised) > 300 and not missing


def test_the_page_has_every_message_once(index) -> None:
    page = index.page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(index.messages()) > 1000
    assert all(line.count("|") - line.count("\\|") == 4 for line in rows)


def test_the_command_says_where_a_message_comes_from(index, capsys) -> None:
    text = "linear: input dtype must be float32, bfloat16 or float16, got torch.int64"
    assert index.main([text]) == 0
    said = capsys.readouterr().out
    assert "TypeError: input dtype must be" in said
    assert "hybridq/nn/modules/quantized_module.py" in said
    assert index.main(["qqqqq"]) == 1
    said = capsys.readouterr()
    assert "no message" in said.out + said.err

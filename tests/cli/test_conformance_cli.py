"""`python -m hybridq doctor` and `conformance`: output and exit status."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from hybridq.conformance import VECTORS
from hybridq_cli.app import app
from places import PEERS

RUNNER = CliRunner()


def run(*args: object):
    return RUNNER.invoke(app, [str(arg) for arg in args])


def test_doctor_prints_tables():
    done = run("doctor")
    assert done.exit_code == 0, done.output
    for word in ("Versions", "Compiled core", "Machine", "encode on cpu", "nvfp4_16x16", "gemm"):
        assert word in done.output


def test_doctor_prints_json_and_nothing_else():
    done = run("doctor", "--json", "--device", "cuda", "--dtype", "float32")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (found["device"], found["dtype"]) == ("cuda", "float32")
    assert {"versions", "core", "machine", "routes"} <= set(found)


@pytest.mark.parametrize("args", [("--device", "abacus"), ("--dtype", "int8")])
def test_doctor_refuses_what_it_does_not_know(args):
    done = run("doctor", *args)
    assert done.exit_code == 2
    assert args[1] in done.output


def test_conformance_passes():
    done = run("conformance", "--only", "mxfp8/odd")
    assert done.exit_code == 0, done.output
    assert "hybridq: 2 pass" in done.output


def test_conformance_takes_adapters_and_folders_more_than_once():
    done = run(
        *("conformance", "--adapter", "hybridq-reference", "--adapter", "hybridq-cpu"),
        *("--vectors", VECTORS, "--vectors", PEERS, "--only", "mxfp8te_e4m3_rceil_odd"),
    )
    assert done.exit_code == 2 and "no case" in done.output  # each folder must have one
    done = run(
        *("conformance", "--adapter", "hybridq-reference", "--adapter", "hybridq-cpu"),
        *("--vectors", VECTORS, "--vectors", PEERS, "--only", "mxfp8"),
    )
    assert done.exit_code == 0, done.output
    assert "hybridq-reference:" in done.output and "hybridq-cpu:" in done.output
    assert "mxfp8te" in done.output


def test_a_difference_is_an_exit_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_adapter.py").write_text(
        "from hybridq.conformance import load_adapter\n"
        "class Wrong:\n"
        "    name = 'wrong'\n"
        "    inner = load_adapter('hybridq-reference')\n"
        "    def supports(self, case): return None if case.kind == 'encode' else 'never'\n"
        "    def encode(self, x, case):\n"
        "        made = dict(self.inner.encode(x, case))\n"
        "        made['data'] = made['data'] ^ 1\n"
        "        return made\n"
        "    def decode(self, buffers, case): return None\n"
    )
    args = ("conformance", "--adapter", "wrong_adapter:Wrong", "--only", "mxfp8/")
    done = run(*args)
    assert done.exit_code == 1
    assert "first at [0, 0]" in done.output and "more cases" in done.output
    assert len(run(*args, "--verbose").output) > len(done.output)
    (report,) = json.loads(run(*args, "--json").stdout)
    assert report["counts"]["differs"] > 10 and not report["is_conformant"]
    first = next(result for result in report["results"] if result["status"] == "differs")
    assert first["differences"][0]["array"] == "data"


def test_ml_dtypes_is_compared():
    pytest.importorskip("ml_dtypes")
    done = run("conformance", "--adapter", "ml_dtypes", "--only", "casts/")
    assert done.exit_code == 1
    assert "casts/e4m3/all_bfloat16" in done.output


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--adapter", "nobody"), "module:attr"),
        (("--only", "nothing has this"), "no case"),
        (("--vectors", "/no/such/folder"), "got none"),
        (("--write", "x", "--only", "mxfp8"), "stands alone"),
    ],
)
def test_wrong_arguments_are_refused(args, text):
    done = run("conformance", *args)
    assert done.exit_code == 2
    assert text in " ".join(done.output.replace("│", " ").split())


def test_write_makes_the_files(tmp_path, monkeypatch):
    from hybridq.conformance import generate

    kept = [one for one in generate.build_vectors() if one[0] == "casts"]
    monkeypatch.setattr(generate, "build_vectors", lambda: iter(kept))
    done = run("conformance", "--write", tmp_path / "new")
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "new").glob("*.npz")
    with np.load(path) as new, np.load(VECTORS / "casts.npz") as old:
        assert new.files == old.files
    done = run("conformance", "--vectors", tmp_path / "new")
    assert done.exit_code == 0 and "20 pass" in done.output
    (tmp_path / "file").write_text("")
    assert run("conformance", "--write", tmp_path / "file").exit_code == 2

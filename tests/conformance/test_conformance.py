"""The conformance suite: who passes, what it notices, and the files by themselves."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import hybridq
from declared import BACKENDS
from hybridq import conformance
from hybridq.conformance import Case, VectorError, describe, run_case, to_spec
from hybridq.errors import SpecError
from hybridq.formats import PlaneSpec
from oracle_adapter import OracleAdapter
from places import PEERS

ALL = conformance.load_vectors()
CASES = {case.id: case for cases in ALL.values() for case in cases}


def report_of(name: str, vectors=ALL) -> conformance.Report:
    return conformance.check(conformance.load_adapter(name), vectors)


# --- who passes


def test_every_backend_passes_every_vector(backend):
    report = report_of(f"hybridq-{backend}")
    assert report.is_conformant, str(report)
    assert report.counts["pass"] == len(CASES), str(report)


def test_every_backend_is_an_adapter():
    names = set(conformance.adapter_names())
    assert {f"hybridq-{name}" for name in BACKENDS} <= names
    assert {"hybridq", "ml_dtypes", "torchao"} <= names


def test_the_chosen_backend_passes_the_goldens_of_peers():
    report = report_of("hybridq", conformance.load_vectors(PEERS))
    assert report.is_conformant, str(report)
    unsupported = {r.id for _, r in report.results if r.status == "not supported"}
    assert unsupported == {"delayed_update"}  # not of a plane: tests/quantizers/test_delayed.py


def test_an_implementation_that_shares_no_code_agrees_with_every_vector():
    """The vectors are the reference's; the NumPy model of the tests is written by itself."""
    report = conformance.check(OracleAdapter(), ALL)
    assert report.is_conformant, str(report)
    assert report.counts["not supported"] == len(ALL["gemm"])


def test_every_format_has_vectors_and_every_option_that_it_takes():
    quantized = [e.name for e in hybridq.formats.entries() if not e.format.is_identity]
    for name in quantized:
        assert name in ALL
        assert any(case.id.startswith(f"gemm/{name}_") for case in ALL["gemm"])
        assert any(case.id.startswith(f"hybrids/{name}_") for case in ALL["hybrids"])
    options = [
        {key: case.spec[key] for key in ("stochastic", "signs", "four_over_six", "row_scaled")}
        for case in ALL["nvfp4"]
    ]
    for key in options[0]:
        assert len({str(option[key]) for option in options}) > 1, key
    assert {case.direction for case in ALL["nvfp4_16x16"]} == {"rowwise", "columnwise"}
    assert {case.spec["rule"] for case in ALL["mxfp8"]} == {"rceil", "floor", "ceil", "even"}
    corners = ("nan", "inf", "zeros", "signed_zeros", "subnormal", "no_rows", "no_columns", "odd")
    for corner in corners:
        assert f"mxfp8/{corner}/encode" in CASES


# --- what it notices


class Bent:
    """hybridq with an answer bent by a function."""

    name = "bent"

    def __init__(self, bend) -> None:
        self.inner = conformance.load_adapter("hybridq-reference")
        self.bend = bend

    def supports(self, case):
        return self.inner.supports(case)

    def encode(self, x, case):
        buffers = {name: buffer.copy() for name, buffer in self.inner.encode(x, case).items()}
        return self.bend(buffers) or buffers

    def decode(self, buffers, case):
        values = self.inner.decode(buffers, case).copy()
        return self.bend({"values": values}) or values

    def gemm(self, a, b, case):
        product = self.inner.gemm(a, b, case).copy()
        return self.bend({"product": product}) or product


def _flip(name, place, bits):
    def bend(buffers):
        buffers[name].view(np.uint8).reshape(-1)[place] ^= bits

    return bend


def test_one_wrong_code_is_found_and_placed():
    result = run_case(Bent(_flip("data", 70, 1)), CASES["mxfp8/odd/encode"])
    (difference,) = result.differences
    assert result.status == "differs"
    assert (difference.array, difference.count, difference.total) == ("data", 1, 5 * 45)
    assert difference.first == (1, 25)
    assert int(difference.got, 16) == int(difference.want, 16) ^ 1
    assert "1 of 225 differ, first at [1, 25]" in str(difference)


def test_packed_codes_are_counted_one_by_one():
    result = run_case(Bent(_flip("data", 3, 0x10)), CASES["nvfp4/odd/encode"])
    (difference,) = result.differences
    assert (difference.count, difference.total, difference.first) == (1, 5 * 30, (0, 7))


@pytest.mark.parametrize("name", ["scale", "amax"])
def test_one_wrong_scale_is_found(name):
    result = run_case(Bent(_flip(name, 0, 1)), CASES["nvfp4/odd/encode"])
    assert [d.array for d in result.differences] == [name]


def test_the_sign_of_a_zero_counts_in_values_and_a_nan_payload_does_not():
    zeros = CASES["mxfp8/no_rows/decode"]
    case = replace(zeros, want={"values": np.zeros((1, 1), np.float32)})
    for values, status in ((-0.0, "differs"), (0.0, "pass")):
        adapter = Bent(lambda b, v=values: np.full((1, 1), v, np.float32))
        adapter.decode = lambda buffers, case, v=values: np.full((1, 1), v, np.float32)
        assert run_case(adapter, case).status == status
    quiet = np.array([[0x7FC00000]], dtype=np.uint32).view(np.float32)
    other = np.array([[0xFFC00001]], dtype=np.uint32).view(np.float32)
    adapter.decode = lambda buffers, case: other
    assert run_case(adapter, replace(zeros, want={"values": quiet})).status == "pass"


def test_a_value_may_be_off_by_its_ulps_only():
    case = CASES["mxfp8/odd/decode"]
    values = case.want["values"]
    adapter = Bent(lambda buffers: None)
    for steps, status in ((2, "pass"), (3, "differs")):
        adapter.decode = lambda b, c, n=steps: (values.view(np.int32) + n).view(np.float32)
        assert run_case(adapter, replace(case, ulp=2)).status == status


def test_a_product_outside_its_bound_is_found():
    case = CASES["gemm/mxfp8_mxfp8"]
    bound = case.want["bound"]
    adapter = Bent(lambda buffers: None)
    for factor, status in ((0.9, "pass"), (1.5, "differs")):
        adapter.gemm = lambda a, b, c, f=factor: case.want["product"] + f * bound
        assert run_case(adapter, case).status == status


def test_shapes_dtypes_missing_buffers_and_exceptions_are_outcomes():
    case = CASES["mxfp8/odd/encode"]
    right = dict(case.want)
    adapter = Bent(lambda buffers: None)
    for answer, note in (
        ({**right, "scale": right["scale"][:, :1]}, "scale: shape (5, 1), expected (5, 2)"),
        ({**right, "data": right["data"].astype(np.int32)}, "data: dtype int32, expected uint8"),
        ({"data": right["data"]}, "scale: missing"),
    ):
        adapter.encode = lambda x, case, a=answer: a
        assert [str(d) for d in run_case(adapter, case).differences] == [note]

    def fail(x, case):
        raise RuntimeError("no such kernel")

    adapter.encode = fail
    result = run_case(adapter, case)
    assert (result.status, result.reason) == ("failed", "RuntimeError: no such kernel")
    report = conformance.check(adapter, {"one": [case]})
    assert not report.is_conformant
    assert "no such kernel" in str(report)


def test_a_run_that_supports_nothing_is_not_conformant():
    adapter = Bent(lambda buffers: None)
    adapter.supports = lambda case: "never"
    assert not conformance.check(adapter, {"one": [CASES["mxfp8/odd/encode"]]}).is_conformant


def test_a_description_that_is_not_known_is_not_supported(backend):
    adapter = conformance.load_adapter(f"hybridq-{backend}")
    case = CASES["mxfp8/odd/encode"]
    for spec in ({**case.spec, "spin": 3}, {**case.spec, "rule": "guess"}, {"element": "e4m3"}):
        result = run_case(adapter, replace(case, spec=spec))
        assert result.status == "not supported" and result.reason
    assert run_case(adapter, replace(case, kind="riddle")).status == "not supported"


# --- descriptions and files


def test_a_description_gives_the_spec_back(fmt):
    spec = PlaneSpec(hybridq.formats.format(fmt))
    described = describe(spec)
    assert to_spec(json.loads(json.dumps(described))) == spec
    nameless = {key: value for key, value in described.items() if key != "family"}
    assert to_spec(nameless) == spec


def test_a_description_with_options_gives_the_spec_back():
    for text in ("nvfp4;sr;rht=d7e8", "nvfp4;bound=256;4o6=mse", "nvfp4;rows"):
        spec = PlaneSpec.parse(text)
        assert to_spec(describe(spec)) == spec
    with pytest.raises(SpecError, match="unknown fields spin"):
        to_spec({**describe(spec), "spin": 1})


def test_files_are_written_and_read(tmp_path):
    path = tmp_path / "some.npz"
    names = ("casts/e4m3/all_bfloat16", "nvfp4/sr/ties/encode", "gemm/mxfp8_nvfp4_16x16")
    kept = [CASES[name] for name in CASES if name in names or name.startswith("hybrids/mxfp8_m")]
    assert len(kept) > 3
    conformance.write_file(path, "some", kept, "a test")
    for old, new in zip(kept, conformance.read_file(path), strict=True):
        assert (old.id, old.seed, old.offset, old.source) == (
            new.id,
            new.seed,
            new.offset,
            new.source,
        )
        for part in ("given", "want"):
            for name, array in getattr(old, part).items():
                np.testing.assert_array_equal(array, getattr(new, part)[name])
        if old.x is not None:
            np.testing.assert_array_equal(old.x, new.x)


def test_a_file_explains_itself():
    """MXFP8 decoded with NumPy and the file's own words, nothing of hybridq."""
    with np.load(conformance.VECTORS / "mxfp8.npz") as file:
        meta = json.loads(str(file["meta"]))
        case = next(c for c in meta["cases"] if c["id"] == "mxfp8/odd/decode")
        data, scale = (file[case["given"][name]] for name in ("data", "scale"))
        values = file[case["want"]["values"]]
    spec = case["spec"]
    assert (spec["element"], spec["block"], spec["scale"]) == ("e4m3", [1, 32], "e8m0")
    exponent, mantissa = (data >> 3 & 15).astype(int), (data & 7).astype(int)
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    signed = np.where(data & 128, -magnitude, magnitude)
    factor = 2.0 ** (scale.astype(int) - 127.0)
    spread = np.repeat(factor, 32, axis=1)[:, : data.shape[1]]
    np.testing.assert_array_equal((signed * spread).astype(np.float32), values)


def test_files_of_other_kinds_are_refused(tmp_path):
    def meta(**changes):
        np.savez(tmp_path / "x.npz", meta=np.array(json.dumps(changes)))
        return tmp_path / "x.npz"

    with pytest.raises(VectorError, match="version 9"):
        conformance.read_file(meta(format=conformance.FORMAT, version=9, cases=[]))
    with pytest.raises(VectorError, match="neither ours nor"):
        meta(format="something")
        conformance.load_vectors(tmp_path)
    broken = {"id": "a", "kind": "decode", "spec": {}, "shape": [1, 1], "given": {"data": "a7"}}
    with pytest.raises(VectorError, match="a7"):
        conformance.read_file(meta(format=conformance.FORMAT, version=1, cases=[broken]))
    np.savez(tmp_path / "x.npz", meta=np.array("no json"))
    with pytest.raises(VectorError, match="no JSON meta"):
        conformance.load_vectors(tmp_path)


def test_folders_without_vectors_are_refused(tmp_path):
    with pytest.raises(VectorError, match="got none"):
        conformance.load_vectors(tmp_path)
    with pytest.raises(VectorError, match="no case in"):
        conformance.load_vectors(only="no such case")


# --- adapters


def test_adapters_are_loaded_by_name_module_and_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_adapter.py").write_text(
        "class A:\n"
        "    name = 'mine'\n"
        "    def supports(self, case): return 'never'\n"
        "    def encode(self, x, case): return {}\n"
        "    def decode(self, buffers, case): return None\n"
        "def make(): return A()\n"
        "ready = A()\n"
        "class Half:\n"
        "    name = 'half'\n"
        "    def supports(self, case): return None\n"
        "class Asks(A):\n"
        "    def __init__(self, what): pass\n"
    )
    for attribute in ("A", "make", "ready"):
        assert conformance.load_adapter(f"mine_adapter:{attribute}").name == "mine"
    for which, text in (
        ("nothing", "module:attr or one of hybridq"),
        ("no_such_module:A", "cannot load"),
        ("mine_adapter:B", "cannot load"),
        ("mine_adapter:Half", "must have encode, decode"),
        ("mine_adapter:Asks", "must take no arguments"),
    ):
        with pytest.raises(conformance.AdapterError, match=text):
            conformance.load_adapter(which)


def test_ml_dtypes_differs_exactly_where_the_documentation_says():
    """NaN, and what lies beyond the largest value: E4M3 gives NaN there, E5M2 inf."""
    pytest.importorskip("ml_dtypes")
    adapter = conformance.load_adapter("ml_dtypes")
    for case in ALL["casts"]:
        if case.kind == "uncast":
            assert run_case(adapter, case).status == "pass"
            continue
        element = hybridq.formats.element(case.spec["element"])
        got, want = adapter.encode(case.x, case)["data"], case.want["data"]
        differs = got != want
        beyond = np.abs(case.x) > element.max
        assert (np.isnan(case.x) | beyond)[differs].all(), case.id
        if element.specials == "none":  # they saturate there too
            assert np.isnan(case.x)[differs].all(), case.id


def test_torchao_differs_where_the_documentation_says():
    pytest.importorskip("torchao")
    report = report_of("torchao")
    differing = {r.id for _, r in report.results if r.status == "differs"}
    assert not report.counts["failed"], str(report)
    ordinary = ("normal", "ties", "odd", "half", "signed_zeros")
    assert not {i for i in differing if i.split("/")[0] != "nvfp4" and i.split("/")[-2] in ordinary}
    assert {"mxfp8/edges/encode", "mxfp8/inf/encode"} & differing == {"mxfp8/edges/encode"}
    assert {"nvfp4/zeros/encode", "mxfp8/floor/inf/encode"} <= differing


def test_cases_of_columnwise_planes_hand_out_the_transposed_matrix():
    case = CASES["mxfp8/tall/encode"]
    assert case.direction == "columnwise" and case.matrix == case.shape[::-1]
    np.testing.assert_array_equal(case.own, case.x.T)
    with pytest.raises(ValueError, match="has no input"):
        _ = Case("a", "decode", {}).own

"""Smoke test of an installed hybridq: plain Python, needs nothing but hybridq and torch.

`make wheel-check` runs it with warnings as errors, outside the source tree, in an environment that
holds the wheel and torch only. It asks whether the package is whole, not whether it is right: that
is what the conformance vectors, which it runs, and the test suite are for.

    python -I -W error tests/package/smoke.py
"""

import importlib.metadata
import importlib.resources
import pickle
import subprocess
import sys

import torch

import hybridq
from hybridq import conformance


def package() -> None:
    """The installation: metadata, marker, licence, compiled core, a silent import."""
    version = importlib.metadata.version("hybridq")
    assert hybridq.__version__ == version
    files = importlib.resources.files("hybridq")
    assert files.joinpath("py.typed").is_file()
    names = {str(path) for path in importlib.metadata.files("hybridq") or ()}
    assert any(name.endswith("licenses/LICENSE") for name in names), "no LICENSE"
    assert not any(name.startswith(("tests/", "csrc/")) for name in names), names
    core = hybridq.report.diagnose().core
    assert core.is_built, core
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", "import hybridq"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done


def quantize() -> None:
    """Every format by name, both directions, with a bound on what it may lose."""
    x = torch.randn(40, 96)
    for name in hybridq.formats.names():
        t = hybridq.quantize(x, name)
        error = ((t.dequantize() - x).norm() / x.norm()).item()
        assert error < 0.2, (name, error)
        is_exact = name == "identity" or name == "fp32"
        assert (error == 0) == is_exact, (name, error)
    t = hybridq.quantize(x, "mxfp8", columnwise="nvfp4", hadamard=True)
    again = pickle.loads(pickle.dumps(t))
    assert torch.equal(again.dequantize(), t.dequantize())
    assert again.columnwise.spec == t.columnwise.spec


def gemm() -> None:
    """The product of two formats is the product of what they hold."""
    a = hybridq.quantize(torch.randn(33, 128), "mxfp8", columnwise="nvfp4")
    b = hybridq.quantize(torch.randn(24, 128), "fp8_128x128")
    want = a.dequantize().double() @ b.dequantize().double().T
    assert (hybridq.gemm(a, b) - want).abs().max() < 1e-4 * want.abs().max()
    assert hybridq.explain("gemm", a, b).chosen == "torch"
    assert hybridq.explain("encode", "nvfp4").chosen == "cpu"


def train() -> None:
    """The README's recipe: forward and backward, and a step that lowers the loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.GELU(), torch.nn.Linear(200, 10))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    hybridq.convert(model)
    assert model.state_dict().keys() == plain.keys()
    x = torch.randn(32, 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        with hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0], losses
    model.load_state_dict(plain)
    assert model(x).square().mean().item() != losses[0], "nothing was quantized"


def vectors() -> None:
    """The conformance vectors, all of them, against the default backends."""
    loaded = conformance.load_vectors()
    report = conformance.check(conformance.load_adapter("hybridq"), loaded)
    assert report.is_conformant, str(report)


def doctor() -> None:
    """The diagnosis prints, and the command line runs or says what it needs."""
    text = str(hybridq.report.diagnose())
    assert hybridq.__version__ in text and torch.__version__ in text, text
    done = subprocess.run(
        [sys.executable, "-I", "-m", "hybridq", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or "pip install hybridq[demo]" in done.stderr, done


def main() -> None:
    """Run every check above, in order."""
    for check in (package, quantize, gemm, train, vectors, doctor):
        check()
        print(f"{check.__name__}: ok")
    where = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    print(f"smoke: ok, hybridq {hybridq.__version__} with {where}, from {hybridq.__file__}")


if __name__ == "__main__":
    main()

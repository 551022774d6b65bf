"""The kernels as a static library that was built before: minutes of a chip's time that are saved.

    make gpu-library ARCH=90a        # any machine with nvcc: build/gpu-library/hybridq-cuda-....a
    make gpu PREBUILT=<that file>
    make gpu-wheel ARCH=90a GPU_PYTHON=python3.12   # the package around it, for that Python
    make gpu GPU_WHEEL=<that file>

Names of the library and of the wheel's folder have the architecture and a number of the sources,
so that no kernels of another tree run.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["file_name", "reason", "sources", "wheel_reason"]

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"hybridq-cuda-(?P<arch>[0-9]+a?)-(?P<sources>[0-9a-f]{12})\.a")


def sources(root: Path = ROOT) -> str:
    """Return twelve digits that change with any source of the kernels, or of how they compile."""
    found = hashlib.sha256()
    files = [*root.glob("csrc/**/*"), *root.glob("cmake/cuda.cmake")]
    for file in sorted(file for file in files if file.is_file()):
        parts = file.relative_to(root).parts
        if parts[:2] in (("csrc", "emulation"), ("csrc", "tests"), ("csrc", "bindings")):
            continue
        found.update("/".join(parts).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def file_name(arch: str, root: Path = ROOT) -> str:
    """Return the name of the library for an architecture, `90a`, of this tree."""
    return f"hybridq-cuda-{arch}-{sources(root)}.a"


def reason(file: Path, arch: str, root: Path = ROOT) -> str | None:
    """Return None if a library can stand in for this tree's kernels, else why not."""
    if not file.is_file():
        return f"PREBUILT must be a file, got {file}"
    if _NAME.fullmatch(file.name) is None:
        return f"PREBUILT must be what make gpu-library makes, got {file.name}"
    wanted = file_name(arch, root)
    return None if file.name == wanted else f"PREBUILT must be {wanted}, got {file.name}"


def wheel_reason(file: Path, arch: str, root: Path = ROOT) -> str | None:
    """Return None if a wheel is of this tree, its kernels and its Python, else why not."""
    if not file.is_file() or file.suffix != ".whl":
        return f"GPU_WHEEL must be a wheel that make gpu-wheel makes, got {file}"
    wanted = f"{arch}-{sources(root)}"
    if file.resolve().parent.name != wanted:
        return f"GPU_WHEEL must lie in a folder {wanted}, got {file}"
    with zipfile.ZipFile(file) as content:
        for name in content.namelist():
            own = root / "src" / name
            if name.endswith(".py") and own.is_file() and own.read_bytes() != content.read(name):
                return f"GPU_WHEEL has another {name} than this tree: make gpu-wheel again"
    return None


def _wheel(options: argparse.Namespace, library: Path) -> int:
    folder = ROOT / "build" / "gpu-wheel" / f"{options.arch}-{sources()}"
    defines = {
        "HYBRIDQ_CUDA": "ON",
        "HYBRIDQ_CUDA_ARCHS": f"{options.arch}-real",
        "HYBRIDQ_CUDA_LIBRARY": str(library),
    }
    command = [
        *(options.wheel_python, "-m", "pip", "wheel", "--quiet", "--no-deps"),
        *("--wheel-dir", str(folder)),
        *(f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()),
        str(ROOT),
    ]
    status = subprocess.run(command, check=False).returncode
    for made in sorted(folder.glob("*.whl")):
        print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")
    return status


def main(arguments: list[str] | None = None) -> int:
    """Build the library; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu-library")
    parser.add_argument("--wheel-python", help="also make the package's wheel, for this Python")
    options = parser.parse_args(arguments)
    work = options.folder / f"work-{options.arch}"
    configure = [
        *(options.cmake, "-S", str(ROOT), "-B", str(work), "-G", "Ninja"),
        *("-DHYBRIDQ_CUDA=ON", f"-DHYBRIDQ_CUDA_ARCHS={options.arch}-real"),
        "-DHYBRIDQ_BUILD_PYTHON=OFF",
    ]
    for command in (configure, [options.cmake, "--build", str(work), "--target", "hybridq_cuda"]):
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            return status
    made = options.folder / file_name(options.arch)
    shutil.copyfile(work / "libhybridq_cuda.a", made)
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")
    return _wheel(options, made) if options.wheel_python else 0


if __name__ == "__main__":
    sys.exit(main())

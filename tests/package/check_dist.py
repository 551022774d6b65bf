"""Check what is in the built distributions: `python check_dist.py X.whl X.tar.gz`, in the tree.

A wheel holds the package's own files, the compiled core and its metadata, carries a manylinux tag,
and its core links nothing but the C and C++ runtimes. An sdist holds what a build needs. Both hold
nothing else. `make wheel` runs it; it needs pyelftools, which comes with auditwheel.
"""

import fnmatch
import io
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parents[2]
#: The core finds torch's OpenMP runtime at run time, and CUDA's runtime is linked statically.
RUNTIMES = {"libstdc++", "libgcc_s", "libc", "libm", "libdl", "libpthread", "librt", "ld-linux*"}
#: What a build needs: the rest of the tree (tests, docs, ...) is not distributed.
SDIST_ROOT = ("CHANGELOG.md", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")
SDIST_TREES = {"cmake": ("*.cmake",), "csrc": ("*.cpp", "*.cu", "*.cuh", "*.h")}
PACKAGE = ("*.py", "*.npz", "py.typed")


def below(folder: str, patterns: tuple[str, ...]) -> set[str]:
    """Return the files of the tree below `folder` that match, as paths from the root."""
    paths = (path for pattern in patterns for path in (ROOT / folder).rglob(pattern))
    return {path.relative_to(ROOT).as_posix() for path in paths}


def package_files() -> set[str]:
    """Return the files of the package and of its command, as paths from the root."""
    return below("src/hybridq", PACKAGE) | below("src/hybridq_cli", PACKAGE)


def same_files(what: str, got: set[str], want: set[str]) -> None:
    """Stop if a file is missing or strays."""
    if got != want:
        sys.exit(f"{what}: misses {sorted(want - got)}, and must not hold {sorted(got - want)}")


def check_wheel(path: Path) -> None:
    """Stop with the reason if the wheel is not as the module's docstring says."""
    tag = path.stem.split("-", 2)[2]
    if "manylinux_" not in tag:
        sys.exit(f"{path.name}: the tag must be a manylinux one, got {tag}")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        (core,) = fnmatch.filter(names, "hybridq/_core.*.so")
        data = wheel.read(core)
    package = {name.removeprefix("src/") for name in package_files()}
    parts = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    same_files(path.name, names, {core, *package, *(f"{info}/{part}" for part in parts)})
    needed = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    if {text.partition(">")[0] for text in needed} != {"numpy", "torch"}:
        sys.exit(f"{path.name}: must require numpy and torch, got {needed}")
    elf = ELFFile(io.BytesIO(data))
    if elf.get_section_by_name(".symtab") is not None:
        sys.exit(f"{path.name}: {core} must be stripped")
    tags = list(elf.get_section_by_name(".dynamic").iter_tags())
    libraries = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    for library in libraries:
        if not any(fnmatch.fnmatch(library.split(".so")[0], name) for name in RUNTIMES):
            sys.exit(f"{path.name}: {core} must link the C and C++ runtimes only, got {library}")
    if any(tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH") for tag in tags):
        sys.exit(f"{path.name}: {core} must have no search path")
    size = f"{path.stat().st_size / 1e6:.2f} MB, core {len(data) / 1e6:.2f} MB"
    print(f"{path.name}: ok, {len(names)} files, {size}, links {', '.join(libraries)}")


def check_sdist(path: Path) -> None:
    """Stop with the reason if the sdist is not as the module's docstring says."""
    with tarfile.open(path) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    want = {"PKG-INFO", *SDIST_ROOT, *package_files()}
    for folder, patterns in SDIST_TREES.items():
        want |= below(folder, patterns)
    same_files(path.name, names, want)
    print(f"{path.name}: ok, {len(names)} files, {path.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Check every distribution that is named."""
    if len(sys.argv) < 2:
        sys.exit("check_dist: needs the names of wheels or sdists, got none")
    for path in map(Path, sys.argv[1:]):
        (check_wheel if path.suffix == ".whl" else check_sdist)(path)


if __name__ == "__main__":
    main()

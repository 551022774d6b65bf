"""Count what the CUDA kernels cost, from their machine code: a performance test without a GPU.

For every kernel that `sass_budgets.json` names, and every architecture it was compiled for: the
instructions of its hot path per element, registers, resident warps, spills and local memory. Over a
budget, below its least number of resident warps, with any spill, or where an amax pass tells the
cache to drop what the next pass reads, the exit status is 1.

    python benchmarks/sass.py build/kernels-check            # a folder with .cubin, .o or .a
    python benchmarks/sass.py build/kernels-check --update   # write what was counted as budgets

The hot path is the way through a kernel's branches, each loop taken once, that meets the most
"anchors" (loads and stores of global memory, unless the table says otherwise), and among those ways
the one with the fewest instructions. If the innermost loop around the most anchors holds them all,
or the table says so, its body alone is counted. Instructions in called subroutines (slow paths of
divisions) are not.

Source of the occupancy limits: CUDA C++ Programming Guide, "Technical specifications per compute
capability".
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import floor
from pathlib import Path

BUDGETS = Path(__file__).with_name("sass_budgets.json")
_SUFFIXES = (".cubin", ".o", ".a")

# compute capability -> (warps per SM, KB of shared memory per SM)
_LIMITS = {"80": (64, 164), "89": (48, 100), "90": (64, 228), "100": (64, 228), "120": (48, 100)}
_REGISTERS = 65536
#: Loads and stores of global memory.
_ANCHOR = "LDG|STG"
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


@dataclass(frozen=True)
class Instruction:
    """One line of machine code; `guard` is its predicate or empty."""

    address: int
    guard: str
    opcode: str
    text: str

    @property
    def target(self) -> int | None:
        """The address that it names last, if any."""
        found = _TARGET.search(self.text)
        return int(found.group(1), 16) if found else None


@dataclass
class Kernel:
    """A compiled kernel: its demangled name, architecture, code and resources."""

    name: str
    arch: str
    code: list[Instruction] = field(default_factory=list)
    registers: int = 0
    stack: int = 0


def find_tool(name: str) -> str:
    """Return the path of a tool of the CUDA toolkit: on PATH, beside nvcc, or in triton's wheel."""
    found = shutil.which(name)
    if found is not None:
        return found
    nvcc = shutil.which("nvcc")
    places = [Path(nvcc).resolve().parent] if nvcc else []
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    for place in places:
        if (place / name).exists():
            return str(place / name)
    raise SystemExit(f"sass: needs {name}, which comes with the CUDA toolkit and with triton")


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _demangled(names: list[str]) -> dict[str, str]:
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None or not names:
        return {name: name for name in names}
    plain = subprocess.run(
        [tool], input="\n".join(names), check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return dict(zip(names, plain, strict=True))


def read_kernels(path: Path, cuobjdump: str) -> list[Kernel]:
    """Return every kernel in a cubin, an object file or a library."""
    kernels: dict[tuple[str, str], Kernel] = {}
    arch, current = "", None
    for line in _output(cuobjdump, "-sass", str(path)).splitlines():
        if (found := re.match(r"\s*code for (sm_\w+)", line)) is not None:
            arch = found.group(1)
        elif (found := re.match(r"\s*Function : (\S+)", line)) is not None:
            current = kernels.setdefault((arch, found.group(1)), Kernel(found.group(1), arch))
        elif current is not None and (found := _INSTRUCTION.match(line)) is not None:
            current.code.append(_parse(int(found.group(1), 16), found.group(2)))
    usage = _output(cuobjdump, "-res-usage", str(path))
    name = ""
    for line in usage.splitlines():
        if (found := re.search(r"^arch = (sm_\w+)", line)) is not None:
            arch = found.group(1)
        elif (found := re.match(r"\s*Function (\S+):", line)) is not None:
            name = found.group(1)
        elif (found := re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", line)) is not None:
            kernel = kernels.get((arch, name))
            if kernel is not None:
                kernel.registers = int(found.group(1))
                kernel.stack = int(found.group(2)) + int(found.group(3))
    plain = _demangled([k.name for k in kernels.values()])
    for kernel in kernels.values():
        kernel.name = plain[kernel.name]
    return [k for k in kernels.values() if k.code]


def _parse(address: int, text: str) -> Instruction:
    guard = ""
    if text.startswith("@"):
        guard, text = text.split(None, 1)
    return Instruction(address, guard, text.split(None, 1)[0], text)


def successors(code: list[Instruction]) -> list[list[int]]:
    """Return for every instruction the indices of those that may come next.

    A convergence point (`BSYNC Bn`) continues where the `BSSY Bn` before it said.
    """
    index = {ins.address: i for i, ins in enumerate(code)}
    result: list[list[int]] = [[] for _ in code]
    seen: set[int] = set()
    todo: list[tuple[int, tuple[tuple[str, int], ...]]] = [(0, ())]
    while todo:
        i, barriers = todo.pop()
        if i in seen or i >= len(code):
            continue
        seen.add(i)
        ins, known = code[i], dict(barriers)
        following = [i + 1] if i + 1 < len(code) else []
        root = ins.opcode.split(".")[0]
        if root == "BSSY" and ins.target is not None:
            known[ins.text.split()[1].rstrip(",")] = index.get(ins.target, i + 1)
        elif root == "BSYNC":
            following = [known.get(ins.text.split()[-1], i + 1)]
        elif root == "BRA" and ins.target is not None:
            jump = [index[ins.target]] if ins.target in index else []
            # A BRA with a predicate among its operands, or .DIV, may fall through too.
            always = not ins.guard and re.fullmatch(r"BRA(\.\w+)?\s+0x[0-9a-f]+", ins.text)
            following = jump if always and "DIV" not in ins.opcode else jump + following
        elif root in ("EXIT", "RET"):
            following = following if ins.guard else []
        result[i] = following
        todo.extend((j, tuple(known.items())) for j in following)
    return result


def _loops(after: list[list[int]]) -> list[tuple[int, int]]:
    """Return (first, last) of every loop: an edge back to what leads there.

    A jump to a lower address alone is none: slow paths lie behind the code that they return to.
    """
    found: set[tuple[int, int]] = set()
    open_nodes, seen = {0}, {0}
    stack: list[tuple[int, Iterator[int]]] = [(0, iter(after[0]))]
    while stack:
        node, nexts = stack[-1]
        following = next(nexts, None)
        if following is None:
            open_nodes.discard(node)
            stack.pop()
        elif following in open_nodes:
            found.add((following, node))
        elif following not in seen:
            seen.add(following)
            open_nodes.add(following)
            stack.append((following, iter(after[following])))
    return sorted(found)


@dataclass(frozen=True)
class HotPath:
    """What is counted of a kernel: indices of its instructions."""

    indices: list[int]
    is_loop: bool


def hot_path(kernel: Kernel, anchor: str = _ANCHOR, loop: bool | None = None) -> HotPath:
    """Return the hot path; `loop` says whether only a loop's body is wanted (None: see above)."""
    after = successors(kernel.code)
    is_anchor = [re.match(anchor, ins.opcode) is not None for ins in kernel.code]
    every = _best(kernel.code, after, is_anchor, 0, len(kernel.code) - 1)
    if loop is False:
        return HotPath(every, False)
    bodies = [
        (sum(is_anchor[i] for i in every if first <= i <= last), first - last, first, last)
        for first, last in _loops(after)
        if first in every
    ]
    total = sum(is_anchor[i] for i in every)
    if bodies:
        anchors, _, first, last = max(bodies)
        if loop or anchors == total > 0:
            return HotPath(_best(kernel.code, after, is_anchor, first, last), True)
    return HotPath(every, False)


def _best(
    code: list[Instruction], after: list[list[int]], is_anchor: list[bool], first: int, last: int
) -> list[int]:
    """Most anchors, then fewest instructions, from `first` to an end inside [first, last]."""
    best: dict[int, tuple[int, int]] = {}
    chosen: dict[int, int] = {}
    for i in reversed(_topological(after, first, last)):
        options = [(best[j], j) for j in after[i] if j in best]
        if code[i].opcode == "EXIT":  # with a predicate: it may end here
            options.append(((0, 0), -1))
        value, j = max(options, default=((0, 0), -1))
        best[i] = (value[0] + is_anchor[i], value[1] - (code[i].opcode != "NOP"))
        chosen[i] = j
    path: list[int] = []
    i = first
    while i >= 0:
        if code[i].opcode != "NOP":
            path.append(i)
        i = chosen[i]
    return path


def _topological(after: list[list[int]], first: int, last: int) -> list[int]:
    """Order [first, last] depth first; an edge back is a loop's, and dropped."""
    order: list[int] = []
    seen = {first}
    stack: list[tuple[int, Iterator[int]]] = [(first, iter(after[first]))]
    while stack:
        node, nexts = stack[-1]
        following = next((j for j in nexts if first <= j <= last and j not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(after[following])))
    return order[::-1]


def resident_warps(arch: str, registers: int, threads: int, shared: int) -> tuple[int, int]:
    """Return how many warps of a kernel an SM holds, and how many it could."""
    capability = re.sub(r"\D", "", arch)
    limit, kilobytes = _LIMITS.get(capability, (64, 228))
    warps = threads // 32
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    # Registers are given out to a quarter of the SM at a time.
    by_registers = floor(_REGISTERS / 4 / per_warp) * 4 // warps
    by_shared = (kilobytes * 1024) // (shared + 1024)
    return min(limit // warps, by_registers, by_shared, 32) * warps, limit


@dataclass(frozen=True)
class Entry:
    """A line of the table: the kernels whose demangled name matches, and what they may cost.

    `elements`: per thread, or per thread and turn of the loop. `budget`: architecture -> most
    instructions per element. `warps`: architecture -> least warps that a multiprocessor holds.
    `keeps`: another pass reads the same input, which no load may mark as the first to be evicted.
    """

    name: str
    match: str
    elements: int
    threads: int
    shared: int = 0
    anchor: str = _ANCHOR
    loop: bool | None = None
    budget: dict[str, float] = field(default_factory=dict)
    registers: int = 255
    warps: dict[str, int] = field(default_factory=dict)
    keeps: bool = False


@dataclass(frozen=True)
class Row:
    """An entry's kernel, counted."""

    entry: Entry
    kernel: Kernel
    path: HotPath

    @property
    def per_element(self) -> float:
        return len(self.path.indices) / self.entry.elements

    def opcodes(self) -> str:
        """The hot path's opcodes, the most frequent first."""
        roots = Counter(self.kernel.code[i].opcode.split(".")[0] for i in self.path.indices)
        return " ".join(f"{count} {root}" for root, count in roots.most_common())

    def warps(self) -> tuple[int, int]:
        """Return how many of its warps an SM holds, and how many of any kernel."""
        entry = self.entry
        return resident_warps(self.kernel.arch, self.kernel.registers, entry.threads, entry.shared)

    def line(self) -> str:
        warps, limit = self.warps()
        counted = f"{len(self.path.indices)}{' loop' if self.path.is_loop else ''}"
        return (
            f"{self.entry.name:32} {self.kernel.arch:8} {self.per_element:8.2f} {counted:>10} "
            f"{self.kernel.registers:5} {warps:3}/{limit}"
        )

    def problems(self) -> list[str]:
        """What is over budget."""
        found = []
        budget = self.entry.budget.get(self.kernel.arch)
        if budget is not None and self.per_element > budget:
            found.append(f"at most {budget} instructions per element, got {self.per_element:.3f}")
        if self.kernel.registers > self.entry.registers:
            found.append(f"at most {self.entry.registers} registers, got {self.kernel.registers}")
        least, warps = self.entry.warps.get(self.kernel.arch, 0), self.warps()[0]
        if warps < least:
            found.append(f"at least {least} resident warps, got {warps}")
        evicted = sum(re.match(r"LDG.*\.EF\b", i.opcode) is not None for i in self.kernel.code)
        if self.entry.keeps and evicted:
            found.append(f"must leave its input in the cache, got {evicted} loads that evict first")
        return [f"{self.entry.name} ({self.kernel.arch}): {problem}" for problem in found]


def count(kernels: list[Kernel], entries: list[Entry]) -> list[Row]:
    """Return a row for every kernel and architecture that an entry matches."""
    return [
        Row(entry, kernel, hot_path(kernel, entry.anchor, entry.loop))
        for entry in entries
        for kernel in sorted(kernels, key=lambda k: (k.name, int(re.sub(r"\D", "", k.arch))))
        if re.search(entry.match, kernel.name)
    ]


def local_memory(kernel: Kernel) -> list[str]:
    """Return what a kernel keeps in local memory, as problems."""
    local = sum(re.match(r"LDL|STL", i.opcode) is not None for i in kernel.code)
    if not local and not kernel.stack:
        return []
    return [
        f"{kernel.name} ({kernel.arch}): must use no local memory, got {kernel.stack} bytes of "
        f"stack and {local} accesses"
    ]


def update(rows: list[Row], entries: list[Entry]) -> None:
    """Set every budget to what was counted, with 2 percent for the next version of the compiler.

    Resident warps have no such room: where the next version holds fewer, somebody should look.
    """
    table = []
    for entry in entries:
        mine = [row for row in rows if row.entry is entry]
        budget: dict[str, float] = {}
        for row in mine:
            most = max(budget.get(row.kernel.arch, 0.0), row.per_element)
            budget[row.kernel.arch] = round(most * 1.02, 2)
        warps: dict[str, int] = {}
        for row in mine:
            held = row.warps()[0]
            warps[row.kernel.arch] = min(warps.get(row.kernel.arch, held), held)
        line = {key: value for key, value in vars(entry).items() if value not in (None, False)}
        line["budget"] = {**entry.budget, **budget}
        line["warps"] = {**entry.warps, **warps}
        line["registers"] = max((row.kernel.registers for row in mine), default=entry.registers)
        table.append(line)
    BUDGETS.write_text(json.dumps({"kernels": table}, indent=1) + "\n")


def main() -> int:
    """Print the table and the problems; return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="cubins, objects, libraries or folders")
    parser.add_argument("--update", action="store_true", help="write the counts as budgets")
    parser.add_argument("--opcodes", action="store_true", help="print the hot paths' opcodes too")
    parser.add_argument("--cuobjdump", default="", help="its path, if it is not found by itself")
    parser.add_argument("--only", default="", help="regular expression of the table's names")
    args = parser.parse_args()
    entries = [Entry(**line) for line in json.loads(BUDGETS.read_text())["kernels"]]
    files = [
        file
        for path in args.paths
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.suffix in _SUFFIXES
    ]
    cuobjdump = args.cuobjdump or find_tool("cuobjdump")
    kernels = [kernel for file in files for kernel in read_kernels(file, cuobjdump)]
    shown = [entry for entry in entries if re.search(args.only, entry.name)]
    rows = count(kernels, shown)
    print(f"{'kernel':32} {'arch':8} {'instr/el':>8} {'counted':>10} {'regs':>5} {'warps':>6}")
    for row in rows:
        print(row.line())
        if args.opcodes:
            print("   ", row.opcodes())
    if args.update:
        update(rows, entries)
        return 0
    problems = [problem for row in rows for problem in row.problems()]
    problems += [problem for kernel in kernels for problem in local_memory(kernel)]
    found = {row.entry.name for row in rows}
    problems += [
        f"{entry.name}: must match a compiled kernel, got none of {entry.match}"
        for entry in shown
        if entry.name not in found
    ]
    for problem in problems:
        print(f"sass: {problem}", file=sys.stderr)
    print(f"{len(kernels)} kernels compiled, {len(rows)} counted, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""`PYTHONPATH=tests python -m fuzz`: fuzz in a child process, which may crash or hang.

The child logs every step before it runs it, so that a crash of the process tells what caused it.
Every round has a seed of its own; `--seed S --rounds 1` runs the round S again, alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["main"]

_CLEAN, _FOUND = 0, 1
FAULTS = ("crash", "hang", "wrong")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to go on")
    parser.add_argument("--rounds", type=int, default=0, help="how many rounds; 0: no limit")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--steps", type=int, default=20, help="of one example")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one example")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="for reports")
    # For the test of this runner: what a round shall come to.
    parser.add_argument("--break", dest="fault", choices=FAULTS, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _why(code: int) -> str:
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return "an invariant does not hold, or an example took too long (see the traceback above)"


def main() -> int:
    """Run the child and report; returns the exit status."""
    arguments = _arguments()
    if arguments.child:
        from .runner import run

        return run(arguments)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    # The hash seed, since hypothesis iterates sets of rules' names: else a seed is no repetition.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-X", "faulthandler", "-m", "fuzz", "--child", *sys.argv[1:]]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code == _CLEAN:
        return _CLEAN
    round_file, steps_file = arguments.folder / "round.txt", arguments.folder / "steps.txt"
    seed = round_file.read_text().strip() if round_file.exists() else "?"
    steps = steps_file.read_text() if steps_file.exists() else ""
    report = arguments.folder / f"failure-{seed}.txt"
    text = (
        f"fuzz: {_why(code)}\n"
        f'again: make fuzz FUZZ_ARGS="--seed {seed} --rounds 1 --steps {arguments.steps}"\n'
        f"steps of the last example, the last one did not end:\n{steps}"
    )
    report.write_text(text)
    print(f"{text}\nsaved as {report}", flush=True)
    return _FOUND


if __name__ == "__main__":
    sys.exit(main())

"""Starts ranks without the seconds of their imports: it has imported torch, and forks.

Reads requests from its input, one line of JSON each, and answers each with one line, the exit
statuses of the ranks by rank:

    {"source": a program's text, "file": its name, "ranks": the arguments of each rank,
     "errors": a file for each rank's output, "leaves": a rank to end when the others have ended, or
     null, "timeout": seconds after which a rank is killed that has not ended by itself}

It starts no thread itself, and no group of processes: a fork is as good as a new process.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
import types
import warnings
from typing import Any

# What the programs import; a fork has it at once.
import numpy  # noqa: F401
import torch
import torch._dynamo  # collectives by their functions import it
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.nn.parallel

import hybridq
import hybridq.distributed
import hybridq.optim
import hybridq.report  # noqa: F401


def _run(request: dict[str, Any], rank: int) -> None:
    """Be the rank: run the program as `python FILE ARGUMENTS` does."""
    output = os.open(request["errors"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.alarm(int(request["timeout"]))
    faulthandler.enable()
    warnings.simplefilter("ignore")
    os.environ["TEST_TIMEOUT"] = str(request["timeout"])
    # A group is made on all ranks or on none: one that dies next would end another's connecting.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    sys.argv = [request["file"], *request["ranks"][rank]]
    module = types.ModuleType("__main__")
    module.__file__ = request["file"]
    sys.modules["__main__"] = module
    exec(compile(request["source"], request["file"], "exec"), module.__dict__)


def _start(request: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _run(request, rank)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(request: dict[str, Any]) -> list[int]:
    started = [_start(request, rank) for rank in range(len(request["ranks"]))]
    statuses = [0] * len(started)
    staying = [rank for rank in range(len(started)) if rank != request["leaves"]]
    for rank in staying:
        _, status = os.waitpid(started[rank], 0)
        statuses[rank] = os.waitstatus_to_exitcode(status)
    if request["leaves"] is not None:
        os.kill(started[request["leaves"]], signal.SIGKILL)
        os.waitpid(started[request["leaves"]], 0)
    return statuses


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # a fork's collector leaves pages alone that it shares with this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # nothing is left to end, and libraries' last words are no test's

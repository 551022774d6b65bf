"""A device that is neither a CPU nor of CUDA: see `other_device.cpp`.

A process has one such device, and keeps it, so that tests have it in processes of their own:
`python other_device_program.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

#: What torch calls it.
KIND = "other"
_SOURCE = Path(__file__).with_suffix(".cpp")
_FOLDER = _SOURCE.parents[2] / "build" / "other-device"


def built() -> Path:
    """Return the folder of the compiled device; compile it if it is not there (half a minute)."""
    from torch.utils.cpp_extension import load

    digest = hashlib.blake2b(_SOURCE.read_bytes(), digest_size=8).hexdigest()
    tag = f"{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{digest}"
    made = _FOLDER / tag / "other_device_core.so"
    if made.exists():
        return made.parent
    made.parent.mkdir(parents=True, exist_ok=True)
    # ninja is in the environment's own folder, which needs not be among those of programs.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # Elsewhere first: a compilation that is stopped leaves a lock behind, for which others wait.
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        load(
            made.stem,
            [str(_SOURCE)],
            build_directory=folder,
            extra_cflags=["-O0"],
            is_python_module=False,
        )
        os.replace(Path(folder) / made.name, made)
    return made.parent


def start(has_float64: bool, has_float8: bool) -> str:
    """Make the device known to torch, and return its kind.

    Args:
        has_float64: it has tensors of FP64.
        has_float8: and of torch's float8 dtypes.
    """
    sys.path.insert(0, str(built()))
    import other_device_core

    torch.utils.rename_privateuse1_backend(KIND)
    module = ModuleType(f"torch.{KIND}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = lambda index: contextlib.nullcontext()
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(KIND, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    other_device_core.start(has_float64, has_float8)
    return KIND

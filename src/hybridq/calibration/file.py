"""A calibration as one safetensors file: its tensors, and what they are in the metadata.

Tensors: `<name>.<slot>_amax`, FP32, and `<name>.tokens`, int64. The metadata is one JSON text with
a version, a digest of names and shapes, and one of all values, so that a damaged file is never read
as if it were whole. Equal calibrations are equal files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from .._files import import_safetensors, write_whole
from ..errors import CheckpointError, path_in
from .calibration import SLOTS, Calibration

__all__ = ["check_target", "is_calibration", "load", "names_digest", "save"]

#: The one key of the metadata: several are written in any order.
_KEY: Final = "hybridq_calibration"
_VERSION: Final = 1
_TOKENS: Final = ".tokens"


def _tensors(calibration: Calibration) -> dict[str, torch.Tensor]:
    """Return what the file holds, in fixed order."""
    found = {f"{name}.{slot}_amax": value for name, slot, value in calibration.entries()}
    found |= {f"{name}{_TOKENS}": count for name, count in calibration.tokens.items()}
    return {key: found[key].contiguous() for key in sorted(found)}


def names_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, dtypes and shapes, as hexadecimal digits.

    Args:
        tensors: by name.
    """
    lines = [f"{key} {one.dtype} {list(one.shape)}\n" for key, one in sorted(tensors.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _values_digest(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for _, one in sorted(tensors.items()):
        digest.update(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write a file beside its place, and then put it there.

    Args:
        calibration: what to write.
        path: of the file.

    Raises:
        ImportError: safetensors is not installed.
        OSError: it cannot be written.
    """
    import_safetensors("calibration")
    from safetensors.torch import save as as_bytes

    tensors = _tensors(calibration)
    about = {
        "observers": dict(calibration.observers),
        "formats": {name: dict(one) for name, one in calibration.formats.items()},
        "batches": calibration.batches,
    }
    text = {
        "version": _VERSION,
        "names": names_digest(tensors),
        "values": _values_digest(tensors, about),
        "about": about,
    }
    metadata = {_KEY: json.dumps(text, sort_keys=True)}
    write_whole(path, as_bytes(tensors, metadata))


def check_target(where: str, path: str | os.PathLike[str]) -> None:
    """Raise where no file can be written.

    Args:
        where: who asks, for the error.
        path: of the file.

    Raises:
        OSError: the path is a folder, or its folder is not there or takes no files.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{where}: path must be a file, got the folder {target}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{where}: path must be in a folder that is there, got {target}")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"{where}: path must be in a folder that takes files, got {target}")


def is_calibration(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is one of a calibration, damaged or not.

    Args:
        path: of anything.

    Raises:
        ImportError: safetensors is not installed.
    """
    import_safetensors("calibration")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "pt") as file:
            return _KEY in (file.metadata() or {})
    except (OSError, SafetensorError):  # a folder, or what others say is wrong with it
        return False


def load(path: str | os.PathLike[str]) -> Calibration:
    """Return the calibration of a file, checked.

    Args:
        path: of the file.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: it cannot be read, is a folder, damaged, or no calibration.
    """
    import_safetensors("calibration")
    from safetensors import SafetensorError, safe_open

    path = path_in("calibration: path", path)
    if os.path.isdir(path):
        raise CheckpointError(f"calibration: {path} must be a file, got a folder")
    try:
        with safe_open(os.fspath(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"calibration: cannot read {path} ({error})") from error
    if _KEY not in metadata:
        raise CheckpointError(
            f"calibration: {path} must be a file of hybridq.calibrate, got a safetensors file "
            "without its metadata"
        )
    return _read(path, tensors, _parsed(path, metadata[_KEY]))


def _parsed(path: object, text: str) -> dict[str, Any]:
    """Return the metadata; what is not of this version is refused before anything else."""
    try:
        read = json.loads(text)
        version = read["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"its metadata cannot be read ({error})") from error
    if version != _VERSION:
        raise CheckpointError(
            f"calibration: {path} must have version {_VERSION}, got {version!r}; calibrate again, "
            "or read it with the hybridq that wrote it"
        )
    return read


def _damaged(path: object, what: str) -> CheckpointError:
    return CheckpointError(f"calibration: {path} is damaged: {what}; calibrate again")


def _read(path: object, tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> Calibration:
    try:
        names, values, about = text["names"], text["values"], dict(text["about"])
        observers, formats = dict(about["observers"]), dict(about["formats"])
        batches = int(about["batches"])
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"its metadata lack something ({error})") from error
    if names != names_digest(tensors):
        raise _damaged(path, "names or shapes are not those that were written")
    if values != _values_digest(tensors, about):
        raise _damaged(path, "values are not those that were written")
    amaxes: dict[str, dict[str, torch.Tensor]] = {}
    tokens = {}
    for key, value in tensors.items():
        slot = next((one for one in SLOTS[::-1] if key.endswith(f".{one}_amax")), None)
        if slot is not None:
            amaxes.setdefault(key.removesuffix(f".{slot}_amax"), {})[slot] = value
        else:
            tokens[key.removesuffix(_TOKENS)] = value
    return Calibration(amaxes, tokens, observers, formats, batches)

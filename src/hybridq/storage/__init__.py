"""Planes and pairs of planes."""

from __future__ import annotations

from .build import PlanePair, StoragePlan, build_storage, build_storages, encode_pair
from .given_away import GivenAway
from .plane import Plane, overwrite
from .plane_stack import PlaneStack
from .ragged import RaggedTensor, build_ragged
from .storage import PlaneLayout, StorageLayout, TensorStorage

__all__ = [
    "GivenAway",
    "Plane",
    "PlaneLayout",
    "PlanePair",
    "PlaneStack",
    "RaggedTensor",
    "StorageLayout",
    "StoragePlan",
    "TensorStorage",
    "build_ragged",
    "build_storage",
    "build_storages",
    "encode_pair",
    "overwrite",
]

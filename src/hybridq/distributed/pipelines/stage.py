"""The stage itself: torch's, with what goes over the wire exchanged for planes.

torch's schedules ask a stage for the sends and receives of a microbatch and run them. Here each
that is about an activation or a gradient is of its plane's bytes instead, and what was received is
decoded when the microbatch's forward or backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from ... import settings
from ..._torch_ranks import check_pipeline_stage
from ...nn import Linear
from ...nn.delayed_scaling import reduce_over
from ...recipes import Recipe, autocast
from .plane_payload import PlanePayload
from .split_backward import is_split_right
from .stage_agreement import Agreed, compare_recipes, compare_stages
from .wire_formats import Formats

__all__ = ["Stage"]

check_pipeline_stage()


class _Arriving(NamedTuple):
    """A receive of bytes: where its values are to be put."""

    payload: torch.Tensor
    about: PlanePayload
    info: Any


class Stage(PipelineStage):
    """torch's PipelineStage whose tensors travel as planes; made by `pipeline_stage`."""

    def take(
        self,
        formats: Formats,
        replicas: Any,
        keep_weights: bool = True,
        takes_planes: bool | None = None,
    ) -> None:
        """Take what torch's stage has not.

        Args:
            formats: of what travels.
            replicas: process group of the ranks that hold the same stage, or None.
            keep_weights, takes_planes: as for `pipeline_stage`.
        """
        self._formats, self._keeps = formats, keep_weights
        self._takes_planes = _begins_linear(self.submod) if takes_planes is None else takes_planes
        self._arriving: dict[tuple[bool, int], list[_Arriving]] = {}
        self._run_whole: set[int] = set()
        self._sent: list[tuple[int, ...]] = []
        self._is_compared = False
        self._known: set[str] = set()
        spans_all = dist.get_world_size(self.group) == dist.get_world_size()
        name = replicas.group_name if replicas is not None else "" if spans_all else None
        if name is not None:
            is_alone = replicas is None or dist.get_world_size(replicas) == 1
            reduce_over(self.submod, "" if is_alone else name)
        size = int(spans_all) if replicas is None else dist.get_world_size(replicas)
        self._agreed = Agreed(self.num_stages, (formats[0], formats[1]), keep_weights, size)

    # ---- the first step

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # torch 2.10 opens all connections so. In V schedules one is from a rank to itself: nothing
        # is sent over it, and gloo has none.
        ops: list[Any] = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.peer != dist.get_rank()]

    @property
    def _is_ranks_first(self) -> bool:
        """Whether this is the first of its rank's stages, which speaks for all of them.

        A second collective could wait for a rank that waits for this one's next shapes.
        """
        ranks = self.stage_index_to_group_rank
        own = [stage for stage, rank in ranks.items() if rank == self.group_rank]
        return bool(self.stage_index == min(own, default=self.stage_index))

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if self._is_ranks_first and not self._is_compared:
            group = dist.group.WORLD if self.group is None else self.group
            agreed = self._agreed._replace(num_microbatches=num_microbatches)
            compare_stages(agreed, self.submod, group)
            self._is_compared = True
            self._known = {_recipe_key()}
        self._sent = []
        # torch runs the module to see shapes, with any values: no history may record them.
        with autocast(enabled=False):
            return super()._prepare_forward_infra(num_microbatches, *args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(enabled=False):
            return super()._prepare_backward_infra(*args, **kwargs)

    def _agree(self, chunk: int) -> None:
        """Compare a recipe that is new since the ranks compared, before the first microbatch."""
        if chunk or not self._is_ranks_first or not self._is_compared:
            return
        key = _recipe_key()
        if key not in self._known:
            compare_recipes(dist.group.WORLD if self.group is None else self.group)
            self._known.add(key)

    # ---- what is sent

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the sends of a microbatch's activations, as planes.

        Args:
            fwd_chunk_id: the microbatch.

        Raises:
            ValueError: they have other shapes than those of the first one.
        """
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self._check_shapes([tuple(op.tensor.shape) for op in ops], fwd_chunk_id)
        return self._encoded(ops, True)

    def _check_shapes(self, shapes: list[tuple[int, ...]], chunk: int) -> None:
        """Raise unless the next stage receives shapes like these, or it would wait for the rest."""
        if not self._sent:
            self._sent = shapes
        elif shapes != self._sent:
            raise ValueError(
                "pipeline_stage: all microbatches must have one shape, since a stage receives into "
                f"buffers of the first one's, got {shapes} of microbatch {chunk} after "
                f"{self._sent}; give batches of one size that the number of microbatches divides"
            )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the sends of the gradients of a microbatch's activations, as planes.

        Args:
            bwd_chunk_id: the microbatch.
        """
        return self._encoded(super().get_bwd_send_ops(bwd_chunk_id), False)

    def _encoded(self, ops: list[Any], is_forward: bool) -> list[Any]:
        spec = self._formats.spec(is_forward)
        for op in ops:
            if isinstance(op.tensor, DTensor):  # which newer stages take apart before
                raise TypeError(
                    "pipeline_stage: what goes from stage to stage must be plain tensors with "
                    f"torch {torch.__version__}, got a DTensor from stage {self.stage_index}; "
                    "return its to_local() there, or take a newer torch"
                )
            about = None if spec is None else PlanePayload.of(spec, op.tensor)
            if about is not None:
                op.tensor = about.encoded(op.tensor)
        return ops

    # ---- what is received

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the receives of a microbatch's activations, as planes.

        Args:
            fwd_chunk_id: the microbatch.
        """
        self._agree(fwd_chunk_id)
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        return self._awaited(ops, self.args_recv_info[fwd_chunk_id], True, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the receives of the gradients of a microbatch's outputs, as planes.

        Args:
            bwd_chunk_id: the microbatch.
        """
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        infos = self.grad_recv_info[bwd_chunk_id] if ops else ()
        return self._awaited(ops, infos, False, bwd_chunk_id)

    def _awaited(
        self, ops: list[Any], infos: Sequence[Any], is_forward: bool, chunk: int
    ) -> list[Any]:
        spec = self._formats.spec(is_forward)
        found = self._arriving[is_forward, chunk] = []
        for op in ops:
            about = None if spec is None else PlanePayload.of(spec, op.tensor)
            if about is None:
                continue
            info = next(one for one in infos if getattr(one, "buffer", None) is op.tensor)
            op.tensor = about.empty(op.tensor.device)
            found.append(_Arriving(op.tensor, about, info))
        return ops

    def _decode(self, is_forward: bool, chunk: int) -> None:
        """Put what arrived for a microbatch where torch's stage looks for it."""
        for arrived in self._arriving.pop((is_forward, chunk), ()):
            self._put(arrived, is_forward)

    def _put(self, arrived: _Arriving, is_forward: bool) -> None:
        payload, about, info = arrived
        as_plane = is_forward and self._takes_planes and not _is_part(info)
        made = about.quantized(payload) if as_plane else about.decoded(payload)
        # Some versions of torch ask for gradients where they allocate, others where they read.
        info.buffer = made.requires_grad_(info.buffer.requires_grad)

    # ---- what another stage of this rank hands over

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take a microbatch's activations of the stage before this one, on the same rank.

        Args:
            prev_stage_outputs, mb_index: torch's.
        """
        super().set_local_fwd_input(prev_stage_outputs, mb_index)
        self._quantize(self.args_recv_info[mb_index], True)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the gradients of a microbatch from the stage behind this one, on the same rank.

        Args:
            next_stage_bwd_outputs, mb_index: torch's.
        """
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
        self._quantize(self.grad_recv_info[mb_index], False)

    def _quantize(self, infos: Sequence[Any], is_forward: bool) -> None:
        """Make of what was handed over what a receiver would have of it.

        Nothing is sent, but results must not depend on which rank a stage lies on.
        """
        spec = self._formats.spec(is_forward)
        for info in infos:
            if spec is not None and isinstance(info.buffer, torch.Tensor):
                about = PlanePayload.of(spec, info.buffer)
                if about is not None:
                    self._put(_Arriving(about.encoded(info.buffer), about, info), is_forward)

    # ---- a microbatch

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a microbatch; in the first of a step weights are encoded.

        Args:
            fwd_chunk_id: the microbatch.
            args, kwargs: torch's.
        """
        self._agree(fwd_chunk_id)
        self._decode(True, fwd_chunk_id)
        with _microbatch(fwd_chunk_id == 0 if self._keeps else None):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Run the backward of a microbatch, or that of its inputs.

        Args:
            bwd_chunk_id: the microbatch.
            loss, full_backward, last_backward: torch's.
        """
        self._decode(False, bwd_chunk_id)
        is_split = not full_backward and not self.is_first and self.dw_builder is None
        if is_split and self.has_backward and not is_split_right():
            self._run_whole.add(bwd_chunk_id)
            full_backward = True
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """Run the backward of a microbatch's weights, unless that of its inputs was whole.

        Args:
            bwd_chunk_id: the microbatch.
            last_backward: torch's.
        """
        if bwd_chunk_id in self._run_whole:
            self._run_whole.remove(bwd_chunk_id)
            return None
        return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def _recipe_key() -> str:
    """Return the key of the recipe in force; empty: there is none."""
    recipe = settings.current().recipe
    return recipe.key if isinstance(recipe, Recipe) else ""


def _is_part(info: Any) -> bool:
    """Return whether what is received is this rank's part of a DTensor.

    Stages of torch 2.10 keep no metadata of tensors, and send no DTensors.
    """
    return hasattr(getattr(info, "tensor_meta", None), "placements")


def _begins_linear(module: nn.Module) -> bool:
    """Return whether the first that a module does is a product of ours."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return isinstance(module, Linear)


@contextmanager
def _microbatch(is_first: bool | None) -> Iterator[None]:
    """Tell modules whether this is the first microbatch, unless `hybridq.autocast` tells them."""
    state = settings.current()
    told = state.is_first_microbatch
    state.is_first_microbatch = is_first if told is None else told
    try:
        yield
    finally:
        state.is_first_microbatch = told

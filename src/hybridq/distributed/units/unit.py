"""A unit: the prepared parameters that FSDP2 gathers by one collective.

FSDP2 asks each parameter what it gives to the all-gather, in order, and afterwards gives each what
was received, in the same order. What all of them give is worked out when the first is asked, and
made when the last is: one encode of all shards, one sequence of bytes with one trailer. The first
parameter takes it to FSDP2; when it is given what was received, it fills the planes of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import settings
from ..._torch_private import fp32_matmul_precision, graph_task_id
from ...kernels.inputs import can_bypass_dispatcher
from ...nn.delayed_scaling import num_updates
from ..agreement import DIGEST_NBYTES, check_trailers, prepared_groups, trailer
from ..encoding import encode_shards
from ..parameters import GatheredParameter
from .payload_layout import Room
from .plane_fill import UnitFill
from .unit_memory import put_together
from .unit_plan import UnitPlan, room_of
from .unit_send import UnitSend

__all__ = ["Unit", "unit_of"]


class Unit:
    """The prepared parameters that FSDP2 gathers together, in its order.

    Args:
        members: all of them.
    """

    def __init__(self, members: Sequence[GatheredParameter]) -> None:
        self.members = tuple(members)
        #: The names of its parameters, for messages.
        self.name = ", ".join(about.name for about in members)
        self.first = self.members[0]
        #: Whether any of them is an input of a compiled graph.
        self.in_graphs = False
        #: Whether the last gather filled the planes of an earlier one that was alike.
        self.is_refilled = False
        self._recipe: Any = None
        self._last = len(self.members) - 1
        self._room: Room | None = None
        #: By whether a backward runs, the last gather that was steady.
        self._steady: dict[bool, UnitPlan] = {}
        #: Of the gather under way: how, what is sent of it, and who asked already.
        self._plan: UnitPlan | None = None
        self._sent: torch.Tensor | None = None
        self._rest: torch.Tensor | None = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._tensors: tuple[Any, ...] = ()
        self._next = 0
        self._note = 0
        self._mesh: Any = None
        self._group: Any = None
        #: Where FSDP2 has put what it gathered: tensors that it made for the first gather.
        self._outputs: tuple[torch.Tensor, ...] = ()

    def forget(self) -> None:
        """Work the next gathers out anew."""
        self._steady = {}

    # ---- what is sent

    def inputs(self, tensor: Any, mesh: Any, policy: Any) -> tuple[torch.Tensor, ...]:
        """Return what a parameter gives to FSDP2's all-gather.

        Args:
            tensor: its shard, on the device where it is gathered.
            mesh: of one dimension, over which.
            policy: whose `param_dtype` is the dtype that planes are made from.

        Raises:
            RuntimeError: ranks differ, on all of them; or FSDP2 gathers other parameters together.
        """
        about, number = tensor._about, self._next
        if about is self.first:
            number, self._tensors = 0, ()
            self._begin(mesh, policy, tensor.device)
        elif about is not self.members[number]:
            raise RuntimeError(
                f"fsdp2: {self.name} must be gathered together and in this order, as in their "
                f"first gather, got {about.name} in the place of {self.members[number].name}"
            )
        self._tensors += (tensor,)
        if number < self._last:
            self._next = number + 1
        else:
            self._next = 0
            self._send()
        return () if number else self._inputs

    def _begin(self, mesh: Any, policy: Any, device: torch.device) -> None:
        """Work out how the gather that begins is done."""
        if self._mesh is not mesh:
            self._mesh, self._group = mesh, mesh.get_group()
        dtype, is_backward, current = policy.param_dtype, graph_task_id() != -1, settings.current()
        is_recomputing = is_backward and graph_task_id() != current.recipe_task
        state: tuple[Any, ...] = (mesh, device, dtype, current.backend, fp32_matmul_precision())
        state += (torch.is_inference_mode_enabled(),)
        for about in self.members:
            module: Any = about.owner()
            last = module.last_recipe
            recipe = (last[0] if last else None) if is_recomputing else current.recipe
            own = module._parameters[about.attribute].dtype
            state += (recipe, module.training, module.name, own)
            if is_backward and self.in_graphs and about.call is not None:
                state += (about.call.expected.digest,)  # what a graph's backward follows
        self._recipe = current.recipe
        plan = self._steady.get(is_backward)
        if plan is None or plan.state != state:
            plan = self._new_plan(state, dtype, device, is_backward)
            if plan.is_steady:
                self._steady[is_backward] = plan
        for about, call, begun in zip(self.members, plan.calls, plan.begun, strict=True):
            about.call, about.begun, call.age = call, begun, about.age()
            about.inner[:] = ()  # FSDP2 would make room for what is in there before the next use
        self._plan = plan
        if plan.send is None:
            self._sent = torch.empty(plan.num_sent, dtype=torch.uint8, device=device)
            self._inputs, self._rest = plan.room.split(self._sent)
        else:
            self._sent = plan.send.begin()
            self._inputs, self._rest = plan.send.inputs, plan.send.rest
        if self._outputs:
            self._fit_outputs(device)

    def _new_plan(
        self,
        state: tuple[Any, ...],
        dtype: torch.dtype | None,
        device: torch.device,
        is_backward: bool,
    ) -> UnitPlan:
        calls = []
        for about in self.members:
            parameter = about.parameter
            phase = "backward" if is_backward else about.phase()
            own = dtype or parameter.dtype
            shape = about.sharded_shape(parameter)
            calls.append(about.next_call(self._group, shape, own, phase))
        self.in_graphs = any(about.in_graph for about in self.members)
        if self._room is None:
            self._room = room_of(calls, self.in_graphs)
        return UnitPlan(state, self.members, calls, device, self._room)

    def _send(self) -> None:
        """Make what this rank sends; every rank must call it."""
        plan, sent = self._plan, self._sent
        if plan is None or sent is None:
            raise RuntimeError(f"fsdp2: the gather of {self.name} has not begun")
        tensors, self._tensors = self._tensors, ()
        for about, tensor, one in zip(self.members, tensors, plan.plans, strict=True):
            if about.shard is None or about.shard() is not tensor:
                about.take_shard(tensor)
            about.nbytes += one.payload * plan.calls[0].world
        self._note = 0
        if plan.send is None or not self._send_at_once(plan, plan.send, tensors):
            self._send_each(plan, tensors, sent)
        if self._rest is not None:
            self._rest = self.members[0].all_of(self._rest)

    def _send_at_once(self, plan: UnitPlan, send: UnitSend, tensors: Sequence[Any]) -> bool:
        """Write what is sent past the dispatcher; return False where anything is to be asked."""
        if not can_bypass_dispatcher():
            return False
        for about in plan.watched:
            if about.module.scale_changes(about.part, True) < 0:
                return False
        return send.run(tensors)

    def _send_each(self, plan: UnitPlan, tensors: Sequence[Any], sent: torch.Tensor) -> None:
        members = self.members
        for about, one in zip(members, plan.plans, strict=True):
            self._note |= about.note(one)
        if self._note:  # planes cannot be made before all ranks know of that
            parts = [sent.new_zeros(plan.payload)]
        else:
            parts = _encoded(members, plan.plans, tensors)
        parts.append(trailer(plan.digest, sent.device, self._note))
        if plan.padding:
            parts.append(sent.new_zeros(plan.padding))
        torch.cat(parts, out=sent)

    def _fit_outputs(self, device: torch.device) -> None:
        """Give FSDP2's tensor room for a gather of another size than the first one had.

        Raises:
            RuntimeError: it was made in inference mode.
        """
        plan = self._plan
        if plan is None or plan.room.dtypes:
            return  # as large as ever
        output, size = self._outputs[0], plan.num_sent * plan.calls[0].world
        if output.shape[0] == size:
            return
        if output.is_inference():  # known by views only, which do not lead to it
            raise RuntimeError(
                f"fsdp2: {self.name} was gathered in inference mode first, and FSDP2 keeps the "
                f"tensors that it made there; a gather of {size} bytes does not fit into "
                f"{output.numel()}; run the first forward under torch.no_grad() instead"
            )
        memory = output.untyped_storage()
        output.set_(memory, 0, (size,), (1,))
        memory.resize_(0)  # FSDP2 makes room when it needs it

    # ---- what is received

    def receive(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take what was received for all parameters: what FSDP2 gives to the first of them.

        Args:
            outputs: of the all-gather.

        Raises:
            RuntimeError: ranks differ, on all of them; or not all parameters were asked.
        """
        plan = self._plan
        if plan is None or self._sent is None or self._next:
            raise RuntimeError(
                f"fsdp2: {self.name} must be gathered together, got a gather of some of them"
            )
        self._outputs = ()
        for one in outputs:
            self._outputs += (one if one._base is None else one._base,)
        rest, world = self._rest, plan.calls[0].world
        if plan.send is not None:
            plan.send.free()
        self._sent = self._rest = None
        self._inputs = ()
        parts: list[torch.Tensor] = []
        for one in self._outputs:
            parts += (one.view(torch.uint8).view(world, -1),)
        if rest is not None:
            parts += (rest,)
            if rest.is_cuda:  # gathered on FSDP2's stream
                rest.record_stream(torch.cuda.current_stream())
        fill = plan.fill
        if fill is not None and fill.takes(parts):
            whole = fill.joined(parts)
        else:
            fill, whole = None, parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        end = plan.payload
        trailers = whole[:, end : end + DIGEST_NBYTES]
        name, own = self.name, self._note if trailers.is_cuda else 0
        note = check_trailers(trailers, plan.digest, plan.agreed, name, self._group, own)
        is_late = plan.is_delayed and plan.calls[0].age[0] != num_updates()
        # A graph says nothing when it computes: what is in force where its planes arrive counts.
        is_late |= self.in_graphs and settings.current().recipe is not self._recipe
        self.is_refilled = False
        if note or is_late or not plan.is_steady:
            self._settle(plan, whole, note)
            put_together(self.members)
        elif fill is None:
            for number, member in enumerate(self.members):
                member.hold(plan.plans[number], plan.payloads(whole, number))
            put_together(self.members)
            plan.fill = UnitFill.of(self.members, plan.plans, parts, plan.payloads)
        else:
            fill.run()
            fill.free()
            self.is_refilled = True
            return
        for member in self.members:
            # FSDP2 would give what is listed before a parameter's own turn another size.
            member.filled, member.inner[:] = list(member.inner), ()
        if fill is not None:
            fill.free()

    def _settle(self, plan: UnitPlan, whole: torch.Tensor, note: int) -> None:
        """Take what all ranks computed now as agreed, parameter by parameter."""
        for number, about in enumerate(self.members):
            payloads = plan.payloads(whole, number)
            about.hold(*about.settle(plan.plans[number], payloads, note))


def _encoded(
    members: Sequence[GatheredParameter], plans: Sequence[Any], tensors: Sequence[Any]
) -> list[torch.Tensor]:
    """Return the payloads of all parameters, in pieces; every rank must call it."""
    works = [about.work_now(*one) for about, *one in zip(members, plans, tensors, strict=True)]
    for about, work in zip(members, works, strict=True):
        if work is not None and work.lacks_maxima:
            beside = about.works_beside(work.device)
            encode_shards(beside, about.last_call().group, only_maxima=True)
    encode_shards([work for work in works if work is not None], members[0].last_call().group)
    parts: list[torch.Tensor] = []
    for about, plan, work, tensor in zip(members, plans, works, tensors, strict=True):
        parts += [about.payload_of(plan, tensor)] if work is None else work.parts()
    return parts


def unit_of(about: GatheredParameter, mesh: Any) -> Unit:
    """Return the unit of a parameter, before its first gather; its members know it then.

    Where it is not found, a parameter is a unit by itself; so it is where no other rank has a
    shard: there FSDP2 wants what it receives at once.

    Args:
        about: the parameter.
        mesh: over which it is gathered.
    """
    members = [about]
    if mesh.size() > 1 and about.model is not None:
        for some in prepared_groups(about.model):
            if any(one is about for one in some):
                members = some
    unit = Unit(members)
    for one in members:
        one.unit = unit
    return unit

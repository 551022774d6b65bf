"""`pipeline_stage`: a stage of torch's pipelines whose activations travel as planes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..collectives import formats_of_directions
from .wire_formats import BY_RECIPE, Formats

__all__ = ["formats_of", "pipeline_stage"]


def pipeline_stage(
    module: nn.Module,
    stage_index: int,
    num_stages: int,
    device: torch.device | str,
    *,
    group: Any = None,
    communication: str | Sequence[str | None] | None = None,
    replicas: Any = None,
    **options: Any,
) -> Any:
    """Return `torch.distributed.pipelining.PipelineStage(module, ...)`, and what planes need of it.

    It goes into any schedule of torch. Beside torch's stage it

    - sends activations and their gradients as rowwise planes, one tensor of bytes each, instead of
      as values; the receiver decodes them, or hands them to the module where its first linear
      module can take them;
    - keeps quantized weights over the microbatches of a step: each is encoded in the first one;
    - has delayed scaling reduce amaxes over the ranks of the same stage, and lets torch's run with
      made-up inputs, which finds shapes in the first step, record none;
    - compares ranks before the first microbatch.

    A tensor that goes from a stage to the next one on the same rank (V schedules) is not sent, but
    encoded and decoded alike: results do not depend on the schedule.

    Args:
        module: of the stage; after `hybridq.convert`, `prepare_fsdp2` and `fully_shard`.
        stage_index, num_stages: as torch takes them.
        device: that the stage runs on.
        group: process group of the pipeline; None: all ranks.
        communication: a format's name, or one of a PlaneSpec, for what travels in both directions;
            a pair: for activations, and for gradients, either of which may be None; `"recipe"`: the
            rowwise formats of the input and of the output gradient of an unnamed `hybridq.Linear`
            under the recipe in force; None: values.
        replicas: the ranks that hold the same stage: a process group or a 1-D DeviceMesh. Delayed
            scaling reduces over them. None: this rank alone where the pipeline spans all ranks,
            else unknown.
        options: `keep_weights` (True): see above. `takes_planes` (None): whether the module's
            inputs are QuantizedTensors; None: where the module is a `hybridq.Linear`, or an
            `nn.Sequential` that begins with one. All others are torch's own, such as `input_args`,
            `output_args` and `dw_builder`.

    Returns:
        A stage, an instance of torch's `PipelineStage`.

    Raises:
        TypeError: `module` is no module, or `replicas` no group.
        SpecError: an unknown format, or one that the receiver could not decode.
        RuntimeError: in the first microbatch, on every rank: ranks differ in their stages' options,
            recipe or versions; or the ranks to reduce amaxes over are not known.

    Source: ours; schedules are torch's.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from torch.distributed.pipelining import ScheduleGPipe
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> module = hybridq.Linear(32, 32)
        >>> stage = hybridq.distributed.pipeline_stage(module, 0, 1, "cpu", communication="mxfp8")
        >>> schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = schedule.step(torch.ones(4, 32), target=torch.zeros(4, 32))
        >>> y.shape, module.weight.grad.shape
        (torch.Size([4, 32]), torch.Size([32, 32]))
        >>> dist.destroy_process_group()
    """
    from .stage import Stage  # torch.distributed.pipelining takes a while to import

    given: object = module
    if not isinstance(given, nn.Module):
        raise TypeError(f"pipeline_stage: module must be an nn.Module, got {type(given).__name__}")
    formats = formats_of(communication)
    own = {key: options.pop(key) for key in ("keep_weights", "takes_planes") if key in options}
    for name, value in own.items():
        if not isinstance(value, bool) and not (value is None and name == "takes_planes"):
            raise TypeError(f"pipeline_stage: {name} must be a bool, got {type(value).__name__}")
    stage = Stage(module, stage_index, num_stages, torch.device(device), group=group, **options)
    stage.take(formats, _group_of(replicas), **own)
    return stage


def formats_of(communication: object, where: str = "pipeline_stage") -> Formats:
    """Return the formats of both directions.

    Args:
        communication: as `pipeline_stage` takes it.
        where: the function in whose name an error is raised.

    Raises:
        TypeError: it is nothing of the kind.
        SpecError: an unknown format.
    """
    return Formats(*formats_of_directions(where, communication, (BY_RECIPE,)))


def _group_of(replicas: Any) -> Any:
    """Return the process group of `replicas`, or None."""
    if replicas is None:
        return None
    if hasattr(replicas, "get_group"):
        if replicas.ndim != 1:
            raise TypeError(
                f"pipeline_stage: replicas must be a mesh of one dimension, got {replicas.ndim}; "
                "give mesh['dp'], or several dimensions as one (_flatten)"
            )
        return replicas.get_group()
    if not hasattr(replicas, "group_name"):
        got = type(replicas).__name__
        raise TypeError(f"pipeline_stage: replicas must be a process group or a mesh, got {got}")
    return replicas

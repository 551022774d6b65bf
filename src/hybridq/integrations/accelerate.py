"""Hugging Face accelerate: a loop of one's own under a recipe, on one process or sharded.

accelerate's `mixed_precision` and its handlers are closed lists, so `prepare` here stands in place
of `accelerator.prepare`. See docs/guides/hugging-face.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from . import require

require("accelerate")

from accelerate import Accelerator  # noqa: E402 (after the check of the version)
from accelerate.utils import save  # noqa: E402

from ..converters import warn_of_unfollowed  # noqa: E402
from ..distributed import ScalingHistory  # noqa: E402
from ..recipes import RecipeSchedule  # noqa: E402
from ..recipes.named import source  # noqa: E402
from ..recipes.recipe import RecipeSource  # noqa: E402
from ..tensor import is_quantized  # noqa: E402
from .forward import check_converted, run_under  # noqa: E402
from .sharding import prepare_for_sharding, reason_against  # noqa: E402

__all__ = ["prepare"]

#: Of an accelerator whose states have files of quantized weights.
_SAVES: Final = "_hybridq_saves"


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    recipe: RecipeSource | str,
    evaluation: bool = False,
    **options: Any,
) -> Any:
    """Return what `accelerator.prepare(*objects)` does, with the models' forwards under a recipe.

    Under FSDP2 the weights of hybridq's modules are prepared to travel as planes
    (`hybridq.distributed.prepare_fsdp2`).
    `accelerator.save_state` and `load_state` keep histories of delayed scaling, and a schedule,
    which counts the steps of the first optimizer. Weights of models with quantized parameters are
    `hybridq_model_0.bin` and so on there, by the model's number, written by `torch.save`.

    Args:
        accelerator: an Accelerator.
        objects: models, optimizers, loaders, schedulers, as it takes them.
        recipe: a recipe, the name of one, or a RecipeSchedule.
        evaluation: under the recipe in evaluation mode too; else only where `model.training`.
        options: of `accelerator.prepare`.

    Raises:
        TypeError, ValueError: as `hybridq.autocast`; there is no model, or one without modules of
            hybridq; under FSDP2 the plugin loads on rank 0 alone.

    Example:
        >>> import torch, hybridq
        >>> from accelerate import Accelerator
        >>> from hybridq.integrations.accelerate import prepare
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> accelerator = Accelerator(cpu=True)
        >>> model, optimizer = prepare(accelerator, model, optimizer, recipe="mxfp8")
        >>> accelerator.backward(model(torch.ones(4, 32)).sum())
    """
    chosen = source(recipe)
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    if not models:
        raise ValueError("prepare: needs a model among what it is given, got none")
    for model in models:
        check_converted(model, "prepare")
    if accelerator.is_fsdp2:
        why = reason_against(accelerator.state)
        if why is not None:
            raise ValueError(
                f"prepare: under FSDP2 all ranks must have the weights, got a plugin by which {why}"
            )
        for model in models:
            prepare_for_sharding(model, accelerator.state)
    made = accelerator.prepare(*objects, **options)
    warn_of_unfollowed("prepare", chosen, *models)
    for model in models:
        run_under(model, chosen, evaluation)
        accelerator.register_for_checkpointing(ScalingHistory(model))
    if not hasattr(accelerator, _SAVES):
        _save_quantized(accelerator)
    if isinstance(chosen, RecipeSchedule):
        accelerator.register_for_checkpointing(chosen)
        if optimizers:
            optimizers[0].register_step_post_hook(lambda *_: chosen.step())
    return made


def _save_quantized(accelerator: Accelerator) -> None:
    """Let states of an accelerator have quantized parameters, which safetensors cannot write.

    What is saved or loaded here is taken out of the lists, as accelerate has it of such hooks.

    Args:
        accelerator: of which it was not called yet.
    """

    def before_saving(models: list[Any], weights: list[Any], folder: str) -> None:
        on_each = accelerator.project_configuration.save_on_each_node
        writes = accelerator.is_local_main_process if on_each else accelerator.is_main_process
        for file in Path(folder).glob(_file(folder, "*").name) if writes else ():
            file.unlink()  # of a state before
        for number, state in reversed([*enumerate(weights)]):
            if any(map(is_quantized, state.values())):
                save(state, _file(folder, number), on_each, safe_serialization=False)
                del weights[number]

    def before_loading(models: list[Any], folder: str) -> None:
        for number, model in reversed([*enumerate(models)]):
            file = _file(folder, number)
            if file.exists():
                model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
                del models[number]

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)
    setattr(accelerator, _SAVES, True)


def _file(folder: str, number: int | str) -> Path:
    return Path(folder) / f"hybridq_model_{number}.bin"

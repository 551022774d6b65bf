"""One recipe's training run: same seed, same batches, same schedule, whatever the recipe."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..converters import convert
from ..errors import must_be_one_of
from ..nn import Linear, state_dict_with_history
from ..recipes import autocast, get
from ..report import summary
from .data import Corpus, training_batches, validation_batches
from .measure import activation_nbytes, weight_nbytes
from .model import OWN, ModelConfig
from .variants import PLAIN, VARIANTS, build_model

BASELINE = "bf16"
"""The recipe without quantization, which the others are compared with."""

COUNTED_STEP = 1
"""The step whose collectives are counted, if there are several: like it are all later ones."""

_TIMED_STEPS = 2
"""Steps that an estimate is made of, after one that is not timed."""

_WARMUP_STEPS_OF_TIMER = 2
"""First steps that the speed leaves out: allocations and compilation, not training."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on, apart from the data and the recipe.

    Args:
        model: sizes of the model; its ``sequence`` is the length of every sample.
        batch: samples per step.
        steps: optimizer steps.
        lr: peak learning rate of AdamW.
        weight_decay: on matrices only.
        warmup_fraction: share of the steps in which the rate rises; a cosine to zero follows.
        clip: largest norm of the gradient.
        eval_batches: validation batches, of ``batch`` samples each.
        eval_points: how often to evaluate in a run, the end included.
        seed: of the weights, the batches and stochastic rounding; of 64 bits.
        device: ``"cpu"``, ``"cuda"``, ...
        compile: train through ``torch.compile``.
        modules: a name in ``VARIANTS``: which modules the model is made of.

    Raises:
        ValueError: a count is below 1, a rate is not positive, a seed is too large, or ``modules``
            is unknown.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 8
    steps: int = 200
    lr: float = 1.5e-3
    weight_decay: float = 0.1
    warmup_fraction: float = 0.1
    clip: float = 1.0
    eval_batches: int = 8
    eval_points: int = 5
    seed: int = 0
    device: str = "cpu"
    compile: bool = False
    modules: str = PLAIN

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "eval_batches", "eval_points"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"TrainConfig: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.modules not in VARIANTS:
            raise ValueError(f"TrainConfig: modules {must_be_one_of(VARIANTS, self.modules)}")
        if self.modules != PLAIN and self.model.family != OWN:
            raise ValueError(
                f"TrainConfig: modules must be {PLAIN!r} with a model of transformers, got "
                f"{self.modules!r}"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"TrainConfig: seed must be of 64 bits, got {self.seed}")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"TrainConfig: {name} must be positive, got {value}")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(
                f"TrainConfig: warmup_fraction must be in 0..1, got {self.warmup_fraction}"
            )

    def lr_at(self, step: int) -> float:
        """Learning rate of ``step`` (from 0): linear warm-up, then a cosine to zero."""
        warmup = max(1, round(self.warmup_fraction * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup)))

    def is_eval_step(self, done: int) -> bool:
        """Whether to evaluate after ``done`` steps: evenly spread, always at the end."""
        points = min(self.eval_points, self.steps)
        return done * points // self.steps > (done - 1) * points // self.steps


@dataclass(frozen=True)
class Progress:
    """What happened in one step; losses in nats per byte."""

    step: int
    loss: float
    validation_loss: float | None
    tokens_per_second: float | None


@dataclass
class RecipeResult:
    """What is known of one recipe's run, filled in as it goes.

    Args:
        recipe: its name.
        status: ``"running"``, ``"finished"``, ``"interrupted"``, ``"failed"`` or ``"diverged"``.
        validation_loss: nats per byte after the last step; None before that.
        train_curve, validation_curve: (steps done, nats per byte).
        tokens_per_second: training only, without evaluation and the first steps.
        seconds: wall time of the whole run.
        weight_nbytes, activation_nbytes: see ``measure``.
        quantized_share: of the operations of a forward's linear layers, head and routers included.
    """

    recipe: str
    status: str = "running"
    validation_loss: float | None = None
    train_curve: list[tuple[int, float]] = field(default_factory=list)
    validation_curve: list[tuple[int, float]] = field(default_factory=list)
    tokens_per_second: float | None = None
    seconds: float = 0.0
    weight_nbytes: int = 0
    activation_nbytes: int = 0
    quantized_share: float = 0.0


class Run:
    """One training run. Iterate over ``steps()``; ``result`` is up to date at any moment.

    Args:
        config: sizes and schedule.
        recipe: a name known to ``hybridq.recipes.get``, or ``"bf16"``.
        corpus: the data.
        linear: class of the projections (default: ``hybridq.Linear``).
        result: filled in as the run goes on (default: a new one).

    Raises:
        ValueError: unknown recipe.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: str,
        corpus: Corpus,
        linear: type[nn.Linear] | None = None,
        result: RecipeResult | None = None,
    ) -> None:
        self.config, self.recipe, self.corpus = config, recipe, corpus
        self.result = RecipeResult(recipe) if result is None else result
        self._recipe = None if recipe == BASELINE else get(recipe)
        # Weights are drawn on the CPU, so that they do not depend on the device.
        torch.manual_seed(config.seed)
        model = build_model(config.model, Linear if linear is None else linear, config.modules)
        # For the modules' qualified names, which recipes may ask for.
        self.model: nn.Module = convert(model).to(config.device)
        self._optimizer: torch.optim.Optimizer | None = None
        self._state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands between two steps: what `torch.save` writes of it.

        It has copies of nothing: save it before the next step.
        """
        if self._optimizer is None:
            raise RuntimeError("Run.state_dict: needs a step that was taken")
        device = torch.device(self.config.device)
        return {
            "done": len(self.result.train_curve),
            "model": state_dict_with_history(self.model),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "random_device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "result": asdict(self.result),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let `steps` go on where the run of the same configuration stood that `state` is of."""
        self.model.load_state_dict(state["model"])
        for name, value in state["result"].items():
            setattr(self.result, name, value)
        self._state = state

    def steps(self) -> Iterator[Progress]:
        """Train; one ``Progress`` per step.

        A loss that is not finite ends the run with status ``"diverged"``.
        """
        config, result, state = self.config, self.result, self._state
        started = time.perf_counter() - result.seconds
        if state is None:
            self._measure()
        self._optimizer = optimizer = make_optimizer(self.model, config)
        held_out = [
            (x.to(config.device), y.to(config.device))
            for x, y in validation_batches(
                self.corpus, config.batch, config.model.sequence, config.eval_batches
            )
        ]
        model: Any = torch.compile(self.model) if config.compile else self.model
        # Measuring may have drawn random numbers; stochastic rounding starts from the seed.
        torch.manual_seed(config.seed)
        done = 0
        if state is not None:
            done = state["done"]
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            if state["random_device"] is not None:
                torch.cuda.set_rng_state(state["random_device"], config.device)
        training_seconds, timed_tokens = 0.0, 0
        batches = training_batches(
            self.corpus, config.batch, config.model.sequence, config.steps, config.seed
        )
        for step, (x, y) in itertools.islice(enumerate(batches), done, None):
            step_started = time.perf_counter()
            loss = self._step(model, optimizer, step, x.to(config.device), y.to(config.device))
            if step >= min(done + _WARMUP_STEPS_OF_TIMER, config.steps - 1):
                training_seconds += time.perf_counter() - step_started
                timed_tokens += y.numel()
                result.tokens_per_second = timed_tokens / training_seconds
            result.train_curve.append((step + 1, loss))
            validation_loss = None
            if not math.isfinite(loss):
                result.status = "diverged"
            elif config.is_eval_step(step + 1):
                validation_loss = self._evaluate(model, held_out)
                result.validation_curve.append((step + 1, validation_loss))
                if not math.isfinite(validation_loss):
                    result.status = "diverged"
            result.seconds = time.perf_counter() - started
            if result.status == "running" and step + 1 == config.steps:
                result.status, result.validation_loss = "finished", validation_loss
            yield Progress(step + 1, loss, validation_loss, result.tokens_per_second)
            if result.status == "diverged":
                return

    def estimate(self) -> float:
        """Return about how many seconds ``steps()`` takes, by two timed steps and one evaluation.

        The run is over then: its parameters have moved.
        """
        config = self.config
        optimizer = make_optimizer(self.model, config)
        count = 1 + _TIMED_STEPS
        batches = training_batches(
            self.corpus, config.batch, config.model.sequence, count, config.seed
        )
        seconds = []
        for step, (x, y) in enumerate(batches):
            x, y = x.to(config.device), y.to(config.device)
            started = time.perf_counter()
            self._step(self.model, optimizer, min(step, config.steps - 1), x, y)
            seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        self._evaluate(self.model, [(x, y)])
        one_evaluation = time.perf_counter() - started
        one_step = sum(seconds[1:]) / _TIMED_STEPS
        points = min(config.eval_points, config.steps)
        # Measuring what a step holds takes a forward of one batch, and of two.
        others = points * config.eval_batches + 3
        return config.steps * one_step + others * one_evaluation

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss in nats per byte of ``x``, ``y [batch, sequence]``, under the recipe."""
        device_type = torch.device(self.config.device).type
        with torch.autocast(device_type, torch.bfloat16), self._quantization():
            logits = model(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def _quantization(self) -> contextlib.AbstractContextManager[object]:
        if self._recipe is None:
            return contextlib.nullcontext()
        return autocast(enabled=True, recipe=self._recipe)

    def _step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, x: Tensor, y: Tensor
    ) -> float:
        for group in optimizer.param_groups:
            group["lr"] = self.config.lr_at(step)
        loss = self.loss(model, x, y)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, held_out: list[tuple[Tensor, Tensor]]) -> float:
        # No eval mode: nothing in the model depends on it, and a compiled model would be
        # compiled again.
        return sum(self.loss(model, x, y).item() for x, y in held_out) / len(held_out)

    def _measure(self) -> None:
        config = self.config
        tokens = torch.zeros(2 * config.batch, config.model.sequence, dtype=torch.int64)
        tokens = tokens.to(config.device)

        def forward(count: int) -> Tensor:
            # A tensor of its own: a slice would count with the storage of the larger one.
            x = tokens[:count].clone()
            return self.loss(self.model, x, x)

        self.result.activation_nbytes = activation_nbytes(
            forward, config.batch, self.model.parameters()
        )
        self.result.weight_nbytes = weight_nbytes(self.model, self.recipe)
        if self._recipe is not None:
            sample = torch.zeros(1, config.model.sequence, dtype=torch.int64, device=config.device)
            found = summary(self.model, self._recipe, sample)
            self.result.quantized_share = found.share_of_linear_flops


def make_optimizer(
    model: nn.Module, config: TrainConfig, fused: bool = True
) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only.

    Args:
        model: whose parameters.
        config: the rates.
        fused: one pass over the values; their bits then depend on where they lie in memory.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)

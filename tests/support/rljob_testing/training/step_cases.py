"""One training step on fixed rollouts, computed in one way or another, and what a rank saw of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import pytest
import torch

from rljob_testing.training import replays
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train import attention, attention_kernels, token_logprobs
from rljob_trainer.engines.train.attention_kernels import Kernel, attend
from rljob_trainer.observability.spans import SPANS, Span


class Layout(Enum):
    """How rows are laid out in a pass."""

    FLAT = auto()
    """As the engine chooses: short rows in one call of attention."""
    PER_ROW = auto()
    """Flat, and attention row by row."""
    PADDED = auto()
    """As for a model that flat rows do not serve."""


@dataclass(frozen=True)
class Case:
    """A way to compute a step."""

    replay: replays.Replay
    num_ranks: int = 1
    layout: Layout = Layout.FLAT
    in_tiles: bool = False
    """Log-probabilities as with a vocabulary that is too large for whole logits."""
    step: int = 0
    """The steps before are made in the same way."""


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a step."""

    gradients: list[dict[str, torch.Tensor]]
    """Of each update, whole."""
    metrics: dict[str, float]
    kernels: set[Kernel]
    earlier: tuple[dict[str, float], ...] = ()
    """Metrics of the steps before."""
    spans: tuple[str, ...] = ()
    """Names of what was done in the step, in the order of the ends."""


def one_step(case: Case, context: WorkerContext) -> Outcome:
    """Collective. The case's step, and those before it."""
    kernels: set[Kernel] = set()

    def noted(kernel: Kernel, *tensors_and_more: object) -> torch.Tensor:
        kernels.add(kernel)
        return attend(kernel, *tensors_and_more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        if case.layout is Layout.PADDED:
            patch.setattr(attention, "SERVED_LAYER_TYPES", frozenset())
        if case.layout is Layout.PER_ROW:
            patch.setattr(attention_kernels, "MAX_WASTED_PRODUCTS", -1)
        if case.in_tiles:
            patch.setattr(token_logprobs, "WHOLE_BYTES", 0)
            patch.setattr(token_logprobs, "CPU_CHUNK_BYTES", 1024)
        run = replays.replayed_run(case.replay, context)
        earlier = run.steps(0, case.step)
        patch.setattr(attention, "attend", noted)
        with replays.kept_gradients(run.actor.engine) as gradients:
            SPANS.take()
            metrics = run.step(case.step)
    spans = tuple(each.name for each in SPANS.take() if isinstance(each, Span))
    return Outcome(gradients, metrics, kernels, tuple(earlier), spans)

"""One training step on fixed rollouts, computed in one of several equivalent ways, and the results of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import pytest
import torch

from rljob_testing.training import recorders, replays
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train import attention, attention_kernels, token_logprobs
from rljob_trainer.engines.train.attention_kernels import Kernel, attend
from rljob_trainer.observability.spans import SPANS, Span


class Layout(Enum):
    """How rows are laid out in a forward pass."""

    FLAT = auto()
    """The engine's default: several short rows in one attention call."""
    PER_ROW = auto()
    """Flat rows, with one attention call per row."""
    PADDED = auto()
    """Padded rows, as for a model that does not support flat rows."""


@dataclass(frozen=True)
class Case:
    """A way to compute a step."""

    replay: replays.Replay
    num_ranks: int = 1
    layout: Layout = Layout.FLAT
    in_tiles: bool = False
    """Log-probabilities in tiles, as for a vocabulary whose logits are too large."""
    step: int = 0
    """Number of the step. The steps before it are computed in the same way."""


@dataclass(frozen=True)
class Outcome:
    """The results of a step on one rank."""

    gradients: list[dict[str, torch.Tensor]]
    """Whole gradients of each update."""
    metrics: dict[str, float]
    kernels: set[Kernel]
    earlier: tuple[dict[str, float], ...] = ()
    """Metrics of the steps before."""
    spans: tuple[str, ...] = ()
    """Names of the recorded spans of the step, ordered by their ends."""


def one_step(case: Case, context: WorkerContext) -> Outcome:
    """Runs the case's step after the steps before it. Collective."""
    kernels: set[Kernel] = set()

    def noted(kernel: Kernel, *tensors_and_more: object) -> torch.Tensor:
        kernels.add(kernel)
        return attend(kernel, *tensors_and_more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        if case.layout is Layout.PADDED:
            patch.setattr(attention, "SUPPORTED_LAYER_TYPES", frozenset())
        if case.layout is Layout.PER_ROW:
            patch.setattr(attention_kernels, "MAX_WASTED_PRODUCTS", -1)
        if case.in_tiles:
            patch.setattr(token_logprobs, "WHOLE_BYTES", 0)
            patch.setattr(token_logprobs, "CPU_TILE_BYTES", 1024)
        run = replays.replayed_run(case.replay, context)
        earlier = run.steps(0, case.step)
        patch.setattr(attention, "attend", noted)
        with recorders.recorded_gradients(run.actor.engine) as gradients:
            SPANS.take()
            metrics = run.step(case.step)
    spans = tuple(each.name for each in SPANS.take() if isinstance(each, Span))
    return Outcome(gradients, metrics, kernels, tuple(earlier), spans)

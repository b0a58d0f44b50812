"""What is trained and how. This is the trainer's whole configuration; there is no second configuration language."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Count, PositiveCount
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.critic import Critic
from rljob_api.v1alpha1.dataset import Dataset
from rljob_api.v1alpha1.evaluation import Evaluation
from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.reward import Reward
from rljob_api.v1alpha1.rollout import Rollout


class Logger(StrEnum):
    """Sinks for metrics. JSON Lines are always written."""

    CONSOLE = "Console"
    TENSORBOARD = "TensorBoard"


class Training(WireModel):
    """One reinforcement-learning run."""

    model: Model
    dataset: Dataset
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1, max_length=16)]
    """What a response is worth: the sum of weight x score."""
    algorithm: Algorithm = Field(default_factory=Algorithm)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    critic: Critic | None = None
    """Only for an algorithm with a critic, which has one with every default when this is unset."""
    rollout: Rollout = Field(default_factory=Rollout)
    evaluation: Evaluation | None = None
    loggers: Annotated[tuple[Logger, ...], Field(max_length=8)] = (Logger.CONSOLE, Logger.TENSORBOARD)
    steps: PositiveCount
    """Training steps in all; a resumed run does the rest of them."""
    batch_size: PositiveCount = 64
    """Prompts per step, over all workers; batchSize x rollout.groupSize responses are trained on, an equal number by
    every GPU of the pool (by every group of roles.actor.sequenceParallel of them)."""
    mini_batch_size: PositiveCount | None = None
    """Prompts per optimizer update, over all workers; batchSize when unset (strictly on-policy)."""
    num_epochs_per_batch: PositiveCount = 1
    """Passes over each batch."""
    max_tokens_per_micro_batch: PositiveCount = 16384
    """Tokens in one forward and backward pass of one worker; padding counts only for a model that needs its rows
    padded. Workers that share rows (sequenceParallel) pass so many times as many together. A memory limit: results do
    not depend on it."""
    seed: Count = 0
    timeline_steps: Annotated[tuple[PositiveCount, ...], Field(max_length=16)] = ()
    """Steps (from 1) of which a timeline is written: the controller's phases and what every worker process did, in
    timelines/ of the run folder, for Perfetto or chrome://tracing. The first step is rarely like the others."""

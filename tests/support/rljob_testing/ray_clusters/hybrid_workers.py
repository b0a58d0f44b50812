"""Hybrid workers for use instead of `make_hybrid`. One prints the weights with which it generates and can skip weight
syncs; the other stores each column as a separate object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from vllm.config import CompilationMode

from rljob_trainer.controller import model_roles
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.rollout.base import GenerationRequest, SamplingSettings
from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.groups import object_store
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.factories import ACTOR, ROLLOUT, make_hybrid, train_engines
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

NEVER = 10**9


def watched_hybrid(
    stale_from: int, dtype: torch.dtype, seed: int, context: WorkerContext, others: Mapping[str, Worker]
) -> Worker:
    """Use instead of `make_hybrid`. From policy version `stale_from` on, the rollout engine gets no new weights."""
    actor, rollout = others[ACTOR], others[ROLLOUT]
    assert isinstance(actor, ActorWorker)
    assert isinstance(rollout, RolloutWorker)
    return WatchedHybrid(stale_from, context, actor, rollout, dtype, seed, train_engines(others))


class WatchedHybrid(HybridWorker):
    """Prints `weights <version> <digest>` into the worker's log at each rollout, and at the first rollout `texts
    <JSON>` (see `texts_of`) and `compiles <bool>`."""

    def __init__(
        self,
        stale_from: int,
        context: WorkerContext,
        actor: ActorWorker,
        rollout: RolloutWorker,
        dtype: torch.dtype,
        seed: int,
        others: Iterable[TrainEngine],
    ) -> None:
        super().__init__(context, actor, rollout, dtype, seed, others)
        self.stale_from = stale_from

    def rollout_mode(self, *, syncs: bool = True) -> None:
        """See HybridWorker.rollout_mode."""
        if self.actor.policy_version >= self.stale_from:
            self.synced_weights = self.actor.engine.weight_version
        super().rollout_mode(syncs=syncs)
        engine = self.rollout.engine
        assert isinstance(engine, VllmEngine)
        [digest] = engine.engine.apply_model(digest_of)
        print(f"weights {self.actor.policy_version} {digest}", flush=True)
        if self.actor.policy_version == 0:
            print(f"texts {json.dumps(texts_of(engine))}", flush=True)
            print(f"compiles {is_compiled(engine)}", flush=True)


def texts_of(engine: VllmEngine) -> list[str]:
    """The same response three times: without a stop string, with one that does not occur, and with one of its
    characters as stop string."""
    sampling = SamplingSettings(1.0, 1.0, 0, 12, ())

    def text(*stop: str) -> str:
        [sequence] = engine.generate([GenerationRequest("text", (5, 6, 7), replace(sampling, stop=stop), 3)]).values()
        return sequence.text

    whole = text()
    return [whole, text("\0"), text(whole[len(whole) // 2])]


def is_compiled(engine: VllmEngine) -> bool:
    """Whether the model's forward pass is compiled by torch."""
    mode = engine.engine.vllm_config.compilation_config.mode
    return mode != CompilationMode.NONE and bool(counters["stats"]["unique_graphs"])


def digest_of(model: torch.nn.Module) -> str:
    """A digest of all parameters and their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


ANY_COLUMN = 1
"""Minimum size in bytes of a column that is stored separately: every column."""


def hybrid_of_separate_columns(
    dtype: torch.dtype, seed: int, context: WorkerContext, others: Mapping[str, Worker]
) -> Worker:
    """Use instead of `make_hybrid`, in a process with all roles: each column of its results is a separate object."""
    object_store.LARGE_COLUMN_BYTES = ANY_COLUMN
    return make_hybrid(dtype, seed, context, others)


@contextmanager
def separate_columns() -> Iterator[None]:
    """Makes the controller and workers of this process store each column separately."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store, "LARGE_COLUMN_BYTES", ANY_COLUMN)
        patch.setattr(model_roles, "make_hybrid", hybrid_of_separate_columns)
        yield

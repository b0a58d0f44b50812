"""Rollout engines whose responses are ready as soon as they are requested."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.workers.columns import SAMPLE_IDS


class FinishedRollouts(ABC):
    """The methods of HybridGroup."""

    def __init__(self) -> None:
        self.ready: list[DataProto] = []
        """Responses that were not taken yet."""

    @abstractmethod
    def generate(self, batch: DataProto, sampling: SamplingSettings) -> DataProto:
        """Returns the columns of a rollout, one row per row of the batch."""

    def begin_rollout(self, syncs: bool) -> list[None]:
        """See HybridGroup."""
        assert syncs
        return [None]

    def submit(self, batch: list[DataProto], sampling: SamplingSettings) -> DataProto:
        """See HybridGroup."""
        rows = DataProto.concat(batch)
        ids = {SAMPLE_IDS: rows[SAMPLE_IDS]}
        self.ready.append(self.generate(rows, sampling).with_columns(ids))
        return DataProto(ids)

    def take(self, max_seconds: float) -> DataProto:
        """See HybridGroup."""
        assert 0 < max_seconds < 1
        ready, self.ready = self.ready, []
        return DataProto.concat(ready) if ready else DataProto({SAMPLE_IDS: torch.empty(0, dtype=torch.int64)})

    def abort(self) -> list[None]:
        """See HybridGroup."""
        self.ready = []
        return [None]

    def take_metrics(self) -> Metrics:
        """See HybridGroup."""
        return {}

    def take_memory(self) -> Metrics:
        """See HybridGroup."""
        return {}

    def record_tokens(self, path: Path, step: int, version: int, rows: DataProto, updated: DataProto) -> str | None:
        """See HybridGroup."""
        del step, version, rows, updated
        raise AssertionError(f"{path}: nothing records tokens here")

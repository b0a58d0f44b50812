"""One case of a train engine's memory, for the planner and for torch's tracker: a model by its name in the planner's
table, whose numbers are those of the model's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, PreTrainedConfig

from rljob_planner.job import lora_shape
from rljob_planner.known_models import known_config, known_model
from rljob_planner.memory.train_passes import scoring_peak, train_peak
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan_types import Peak
from rljob_planner.workload import TrainLayout, TrainModel
from rljob_testing.fsdp_memory_oracle import OracleCase
from rljob_trainer.engines.train.layout import ParallelLayout

ROW_TOKENS = 4096


@dataclass(frozen=True)
class MemoryCase:
    """What both are asked."""

    model: str
    num_shards: int
    num_replicas: int = 1
    sequence_parallel: int = 1
    tokens_of_rank: int = ROW_TOKENS
    recomputed_every: int = 0
    rank: int | None = None
    is_trained: bool = True
    defers_reduction: bool = False
    num_layers: int | None = None
    """None: as many as the model has."""

    def changed(
        self,
        *,
        model: str | None = None,
        recomputed_every: int | None = None,
        rank: int | None = None,
        is_trained: bool | None = None,
    ) -> MemoryCase:
        """With what is given in the place of what was."""
        return replace(
            self,
            model=self.model if model is None else model,
            recomputed_every=self.recomputed_every if recomputed_every is None else recomputed_every,
            rank=self.rank if rank is None else rank,
            is_trained=self.is_trained if is_trained is None else is_trained,
        )

    def config(self) -> PreTrainedConfig:
        """For transformers."""
        fields = dict(known_config(self.model))
        if self.num_layers is not None:
            fields["num_hidden_layers"] = self.num_layers
        config: PreTrainedConfig = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
        return config

    def shape(self) -> ModelShape:
        """For the planner."""
        shape = known_model(self.model)
        assert shape is not None, self.model
        return shape if self.num_layers is None else replace(shape, num_layers=self.num_layers)

    def oracle(self) -> OracleCase:
        """For the tracker."""
        return OracleCase(
            self.config(),
            ParallelLayout(self.num_shards, self.num_replicas, self.sequence_parallel),
            self.tokens_of_rank,
            min(self.tokens_of_rank * self.sequence_parallel, ROW_TOKENS),
            self.recomputed_every,
            adapter_rank=self.rank,
            is_trained=self.is_trained,
            defers_reduction=self.defers_reduction,
            compute_dtype=torch.bfloat16,
        )


def planned(case: MemoryCase) -> Peak:
    """By the planner."""
    shape = case.shape()
    model = TrainModel(
        shape,
        case.is_trained,
        checkpoints_activations=case.recomputed_every > 0,
        checkpoints_every_nth_layer=max(1, case.recomputed_every),
        lora=None if case.rank is None else lora_shape(shape, case.rank, None, syncs_alone=False),
        defers_reduction=case.defers_reduction,
    )
    layout = TrainLayout(case.num_shards * case.num_replicas, case.num_shards, case.sequence_parallel)
    return (train_peak if case.is_trained else scoring_peak)(model, layout, case.tokens_of_rank)

"""The rollout worker: turns prompts into responses with whatever engine the job uses.

Legend: B responses of this worker's share, T tokens of prompt and response.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rljob_trainer.data.proto import DataProto, pad_columns
from rljob_trainer.dispatch.modes import MeshPosition
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from rljob_trainer.workers.columns import (
    IS_TRUNCATED,
    POLICY_VERSIONS,
    PROMPT_TOKEN_IDS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_SEEDS,
    TOKENS,
)

ROLLOUT_MESH = "rollout"


class RolloutWorker(Worker):
    """Ranks are grouped by `tensor_parallel`: the ranks of a group get the same prompts and act as one."""

    def __init__(self, context: WorkerContext, make_engine: Callable[[], RolloutEngine], tensor_parallel: int) -> None:
        """Collective."""
        super().__init__(context)
        self.tensor_parallel = tensor_parallel
        self.engine = make_engine()

    def mesh_position(self, mesh: str) -> MeshPosition:
        """In the mesh `rollout`, tensor-parallel peers share one data rank; the first of them answers."""
        if mesh != ROLLOUT_MESH:
            return super().mesh_position(mesh)
        return MeshPosition(
            data_rank=self.context.rank // self.tensor_parallel,
            num_data_ranks=self.context.world_size // self.tensor_parallel,
            is_collected=self.context.rank % self.tensor_parallel == 0,
        )

    def generate(self, batch: DataProto, sampling: SamplingSettings, width: int) -> DataProto:
        """One response per row. Needs PROMPT_TOKEN_IDS and SAMPLE_SEEDS; gives the columns of a rollout.

        `width` (tokens) is that of the resulting columns: at least the longest prompt and response together."""
        prompts = [tuple(_integers(prompt)) for prompt in batch.object_column(PROMPT_TOKEN_IDS)]
        seeds = batch[SAMPLE_SEEDS].tolist()
        requests = [
            GenerationRequest(str(row), prompt, sampling, seed)
            for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        finished = self.engine.generate(requests)
        return rollout_columns(prompts, [finished[str(row)] for row in range(len(prompts))], width)


def rollout_columns(prompts: list[tuple[int, ...]], responses: list[FinishedSequence], width: int) -> DataProto:
    """The columns of a rollout, padded on the right to `width` tokens."""
    tokens = [
        torch.tensor(prompt + response.token_ids, dtype=torch.int64)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    masks = [
        torch.tensor([False] * len(prompt) + [True] * len(response.token_ids))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    logprobs = [
        torch.tensor([0.0] * len(prompt) + list(response.logprobs), dtype=torch.float32)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    versions = [
        torch.tensor([-1] * len(prompt) + list(response.policy_versions), dtype=torch.int32)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return DataProto(
        {
            TOKENS: pad_columns(tokens, width, 0),
            RESPONSE_MASK: pad_columns(masks, width, False),
            ROLLOUT_LOGPROBS: pad_columns(logprobs, width, 0.0),
            POLICY_VERSIONS: pad_columns(versions, width, -1),
            IS_TRUNCATED: torch.tensor([response.finish_reason is FinishReason.LENGTH for response in responses]),
        },
        {RESPONSE_TEXTS: tuple(response.text for response in responses)},
    )


def _integers(prompt: object) -> tuple[int, ...]:
    assert isinstance(prompt, tuple), "prompt tokens travel as tuples"
    return prompt

"""The rollout worker: generates responses to prompts with the job's rollout engine.

Legend: B responses of this worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.host_ledger import HOST_LEDGER, HostUse, buffer_bytes
from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from rljob_trainer.observability.memory import MEMORY, Bytes, Owner
from rljob_trainer.workers.columns import (
    IS_GREEDY,
    IS_TRUNCATED,
    PLAIN_RESPONSE_TEXTS,
    POLICY_VERSIONS,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_SEEDS,
    TOKENS,
)

ROLLOUT_MESH = "rollout"


class RolloutWorker(Worker):
    """One rank of the rollout. Each group of `tensor_parallel` ranks shares one copy of the model and gets the same
    prompts."""

    def __init__(
        self,
        context: WorkerContext,
        make_engine: Callable[[], RolloutEngine],
        tensor_parallel: int,
        sleep_field: str = "spec.training.rollout.syncEverySteps",
    ) -> None:
        """Collective. `sleep_field`: the job's field that changes how much of the engine is in host memory while it
        sleeps."""
        super().__init__(context)
        self.tensor_parallel = tensor_parallel
        self.engine = make_engine()
        MEMORY.watch(self.memory)
        MEMORY.watch_unmapped(self.unmapped)
        HOST_LEDGER.watch(self.host_uses)
        self.sleep_field = sleep_field
        self.num_host_cache_bytes = 0
        """The size of the KV cache if it is in host memory."""

    def memory(self) -> Bytes:
        """Bytes that this role has on the device now, by owner."""
        found = self.engine.memory
        return {Owner.ROLLOUT_WEIGHTS: found.weights, Owner.KV_CACHE: found.kv_cache}

    def host_uses(self) -> list[HostUse]:
        """The host memory that this worker keeps: what sleeps there and, on CPUs, the KV cache."""
        now = self.engine.memory
        asleep = buffer_bytes(self.engine.kept_buffers, is_pinned=True)
        cache = now.kv_cache if self.context.device_type == "cpu" else 0
        # The engine may be asleep, and need its cache again.
        self.num_host_cache_bytes = max(self.num_host_cache_bytes, cache)
        return [
            HostUse("sleeping rollout engine", self.sleep_field, asleep, asleep if now.unmapped else 0),
            HostUse("KV cache", "spec.training.rollout.cpuKvCache", self.num_host_cache_bytes, cache),
        ]

    def unmapped(self) -> int:
        """See RolloutMemory.unmapped."""
        return self.engine.memory.unmapped

    def mesh_position(self, mesh: str) -> MeshPosition:
        """In the mesh `rollout`, the ranks that share a copy of the model share one data rank; the first of these ranks
        returns the results."""
        if mesh != ROLLOUT_MESH:
            return super().mesh_position(mesh)
        return MeshPosition(
            data_rank=self.context.rank // self.tensor_parallel,
            num_data_ranks=self.context.world_size // self.tensor_parallel,
            is_collected=self.context.rank % self.tensor_parallel == 0,
        )

    def generate(self, batch: DataProto, sampling: SamplingSettings) -> DataProto:
        """Generates one response per row and returns the columns of `rollout_columns`. Needs PROMPT_TOKEN_IDS and
        SAMPLE_SEEDS; IS_GREEDY is optional."""
        prompts = [tuple(row.tolist()) for row in batch.ragged_column(PROMPT_TOKEN_IDS).row_tensors()]
        seeds: list[int] = batch[SAMPLE_SEEDS].tolist()
        greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
        are_greedy: list[bool] = batch[IS_GREEDY].tolist() if IS_GREEDY in batch.tensors else [False] * len(prompts)
        requests = [
            GenerationRequest(str(row), prompt, greedy if is_greedy else sampling, seed)
            for row, (prompt, is_greedy, seed) in enumerate(zip(prompts, are_greedy, seeds, strict=True))
        ]
        finished = self.engine.generate(requests)
        return rollout_columns(prompts, [finished[str(row)] for row in range(len(prompts))])


def rollout_columns(prompts: list[tuple[int, ...]], responses: list[FinishedSequence]) -> DataProto:
    """Returns the columns of a rollout: tokens, masks, log-probabilities, policy versions, lengths and texts."""
    pairs = list(zip(prompts, responses, strict=True))
    lengths_B = torch.tensor([len(prompt) + len(response.token_ids) for prompt, response in pairs], dtype=torch.int64)

    def column(rows: list[list[float]] | list[list[int]] | list[list[bool]], dtype: torch.dtype) -> RaggedColumn:
        return RaggedColumn(torch.tensor(list(chain.from_iterable(rows)), dtype=dtype), lengths_B)

    return DataProto(
        tensors={
            RESPONSE_LENGTHS: torch.tensor([len(response.token_ids) for response in responses]),
            IS_TRUNCATED: torch.tensor([response.finish_reason is FinishReason.LENGTH for response in responses]),
        },
        ragged={
            TOKENS: column([[*prompt, *response.token_ids] for prompt, response in pairs], torch.int64),
            RESPONSE_MASK: column(
                [[False] * len(prompt) + [True] * len(response.token_ids) for prompt, response in pairs], torch.bool
            ),
            ROLLOUT_LOGPROBS: column(
                [[0.0] * len(prompt) + list(response.logprobs) for prompt, response in pairs], torch.float32
            ),
            POLICY_VERSIONS: column(
                [[-1] * len(prompt) + list(response.policy_versions) for prompt, response in pairs], torch.int32
            ),
        },
        objects={
            RESPONSE_TEXTS: tuple(response.text for response in responses),
            PLAIN_RESPONSE_TEXTS: tuple(response.plain_text for response in responses),
        },
    )

"""The rollout worker: generates responses to prompts with the job's rollout engine.

Legend: B responses of this worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain, count

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.host_ledger import HOST_LEDGER, HostUse, buffer_bytes
from rljob_trainer.engines.process_group import COLLECTIVE_TIMEOUT, group_of_model_ranks
from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    GenerationRequest,
    Outcome,
    RolloutEngine,
    SamplingSettings,
)
from rljob_trainer.engines.rollout.loop import DEFAULT_STALL_SECONDS, EngineLoop, ModelPeers
from rljob_trainer.observability.memory import MEMORY, Bytes, Owner
from rljob_trainer.workers.columns import (
    IS_GREEDY,
    NUM_TOKENS,
    PLAIN_RESPONSE_TEXTS,
    POLICY_VERSIONS,
    PROMPT_LENGTHS,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    TOKENS,
    outcome_columns,
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
        stall_seconds: float = DEFAULT_STALL_SECONDS,
        shares_for_seconds: float | None = None,
    ) -> None:
        """Collective. `sleep_field`: the job's field that changes how much of the engine is in host memory while it
        sleeps. `stall_seconds`: see EngineLoop. `shares_for_seconds`: for `shares` of EngineLoop, the longest time
        for which the ranks that share a model wait for commands; None: each rank gets the commands itself."""
        super().__init__(context)
        self.tensor_parallel = tensor_parallel
        self.engine = make_engine()
        # A hang is reported as a stalled step.
        timeout = COLLECTIVE_TIMEOUT + timedelta(seconds=stall_seconds + (shares_for_seconds or 0))
        group = group_of_model_ranks(context, tensor_parallel, timeout)
        peers = None if group is None else ModelPeers(group, context.rank - context.rank % tensor_parallel)
        self.loop = EngineLoop(
            self.engine,
            device=context.device,
            peers=peers,
            shares=shares_for_seconds is not None,
            stall_seconds=stall_seconds,
        )
        """Runs the engine while there are unfinished requests."""
        self._requests: dict[str, tuple[int, tuple[int, ...]]] = {}
        """SAMPLE_IDS and prompt of the requests that were submitted and not taken or aborted, by request id."""
        self._request_numbers = count()
        """Each request has an id of its own, also if a response is requested again: ranks that share a model take the
        same response at different times."""
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

    def submit(self, batch: DataProto, sampling: SamplingSettings) -> DataProto:
        """Begins to generate one response per row. Needs PROMPT_TOKEN_IDS, SAMPLE_SEEDS and SAMPLE_IDS; IS_GREEDY is
        optional. Returns a batch without columns. Raises the errors of EngineLoop."""
        numbers = [str(next(self._request_numbers)) for _ in range(len(batch))]
        requests = requests_of(batch, sampling, numbers)
        self.loop.submit(requests)
        self._requests |= {
            request.request_id: (sample_id, request.prompt_token_ids)
            for request, sample_id in zip(requests, batch[SAMPLE_IDS].tolist(), strict=True)
        }
        return DataProto()

    def take(self, max_seconds: float) -> DataProto:
        """Returns the responses to submitted rows that have finished since the last call, in the order in which they
        finished; see EngineLoop.take. The columns are those of `rollout_columns`, and SAMPLE_IDS; there may be no
        rows."""
        responses = self.loop.take(max_seconds)
        requests = [self._requests.pop(response.request_id) for response in responses]
        if not self._requests:
            # The loop's thread may still leave the random stream and record its time.
            self.loop.wait_until_idle()
        ids = torch.tensor([sample_id for sample_id, _ in requests], dtype=torch.int64)
        return rollout_columns([prompt for _, prompt in requests], responses).with_columns({SAMPLE_IDS: ids})

    def abort(self) -> None:
        """Drops all submitted rows whose responses were not taken."""
        self.loop.abort(self._requests)
        self.loop.wait_until_idle()
        self.loop.take(0.0)
        self._requests.clear()


def requests_of(batch: DataProto, sampling: SamplingSettings, ids: Sequence[str]) -> list[GenerationRequest]:
    """Returns one request per row, with these ids; see RolloutWorker.submit for the columns."""
    prompts = [tuple(row.tolist()) for row in batch.ragged_column(PROMPT_TOKEN_IDS).row_tensors()]
    seeds: list[int] = batch[SAMPLE_SEEDS].tolist()
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    are_greedy: list[bool] = batch[IS_GREEDY].tolist() if IS_GREEDY in batch.tensors else [False] * len(prompts)
    return [
        GenerationRequest(request_id, prompt, greedy if is_greedy else sampling, seed)
        for request_id, prompt, is_greedy, seed in zip(ids, prompts, are_greedy, seeds, strict=True)
    ]


def rollout_columns(prompts: list[tuple[int, ...]], responses: list[FinishedSequence]) -> DataProto:
    """Returns the columns of a rollout, with one row per response: tokens, masks, log-probabilities, policy versions,
    lengths, texts, and whether each response was truncated or the engine did not complete it."""
    pairs = list(zip(prompts, responses, strict=True))
    lengths_B = torch.tensor([len(prompt) + len(response.token_ids) for prompt, response in pairs], dtype=torch.int64)

    def column(rows: list[list[float]] | list[list[int]] | list[list[bool]], dtype: torch.dtype) -> RaggedColumn:
        return RaggedColumn(torch.tensor(list(chain.from_iterable(rows)), dtype=dtype), lengths_B)

    return DataProto(
        tensors={
            RESPONSE_LENGTHS: torch.tensor([len(response.token_ids) for response in responses], dtype=torch.int64),
            PROMPT_LENGTHS: torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
            NUM_TOKENS: lengths_B,
            **outcome_columns([Outcome.of(response.finish_reason) for response in responses]),
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

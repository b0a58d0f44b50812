"""vLLM in the loop's thread, on two ranks that share the model: both make the same calls of the engine, also if
commands arrive on one rank later than on the other, and while their main threads use another process group.
Without Ray."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rljob_testing.models import tiny_models
from rljob_testing.training import gloo_ranks
from rljob_testing.training.whole_rollouts import run_to_empty
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import group_of_model_ranks
from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from rljob_trainer.engines.rollout.loop import EngineLoop, ModelPeers

pytestmark = [pytest.mark.vllm]

SAMPLING = SamplingSettings(1.0, 1.0, 0, 40, ())
PROMPT = (4, 9, 5)
SECONDS = 120.0
"""Longer than any test waits."""
LAG_SECONDS = 0.2
NUM_ROUNDS = 5


GREEDY = SamplingSettings(0.0, 1.0, 0, 10, ())
MESSAGE = (7, 30, 8)
"""Follows each turn of a conversation."""
NUM_TURNS = 3


@dataclass(frozen=True)
class RanksResult:
    """What one rank has seen."""

    plain: dict[str, FinishedSequence]
    """From `generate`, in the main thread."""
    in_loop: dict[str, FinishedSequence]
    """The responses to the same requests, from the loop."""
    calls: list[tuple[str, ...]]
    """The calls of the engine in the rounds with later requests."""
    found: list[FinishedSequence]
    """The responses in these rounds."""
    aborted: list[FinishedSequence]
    num_collectives: int
    """Collectives of the main thread in these rounds."""
    conversation: list[FinishedSequence]


def requests_of(first: int, number: int, num_tokens: int = SAMPLING.max_new_tokens) -> list[GenerationRequest]:
    sampling = replace(SAMPLING, max_new_tokens=num_tokens)
    return [GenerationRequest(str(first + row), PROMPT, sampling, row) for row in range(number)]


def recorded_calls(loop: EngineLoop) -> list[tuple[str, ...]]:
    """Records the calls that the loop makes from now on."""
    engine, calls = loop.engine, list[tuple[str, ...]]()
    add, step, abort = engine.add, engine.step, engine.abort

    def recorded_add(request: GenerationRequest) -> None:
        calls.append(("add", request.request_id))
        add(request)

    def recorded_step() -> list[FinishedSequence]:
        calls.append(("step",))
        return step()

    def recorded_abort(request_ids: Sequence[str]) -> list[FinishedSequence]:
        calls.append(("abort", *request_ids))
        return abort(request_ids)

    engine.add, engine.step, engine.abort = recorded_add, recorded_step, recorded_abort  # type: ignore[method-assign,assignment]
    return calls


def greedy_conversation(engine: RolloutEngine, folder: Path, peers: ModelPeers | None) -> list[FinishedSequence]:
    """The turns of a conversation with the model in `folder`. The prompt of each is all tokens before it; ranks that
    share the model follow the first one, as in jobs with an environment. Empty on a rank that follows."""
    # The engine has begun with random weights, which depend on the number of ranks.
    engine.update_weights(load_file(folder / tiny_models.WEIGHTS).items(), 0)
    loop = EngineLoop(engine, peers=peers, shares=True)
    finished: queue.SimpleQueue[list[FinishedSequence]] = queue.SimpleQueue()
    loop.on_finished = finished.put
    turns: list[FinishedSequence] = []
    if loop.is_leader:
        tokens = PROMPT
        for number in range(NUM_TURNS):
            loop.submit([GenerationRequest(f"turn {number}", tokens, GREEDY, number)], keeps_cache=True)
            turns += finished.get(timeout=SECONDS)
            tokens = (*tokens, *turns[-1].token_ids, *MESSAGE)
        loop.release(1)
    else:
        loop.follow(1)
    loop.wait_until_idle()
    return turns


def conversation_on_one_rank(folder: Path, context: WorkerContext) -> list[FinishedSequence]:
    from rljob_testing.models import small_vllm

    del context
    return greedy_conversation(small_vllm.start_engine(folder, 1), folder, None)


def on_a_rank(folder: Path, context: WorkerContext) -> RanksResult:
    from rljob_testing.models import small_vllm

    if context.rank == 0:
        tiny_models.copy_tokenizer(tiny_models.save("qwen3", folder))
    dist.barrier()
    engine = small_vllm.start_engine(folder, 2)
    group = group_of_model_ranks(context, 2, timedelta(minutes=5))
    assert group is not None
    peers = ModelPeers(group, 0)
    loop = EngineLoop(engine, peers=peers)
    engine.clear_cache()
    plain = engine.generate(requests_of(0, 8))
    in_loop = run_to_empty(loop, requests_of(0, 8))
    calls = recorded_calls(loop)
    found: list[FinishedSequence] = []
    aborted: list[FinishedSequence] = []
    num_collectives = 0

    def exchange(seconds: float) -> None:
        """The main threads of both ranks meet, again and again, while their engines generate."""
        nonlocal num_collectives
        end = time.monotonic() + seconds
        is_over = torch.tensor([0])
        while not is_over:
            is_over = torch.tensor([int(time.monotonic() > end)])
            dist.all_reduce(is_over)
            num_collectives += 1

    for number in range(NUM_ROUNDS):
        first = 100 * (number + 1)
        loop.submit(requests_of(first, 4))
        exchange(0.02)
        # Once the leader gets commands first, once the other rank.
        time.sleep(LAG_SECONDS * (context.rank == number % 2))
        loop.submit(requests_of(first + 10, 2, 30))
        loop.submit(requests_of(first + 20, 2, 30))
        exchange(0.02)
        time.sleep(LAG_SECONDS * (context.rank != number % 2))
        aborted += loop.abort([str(first + 1), str(first + 11), str(first + 20)])
        found += loop.take(SECONDS)
    loop.wait_until_idle()
    dist.barrier()
    conversation = greedy_conversation(engine, folder, peers)
    dist.barrier()
    return RanksResult(plain, in_loop, calls, found, aborted, num_collectives, conversation)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def ranks(model_folder: Path) -> list[RanksResult]:
    [found] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(on_a_rank, model_folder), 2)], gloo_ranks.VLLM)
    results = [each for each in found if isinstance(each, RanksResult)]
    assert len(results) == 2
    return results


def test_the_thread_generates_bitwise_what_generate_does(ranks: list[RanksResult]) -> None:
    for each in ranks:
        assert each.in_loop == each.plain
        assert len({response.token_ids for response in each.plain.values()}) > 1
    assert ranks[0].in_loop == ranks[1].in_loop


def test_both_ranks_make_the_same_calls(ranks: list[RanksResult]) -> None:
    first, second = ranks
    assert first.calls == second.calls
    assert (first.found, first.aborted) == (second.found, second.aborted)
    # Requests have joined others that were running.
    joined = [index for index, call in enumerate(first.calls) if call[0] == "add" and call[1][-2] == "1"]
    assert any(first.calls[index - 1] == ("step",) for index in joined)
    assert min(each.num_collectives for each in ranks) > NUM_ROUNDS


def test_every_request_ends_or_is_aborted(ranks: list[RanksResult]) -> None:
    for each in ranks:
        assert all(response.finish_reason is FinishReason.ABORTED for response in each.aborted)
        ids = sorted(int(response.request_id) for response in (*each.found, *each.aborted))
        assert ids == [
            100 * (number + 1) + offset + row
            for number in range(NUM_ROUNDS)
            for offset, num_rows in ((0, 4), (10, 2), (20, 2))
            for row in range(num_rows)
        ]


def test_a_conversation_does_not_depend_on_the_number_of_ranks(ranks: list[RanksResult], model_folder: Path) -> None:
    run = gloo_ranks.RankedRun(partial(conversation_on_one_rank, model_folder), 1)
    [[alone]] = gloo_ranks.run_on_ranks([run], gloo_ranks.VLLM)
    assert isinstance(alone, list)
    together = ranks[0].conversation
    assert ranks[1].conversation == []
    assert [turn.token_ids for turn in together] == [turn.token_ids for turn in alone]
    assert len({turn.token_ids for turn in together}) == NUM_TURNS
    for turn, expected in zip(together, alone, strict=True):
        # In float32 two ranks only add up in another order.
        assert turn.logprobs == pytest.approx(expected.logprobs, abs=1e-5)

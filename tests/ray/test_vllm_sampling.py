"""Sampling in vLLM: temperature, top-k and top-p follow their definitions, each token has the log-probability it was
drawn with, and bfloat16 log-probabilities are as near the exact ones as those of transformers. Texts equal those of the
other engine. Also the memory of vLLM's cache while it sleeps. Runs in a process of its own, without Ray.

Legend: R response tokens of all rows, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from rljob_testing import process_counters
from rljob_testing.models import sampling_by_definition
from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.errors import ResourceError

if TYPE_CHECKING:
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm]

PROMPTS = (sampling_by_definition.PROMPT, (4, 9, 5), (12, 7, 3, 8, 4, 6, 11, 5, 9), (3, 3, 7))
FREELY = SamplingSettings(1.5, 1.0, 0, 24, ())
"""The temperature makes most tokens uncertain, and responses long."""
NUM_ROWS, NUM_STEPS = 8, 3
"""Requests of the test of `abort`, and the steps before it."""
NUM_READ = 10
"""One more than the longest of PROMPTS has, so that another one fits in part."""
DIGITS = (10, 5, 7, 12, 2)
"""7249>"""
STOPS: dict[tuple[str, ...], tuple[str, str]] = {
    (): ("97249", "9249"),
    ("7",): ("9", "9"),
    ("72",): ("9", "9"),
    ("4", "24"): ("97", "9"),
    ("92",): ("97249", "9249"),
    ("<eos>",): ("97249", "9249"),
}
"""The response as rewards see it, and without its special token, the 7, for these stop texts."""
UNEXPECTED = ("repetition", None)
"""Finish reasons of vLLM that no setting of ours causes."""


def with_a_special_seven(folder: Path) -> Path:
    """The quickstart's model, with a tokenizer in which 7 is a special token."""
    copytree(sampling_by_definition.MODEL, folder, dirs_exist_ok=True)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][1], "id": 10, "content": "7"})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def texts_of(engine: RolloutEngine) -> list[FinishedSequence]:
    """Greedy responses with each of STOPS."""
    requests = [
        GenerationRequest(str(row), DIGITS, SamplingSettings(0.0, 1.0, 0, 8, stop), 0) for row, stop in enumerate(STOPS)
    ]
    found = engine.generate(requests)
    return [found[str(row)] for row in range(len(STOPS))]


@dataclass(frozen=True)
class Generated:
    """The results of the engines: in float32 by the name of the setting, and sequences in bfloat16."""

    samples: dict[str, list[sampling_by_definition.Sample]]
    in_bfloat16: list[FinishedSequence]
    rollouts: list[list[tuple[int, ...]]]
    """Tokens of equal requests, before and after sleeps; from the fourth on the lent memory was overwritten before."""
    lent_bytes: list[int]
    """Lent bytes after each of them and a sleep; for the last one the engine was configured as if blocks filled up."""
    num_forgotten: int
    """How many times the prefix cache was reset in these sleeps. (Rows of this model fill no block, so it is empty.)"""
    texts_by_vllm: list[FinishedSequence]
    texts_by_transformers: list[FinishedSequence]
    """Texts for STOPS, by both engines."""
    errors: list[str]
    """For UNEXPECTED."""
    broken_off: list[FinishReason]
    """What vLLM's words `abort` and `error` mean."""
    aborted: list[FinishedSequence]
    """See `aborted_and_others`; the last one is of a request that no step had started."""
    others: list[FinishedSequence]
    whole: list[FinishedSequence]
    """The responses to the same requests, none of them aborted."""
    in_few_steps: list[FinishedSequence]
    in_many_steps: list[FinishedSequence]
    """Responses to PROMPTS, read in one step, and read with at most NUM_READ tokens in a step."""


@contextmanager
def counted_cache_resets(engine: VllmEngine) -> Iterator[list[bool]]:
    """Records what vLLM returns when it is asked to reset its prefix cache."""
    answers: list[bool] = []
    reset = engine.engine.reset_prefix_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.engine, "reset_prefix_cache", lambda: answers.append(reset()))
        yield answers


def errors_of_unexpected_reasons() -> list[str]:
    from rljob_trainer.engines.rollout.vllm_engine import finish_reason_of

    errors = []
    for word in UNEXPECTED:
        with pytest.raises(ResourceError) as raised:
            finish_reason_of(word)
        errors.append(str(raised.value))
    return errors


def reasons_of_broken_off_responses() -> list[FinishReason]:
    from rljob_trainer.engines.rollout.vllm_engine import finish_reason_of

    return [finish_reason_of(word) for word in ("abort", "error")]


def aborted_and_others(
    engine: VllmEngine,
) -> tuple[list[FinishedSequence], list[FinishedSequence], list[FinishedSequence]]:
    """After NUM_STEPS steps there is a new policy version, and all unfinished requests but one are aborted. Returns
    their responses, those of the others, and the responses to the same requests if none is aborted."""
    requests = [
        GenerationRequest(str(100 + row), sampling_by_definition.PROMPT, FREELY, row) for row in range(NUM_ROWS)
    ]
    for each in requests[:-1]:
        engine.add(each)
    ended = [each for _ in range(NUM_STEPS) for each in engine.step()]
    engine.add(requests[-1])
    engine.policy_version = 5
    unfinished = [each.request_id for each in requests if each.request_id not in {done.request_id for done in ended}]
    aborted = engine.abort(["unknown", *unfinished[1:]])
    assert engine.abort(unfinished[1:]) == []
    remaining = list(engine.generate([]).values())
    return aborted, [*ended, *remaining], list(engine.generate(requests).values())


def in_few_and_many_steps(engine: VllmEngine) -> tuple[list[FinishedSequence], list[FinishedSequence]]:
    """Responses to PROMPTS without and with a limit of tokens per step."""
    requests = [GenerationRequest(str(row), prompt, FREELY, row) for row, prompt in enumerate(PROMPTS)]
    found = engine.generate(requests)
    scheduler = engine.engine.engine_core.engine_core.scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "max_num_scheduled_tokens", NUM_READ)
        limited = engine.generate(requests)
    in_order = [each.request_id for each in requests]
    return [found[each] for each in in_order], [limited[each] for each in in_order]


def transformers_engine(folder: Path) -> HfEngine:
    """A transformers engine with the model's weights."""
    engine = HfEngine(HfSettings(folder, torch.device("cpu"), torch.float32, len(STOPS)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine.update_weights(model.named_parameters(), 0)
    return engine


def one_token_requests(sampling: SamplingSettings) -> list[GenerationRequest]:
    """One request for each seed."""
    seeds = range(sampling_by_definition.NUM_SAMPLES)
    return [GenerationRequest(str(seed), sampling_by_definition.PROMPT, sampling, seed) for seed in seeds]


def after_sleeps(engine: VllmEngine) -> tuple[list[list[tuple[int, ...]]], list[int], int]:
    """See the fields `rollouts`, `lent_bytes` and `num_forgotten` of `Generated`."""
    lent, rollouts, num_forgotten = [], [], 0
    for fills_blocks, leftover_processes in (
        (engine.can_fill_blocks, None),
        (engine.can_fill_blocks, None),
        (engine.can_fill_blocks, None),
        (engine.can_fill_blocks, 60),
        (True, 0),
    ):
        engine.can_fill_blocks = fills_blocks
        if leftover_processes is not None:
            for storage in engine.kv_cache:
                # In bfloat16 0.0115, or zero: the system's content of pages that no process has written to.
                storage.fill_(leftover_processes)
        engine.wake(weights=True, kv_cache=True)
        found = engine.generate(
            [GenerationRequest(str(row), sampling_by_definition.PROMPT, FREELY, row) for row in range(8)]
        )
        rollouts.append([found[str(row)].token_ids for row in range(8)])
        with counted_cache_resets(engine) as forgotten:
            engine.sleep()
        num_forgotten += sum(forgotten)
        lent.append(process_counters.lazily_freed_bytes())
    return rollouts, lent, num_forgotten


def generated(folder: Path, context: WorkerContext) -> Generated:
    from rljob_testing.models import small_vllm

    # Deleting the first engine would destroy the process group.
    engines: list[VllmEngine] = []

    def sequences(dtype: torch.dtype, requests: Sequence[Sequence[GenerationRequest]]) -> list[list[FinishedSequence]]:
        engine = small_vllm.start_engine(folder, context.world_size, dtype=dtype)
        engines.append(engine)
        model = AutoModelForCausalLM.from_pretrained(sampling_by_definition.MODEL, dtype=dtype)
        engine.update_weights(model.named_parameters(), 0)
        return [list(engine.generate(each).values()) for each in requests]

    samples = sequences(
        torch.float32,
        [one_token_requests(sampling) for sampling in sampling_by_definition.SETTINGS.values()],
    )
    by_vllm = texts_of(engines[0])
    [in_bfloat16] = sequences(
        torch.bfloat16,
        [[GenerationRequest(str(row), PROMPTS[row % len(PROMPTS)], FREELY, row) for row in range(32)]],
    )
    return Generated(
        {
            name: [(each.token_ids[0], each.logprobs[0]) for each in found]
            for name, found in zip(sampling_by_definition.SETTINGS, samples, strict=True)
        },
        in_bfloat16,
        *after_sleeps(engines[-1]),
        by_vllm,
        texts_of(transformers_engine(folder)),
        errors_of_unexpected_reasons(),
        reasons_of_broken_off_responses(),
        *aborted_and_others(engines[0]),
        *in_few_and_many_steps(engines[0]),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    folder = with_a_special_seven(tmp_path_factory.mktemp("model"))
    [[one]] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(generated, folder), 1)], gloo_ranks.VLLM)
    assert isinstance(one, Generated)
    return one


@pytest.mark.parametrize("name", sampling_by_definition.SETTINGS)
def test_samples_follow_the_truncated_distribution(found: Generated, name: str) -> None:
    sampling_by_definition.assert_samples_follow(
        found.samples[name], sampling_by_definition.distribution(sampling_by_definition.SETTINGS[name])
    )


def test_texts_equal_those_of_the_other_engine(found: Generated) -> None:
    """Rewards and stop texts see special tokens; neither sees the end token. A stop text with a special token is not
    part of what a reward model with another tokenizer reads."""
    for by_engine in (found.texts_by_vllm, found.texts_by_transformers):
        assert [(each.text, each.plain_text) for each in by_engine] == list(STOPS.values())
        assert {each.finish_reason for each in by_engine} == {FinishReason.STOP}
    assert [each.token_ids for each in found.texts_by_vllm] == [each.token_ids for each in found.texts_by_transformers]
    assert found.texts_by_vllm[0].token_ids == (12, 10, 5, 7, 12, 1)


def test_a_response_that_vllm_has_broken_off_is_not_trained_on(found: Generated) -> None:
    assert found.broken_off == [FinishReason.ABORTED, FinishReason.ERROR]
    assert not any(each.is_complete for each in found.broken_off)
    for word, error in zip(UNEXPECTED, found.errors, strict=True):
        assert f"ended a response for an unexpected reason (finish reason: {word})" in error


def test_aborted_requests_return_their_tokens_so_far(found: Generated) -> None:
    whole = {each.request_id: each for each in found.whole}
    assert {each.finish_reason for each in found.aborted} == {FinishReason.ABORTED}
    *started, waiting = found.aborted
    assert len(started) >= 2
    for each in started:
        assert each.token_ids == whole[each.request_id].token_ids[: len(each.token_ids)]
        assert len(each.token_ids) == len(each.logprobs) == NUM_STEPS
        assert each.policy_versions == (0,) * NUM_STEPS
    assert (waiting.token_ids, waiting.logprobs, waiting.policy_versions) == ((), (), ())


def test_prompts_that_do_not_fit_into_a_step_change_no_response(found: Generated) -> None:
    """On a CPU, vLLM cannot read a part of a prompt if the request has a seed of its own."""
    assert max(map(len, PROMPTS)) < NUM_READ < sum(map(len, PROMPTS))
    assert [each.token_ids for each in found.in_many_steps] == [each.token_ids for each in found.in_few_steps]


def test_each_token_has_the_version_that_sampled_it(found: Generated) -> None:
    [later] = [each for each in found.others if 5 in each.policy_versions]
    num_tokens = len(later.token_ids)
    assert num_tokens > NUM_STEPS
    assert later.policy_versions == (0,) * NUM_STEPS + (5,) * (num_tokens - NUM_STEPS)


@torch.no_grad()
def logprobs_of(sequences: Sequence[FinishedSequence], dtype: torch.dtype) -> torch.Tensor:
    """[R], by transformers, on each row alone; the weights are rounded to bfloat16 whatever the compute dtype is."""
    model = AutoModelForCausalLM.from_pretrained(sampling_by_definition.MODEL, dtype=torch.bfloat16).to(dtype)
    rows = []
    for sequence in sequences:
        prompt = PROMPTS[int(sequence.request_id) % len(PROMPTS)]
        tokens = torch.tensor([*prompt, *sequence.token_ids])
        logits_NV = model(tokens[None]).logits[0, len(prompt) - 1 : -1].float() / FREELY.temperature
        rows.append(logits_NV.log_softmax(dim=-1).gather(1, tokens[len(prompt) :, None])[:, 0])
    return torch.cat(rows)


def test_bfloat16_logprobs_are_as_exact_as_those_of_transformers(found: Generated) -> None:
    vllm_N = torch.tensor([logprob for each in found.in_bfloat16 for logprob in each.logprobs])
    half_N, exact_N = (logprobs_of(found.in_bfloat16, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert len(vllm_N) > 300
    assert -2 < float(exact_N.mean()) < -0.3
    assert float((vllm_N - half_N).abs().max()) < 0.2
    # Passes really run in bfloat16, and on average round no more than those of transformers.
    rounding, usual = (float((each_N - exact_N).abs().mean()) for each_N in (vllm_N, half_N))
    assert 1e-3 < rounding < 1.5 * usual


def test_a_sleeping_cache_is_released_from_its_second_sleep_on_if_no_block_fills_up(found: Generated) -> None:
    first, *later, last = found.lent_bytes
    assert first == last == 0
    assert min(later) > 0
    assert found.num_forgotten == len(found.lent_bytes)


def test_data_left_in_a_sleeping_cache_changes_nothing(found: Generated) -> None:
    first, *later = found.rollouts
    assert len(set(first)) > 1
    assert later == [first] * len(later)

"""A stop in the middle of a step keeps the finished groups, and the next attempt uses them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.training.simulated_engines import SAMPLING, SimulatedRollouts
from rljob_trainer.controller import rollout_phase
from rljob_trainer.controller.finished_groups import FILE_NAME, FinishedGroups
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.rollout_phase import RolloutPhase
from rljob_trainer.controller.sampler import Ticket
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.controller.stop_request import StepAbandonedError
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.environments.episode import Counts, EnvironmentReward, FinishedEpisode
from rljob_trainer.environments.transcript import SampledTurn, TokenRow, Transcript
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.workers.columns import (
    IS_TRUNCATED,
    NUM_ROWS,
    NUM_TOKENS,
    PLAIN_RESPONSE_TEXTS,
    POLICY_VERSIONS,
    PROMPT_LENGTHS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    TOKENS,
)
from rljob_trainer.workers.conversations import conversation_columns

STEP = 7
CHECKPOINT = "step-00000007"
PROMPTS = [PromptRow(index, f"prompt {index}", f"prompt {index}", (1,), "", {}) for index in range(3)]
TICKETS = [Ticket(20 + index, STEP, index) for index in range(3)]
SEEDS = torch.arange(6) + 50


def kept_in(folder: Path, job_name: str = "job", group_size: int = 2, model: str = "model") -> FinishedGroups:
    return FinishedGroups(folder, job_name, {"model": {"source": model}}, SAMPLING, group_size, seed=0)


def phase_of(world: SimulatedRollouts, kept: FinishedGroups | None) -> RolloutPhase:
    return RolloutPhase(world.sampler, {"score": 1.0}, PhaseTimer(time.perf_counter), world.stop, finished_groups=kept)


def begun(phase: RolloutPhase) -> Rollout:
    return phase.begin(PROMPTS, 2, SAMPLING, SEEDS, tickets=TICKETS)


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores need Ray."""
    monkeypatch.setattr(rollout_phase, "stored", lambda batch: batch)


def stopped(folder: Path, num_rows: Sequence[int] = (1,)) -> None:
    """An attempt that is stopped when the first group, and half of the third, have finished."""
    world = SimulatedRollouts([1, 1, 9, 9, 1, 9], num_rows=num_rows)
    poll = world.sampler.poll

    def poll_once() -> list[int]:
        world.stop.is_requested = True
        return poll()

    world.sampler.poll = poll_once  # type: ignore[method-assign]
    kept = kept_in(folder)
    kept.begin_step()
    with pytest.raises(StepAbandonedError):
        begun(phase_of(world, kept))
    assert world.num_aborts == 1
    kept.save(CHECKPOINT, STEP)


@pytest.mark.parametrize("num_rows", [(1,), (1, 3)])
def test_finished_groups_are_not_generated_again_but_scored_again(tmp_path: Path, num_rows: Sequence[int]) -> None:
    stopped(tmp_path, num_rows)
    whole = SimulatedRollouts([1] * 6, num_rows=num_rows)
    expected = begun(phase_of(whole, None))
    kept, world = kept_in(tmp_path), SimulatedRollouts([1] * 6, num_rows=num_rows)
    kept.load(CHECKPOINT, STEP)
    phase = phase_of(world, kept)
    found = begun(phase)
    # Responses 0 and 1 are kept; 4 has finished, but not its whole group.
    assert world.submitted == [[[2, 3, 4, 5]]]
    assert sorted(world.scored_pairs) == sorted(whole.scored_pairs)
    for name in (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS):
        assert found.rows.ragged_column(name).same_as(expected.rows.ragged_column(name)), name
    assert torch.equal(found.rows[NUM_TOKENS], expected.rows[NUM_TOKENS])
    assert len(found.rows) == 6 * sum(num_rows) // len(num_rows)
    for name in (NUM_ROWS, RESPONSE_LENGTHS, PROMPT_LENGTHS, IS_TRUNCATED, SAMPLE_IDS):
        assert torch.equal(found.batch[name], expected.batch[name]), name
    for name in (RESPONSE_TEXTS, PLAIN_RESPONSE_TEXTS):
        assert found.batch.object_column(name) == expected.batch.object_column(name)
    assert phase.scored(found).rewards_B.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    # After the step nothing is left, and a stop before the next step keeps nothing.
    kept.end_step()
    assert not (tmp_path / FILE_NAME).exists()
    kept.save("step-00000008", STEP + 1)
    assert not (tmp_path / FILE_NAME).exists()


def test_rows_of_greedy_responses_are_not_trained_on() -> None:
    world = SimulatedRollouts([1] * 9, num_rows=(1, 3, 2))
    phase = phase_of(world, None)
    found = phase.scored(phase.begin(PROMPTS, 2, SAMPLING, SEEDS, with_greedy=True))
    assert found.batch[NUM_ROWS].tolist() == [1, 3, 2, 1, 3, 2]
    assert len(found.rows) == 12
    assert found.rewards_B.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert found.greedy_rewards_B is not None
    assert found.greedy_rewards_B.tolist() == [60.0, 60.0, 70.0, 70.0, 80.0, 80.0]


def test_a_stop_ends_as_usual_if_the_groups_cannot_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        stopped(tmp_path / "file" / "checkpoints")
    assert "could not save the 1 finished groups of step 8" in caplog.text


def test_a_file_that_cannot_be_removed_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with caplog.at_level(logging.WARNING):
        kept_in(tmp_path).end_step()
    assert f"{tmp_path / FILE_NAME}: finished groups cannot be removed" in caplog.text


def test_a_second_stop_keeps_what_the_first_one_has_kept(tmp_path: Path) -> None:
    stopped(tmp_path)
    kept, world = kept_in(tmp_path), SimulatedRollouts([9] * 6)
    kept.load(CHECKPOINT, STEP)
    kept.begin_step()
    world.stop.is_requested = True
    with pytest.raises(StepAbandonedError):
        begun(phase_of(world, kept))
    kept.save(CHECKPOINT, STEP)
    again = kept_in(tmp_path)
    again.load(CHECKPOINT, STEP)
    assert again.take(TICKETS[0], PROMPTS[0]) is not None
    assert again.take(TICKETS[2], PROMPTS[2]) is None


def test_a_stop_while_one_group_is_scored_and_others_are_generated_keeps_what_has_finished(tmp_path: Path) -> None:
    """Requests that were still in flight would make the checkpoint of the stop fail."""
    world, kept = SimulatedRollouts([1, 1, 1, 1, 9, 9]), kept_in(tmp_path)
    phase = phase_of(world, kept)
    world.sampler.prepare(SAMPLING, syncs=True)
    requested = phase.request(PROMPTS, 2, SEEDS, tickets=TICKETS).by_group()
    assert phase.poll(requested) == [0, 1]
    unscored = phase.collected(requested[0])
    world.stop.is_requested = True
    with pytest.raises(StepAbandonedError):
        phase.scored(unscored)
    assert (world.num_aborts, world.sampler.num_in_flight) == (1, 0)
    kept.save(CHECKPOINT, STEP)
    again = kept_in(tmp_path)
    again.load(CHECKPOINT, STEP)
    found = [again.take(ticket, prompt) for ticket, prompt in zip(TICKETS, PROMPTS, strict=True)]
    assert [group is not None for group in found] == [True, True, False]


@pytest.mark.parametrize("is_collected", [False, True])
def test_a_stop_while_only_scores_are_missing_does_not_wait_for_them(is_collected: bool) -> None:
    world = SimulatedRollouts([1, 1], polls_until_scored=99)
    phase = phase_of(world, None)
    world.sampler.prepare(SAMPLING, syncs=True)
    requested = phase.request(PROMPTS[:1], 2, SEEDS[:2], tickets=TICKETS[:1])
    world.sampler.drain()
    completed_ids = world.completed_ids

    def stops(max_seconds: float) -> list[list[int]]:
        world.stop.is_requested = True
        return completed_ids(max_seconds)

    world.completed_ids = stops  # type: ignore[method-assign]
    with pytest.raises(StepAbandonedError):
        phase.scored(phase.collected(requested)) if is_collected else phase.poll({0: requested})


@pytest.mark.parametrize("other", ["job", "model", "checkpoint", "step", "settings", "ticket", "prompt"])
def test_groups_of_other_weights_prompts_or_settings_are_not_used(
    other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(tmp_path)
    caplog.set_level(logging.INFO)
    kept = kept_in(
        tmp_path,
        "another" if other == "job" else "job",
        4 if other == "settings" else 2,
        "another" if other == "model" else "model",
    )
    checkpoint = "step-00000006" if other == "checkpoint" else CHECKPOINT
    kept.load(checkpoint, STEP - 1 if other == "step" else STEP)
    ticket = replace(TICKETS[0], ordinal=99) if other == "ticket" else TICKETS[0]
    prompt = replace(PROMPTS[0], token_ids=(2,)) if other == "prompt" else PROMPTS[0]
    assert kept.take(ticket, prompt) is None
    assert ("not used, because they are of another " in caplog.text) == (other not in ("ticket", "prompt"))


def test_a_damaged_file_is_ignored_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopped(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes().replace(b"text 50", b"text 51"))
    kept = kept_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        kept.load(CHECKPOINT, STEP)
    assert "finished groups are not used" in caplog.text
    assert kept.take(TICKETS[0], PROMPTS[0]) is None


def test_conversations_are_read_as_they_were_saved(tmp_path: Path) -> None:
    """All columns, also with several rows of a rollout, messages and named rewards."""
    row = TokenRow((1, 2, 3, 4), 2, (SampledTurn(2, (-0.5,), (7,)),))
    call = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"}
    messages = ({"role": "user", "content": "1 + 2?"}, call, {"role": "assistant", "content": "3"})
    transcript = Transcript((row, row), messages, "1 + 2?", "3", "3", 2, is_rewritten=True)
    reward = EnvironmentReward(value={"win": 0.1, "style": 1.0})
    episodes = [
        FinishedEpisode(0, Outcome.MAX_TURNS, transcript, reward, Counts(2, 1, 0.25, 0.5)),
        FinishedEpisode(1, Outcome.COMPLETED, transcript, EnvironmentReward(RewardStatus.ERROR, None, "raised")),
    ]
    batch = conversation_columns(episodes, [0, 1])
    kept = kept_in(tmp_path)
    kept.add(TICKETS[0], PROMPTS[0], batch.with_columns({SAMPLE_IDS: batch[SAMPLE_IDS] + 40}))
    kept.save(CHECKPOINT, STEP)
    again = kept_in(tmp_path)
    again.load(CHECKPOINT, STEP)
    found = again.take(TICKETS[0], PROMPTS[0])
    assert found is not None
    assert sorted(found.column_names()) == sorted(batch.column_names())
    for name, tensor in batch.tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype, name
    for name in batch.ragged:
        assert found.ragged_column(name).same_as(batch.ragged_column(name)), name
    for name in batch.objects:
        assert list(found.object_column(name)) == json.loads(json.dumps(batch.object_column(name))), name


def test_groups_of_another_environment_are_not_used(tmp_path: Path) -> None:
    plan = cast(StepPlan, SimpleNamespace(sampling=SAMPLING, group_size=2, seed=0))
    settings = []
    for max_turns in (2, 3, 3):
        environment = {"type": "Class", "classes": [{"path": "games:Guess"}], "maxContextTokens": 4096}
        edits = {
            "spec.training.environment": {**environment, "maxTurns": max_turns},
            "spec.checkpoint.keepFinishedGroups": True,
        }
        job = TrainerJob(name="job", spec=RLJob.from_wire(valid_job(edits)).spec)
        kept = FinishedGroups.of(job, tmp_path, plan)
        assert kept is not None
        settings.append(kept.settings)
    assert settings[0] != settings[1] == settings[2]

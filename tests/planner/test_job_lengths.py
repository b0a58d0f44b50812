"""The lengths of prompts, responses and conversations of a job, as the planner assumes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_planner.errors import PlanError
from rljob_planner.job_lengths import LengthOptions
from rljob_planner.job_workload import workload_of
from rljob_planner.known_models import known_model
from rljob_planner.workload import Role, Workload
from rljob_testing.jobs.valid_job import REMOVED, valid_job
from rljob_testing.messages import Mentions

T = "spec.training"


def made(edits: Mapping[str, object], lengths: LengthOptions | None = None) -> Workload:
    shape = known_model("Qwen/Qwen3-0.6B")
    assert shape is not None
    return workload_of(RLJob.from_wire(valid_job(edits)).spec, {Role.ACTOR: shape}, lengths=lengths)


def test_unknown_means_are_assumed_to_be_half_of_the_limits() -> None:
    lengths = made({f"{T}.rollout.maxNewTokens": 200}).lengths
    assert (lengths.prompt_mean, lengths.prompt_max, lengths.response_mean, lengths.response_max) == (32, 64, 100, 200)
    assert (lengths.response_mean_low, lengths.response_mean_high) == (50, 200)
    assert lengths.assumption == Mentions("prompts", "responses", "half", "--mean-prompt", "--mean-response")


def test_given_means_are_used() -> None:
    lengths = made({}, lengths=LengthOptions(10, 20)).lengths
    assert (lengths.prompt_mean, lengths.response_mean, lengths.assumption) == (10, 20, "")
    assert lengths.response_mean_low is None
    with pytest.raises(PlanError, match=r"^--mean-response: .*at most the job's limit of 64 tokens \(seen 65"):
        made({}, lengths=LengthOptions(10, 65))
    with pytest.raises(PlanError, match=r"^--mean-prompt: must be greater than 0"):
        made({}, lengths=LengthOptions(0, 20))


def test_the_longest_row_of_a_job_with_an_environment_is_a_whole_conversation() -> None:
    environment = {"type": "Class", "classes": [{"path": "my_games:Guess"}], "maxContextTokens": 1000, "maxTurns": 6}
    found = made({f"{T}.environment": environment, f"{T}.dataset": REMOVED, f"{T}.rewards": []})
    lengths = found.lengths
    assert found.rollout.max_model_length == lengths.longest_row == lengths.conversation_max == 1000
    assert (lengths.prompt_mean, lengths.prompt_max) == ((1000 - 64) / 2, 999)
    assert (lengths.response_mean, lengths.response_max, lengths.num_turns) == (32, 64, 3)
    assert any("3 turns on average" in each for each in found.assumptions)
    # All rollouts of a step are open at the same time.
    assert any("up to 32 for each rollout engine, about 1.4 GiB" in each for each in found.assumptions)
    with_rows = made({f"{T}.environment": environment | {"maxTurns": 1}})
    assert with_rows.lengths == replace(lengths, num_turns=1.0)
    assert (made({}).lengths.longest_row, made({}).lengths.num_turns) == (128, 1)


def test_a_job_with_longer_conversations_than_the_model_has_positions_gets_a_warning() -> None:
    environment = {"type": "Class", "classes": [{"path": "my_games:Guess"}], "maxContextTokens": 50_000}
    edits = {f"{T}.environment": environment, f"{T}.maxTokensPerMicroBatch": 50_000}
    assert any("reduce environment.maxContextTokens" in each for each in made(edits).assumptions)

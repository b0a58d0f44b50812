"""Several rewards of one worker: by name, concurrently, while the process does something else. Real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.reward import ErrorPolicy, FormatReward, FunctionReward, OverlongPenalty, Reward, RewardType
from rljob_testing.reward_services import completion, reward_service
from rljob_testing.training.finished_rollouts import FinishedRollouts
from rljob_testing.training.joined_workers import FinishedCall
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.rollout import ROW_COLUMNS, Rollout
from rljob_trainer.controller.rollout_phase import RolloutPhase
from rljob_trainer.controller.sampler import Engines, Sampler
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import Outcome, SamplingSettings
from rljob_trainer.errors import RewardError
from rljob_trainer.observability.samples import SampleKind
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.rewards.base import CallSettings, Takes
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.loading import call_settings, scorer_spec
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    IS_LOST,
    PROMPT_LENGTHS,
    PROMPT_TEXTS,
    RESPONSE_LENGTHS,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    SCORED_GROUPS,
    SCORES,
    TURN_BEGINNINGS,
    outcome_columns,
    score_column,
)
from rljob_trainer.workers.reward import RewardSettings, RewardWorker, ScorerSettings

USER_CODE = """
import os
import time
from pathlib import Path

def last_digit(prompt, response, answer, row):
    from rljob_trainer.rewards.base import Scored
    if response == "bad":
        raise ValueError("cannot score")
    if response == "long":
        return Scored(0.5, "7" * 10_000)
    digits = [each for each in response if each.isdigit()]
    return Scored(0.25, digits[-1] if digits else "")

def length(prompt, response, answer, row):
    if response == "bad":
        raise ValueError("cannot score")
    return len(response) / 4

def relative(prompt, responses, answer, row):
    mean = sum(map(len, responses)) / len(responses)
    return [len(each) - mean for each in responses]

def slow(prompt, response, answer, row):
    time.sleep(5.0 if response == "hang" else 0.0)
    return 1.0

def meets(prompt, response, answer, row):
    # Four processes that score at the same time: none returns before all have begun.
    folder = Path(__file__).with_name("met")
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 4:
        time.sleep(0.01)
    return 1.0
"""
CONTEXT = WorkerContext(0, 1, 0, 0, "127.0.0.1", 0, "cpu", 1)
TEXTS = ("ab", "abcd", "x1", "abcdef")
LENGTHS = (2, 4, 7, 8)
WEIGHTS = {"length": 1.0, "form": -0.5, "brief": 0.25}


def function(name: str, **limits: object) -> ScorerSettings:
    reward = Reward.model_validate(
        {"name": name, "type": RewardType.FUNCTION, "function": FunctionReward(path=f"several:{name}"), **limits}
    )
    where = f"spec.training.rewards[{name}]"
    return ScorerSettings(reward, where, FunctionScorer(f"several:{name}", f"{where}.function.path"), 2)


FORM = ScorerSettings(
    Reward(name="form", type=RewardType.FORMAT, format=FormatReward(pattern="[a-z]+")),
    "spec.training.rewards[1]",
    FormatScorer("[a-z]+", "spec.training.rewards[1].format.pattern"),
    1,
)
BRIEF = Reward(name="brief", type=RewardType.OVERLONG, overlong=OverlongPenalty(buffer_tokens=4))


@contextmanager
def worker_of(folder: Path, *scorers: ScorerSettings) -> Iterator[RewardWorker]:
    (folder / "several.py").write_text(USER_CODE)
    environment = scorer_environment(os.environ, [], [folder])
    worker = RewardWorker(CONTEXT, RewardSettings(scorers, (BRIEF,), 8, folder / "logs", environment))
    try:
        for pool in worker.pools:
            pool.wait_until_ready()
        yield worker
    finally:
        for pool in worker.pools:
            pool.close()


def responses(*texts: str) -> DataProto:
    rows = [{"prompt": "p"}] * len(texts)
    columns = {PROMPT_TEXTS: ("p",) * len(texts), RESPONSE_TEXTS: texts, ANSWERS: ("",) * len(texts)}
    columns[TURN_BEGINNINGS] = ("",) * len(texts)
    numbers = {RESPONSE_LENGTHS: torch.tensor(LENGTHS[: len(texts)]), SAMPLE_IDS: torch.arange(len(texts))}
    numbers[IS_LOST] = torch.zeros(len(texts), dtype=torch.bool)
    return DataProto(numbers, {**columns, DATASET_ROWS: tuple(rows)})


class OneWorker(FinishedRollouts):
    """A group of one RewardWorker, and a generator whose responses are ready."""

    def __init__(self, worker: RewardWorker, *texts: str) -> None:
        super().__init__()
        self.worker, self.texts = worker, texts

    def generate(self, batch: DataProto, sampling: SamplingSettings) -> DataProto:
        del batch, sampling
        columns = dict.fromkeys((*ROW_COLUMNS, PROMPT_LENGTHS), torch.tensor(LENGTHS))
        columns |= outcome_columns([Outcome.MAX_TOKENS if each == 8 else Outcome.COMPLETED for each in LENGTHS])
        return responses(*self.texts).only([RESPONSE_TEXTS, RESPONSE_LENGTHS]).with_columns(columns)

    def start_scoring(self, batch: list[DataProto]) -> FinishedCall[DataProto]:
        [part] = batch
        return FinishedCall(self.worker.start_scoring(part))

    def finish_scoring(self, batch: list[DataProto]) -> DataProto:
        [part] = batch
        return self.worker.finish_scoring(part)

    def completed_ids(self, max_seconds: float) -> list[list[int]]:
        return [self.worker.completed_ids(max_seconds)]

    def drop_scores(self) -> list[None]:
        return [self.worker.drop_scores()]

    def response_texts(self, batch: DataProto) -> DataProto:
        return self.worker.response_texts(batch)


def test_a_group_function_and_others_score_the_same_responses(tmp_path: Path) -> None:
    relative = function("relative")
    scorer = FunctionScorer("several:relative", relative.where, Takes.GROUP)
    group = replace(relative, scorer=scorer, calls=CallSettings(Takes.GROUP))
    numbers = {SCORED_GROUPS: torch.tensor([7, 9, 7, 9])}
    batch = responses("ab", "abcd", "abcdef", "x").with_columns(numbers)
    lost = batch.with_columns({IS_LOST: torch.tensor([False, False, False, True])})
    with worker_of(tmp_path, group, function("length")) as worker:
        worker.start_scoring(lost)
        scores = worker.finish_scoring(lost)
    # Response 3 was lost, so its group has one response.
    assert scores[score_column("relative")].tolist()[:3] == [-2.0, 0.0, 2.0]
    assert scores[score_column("length")].tolist()[:3] == [0.5, 1.0, 1.5]


def test_what_scorers_count_becomes_metrics_once(tmp_path: Path) -> None:
    with reward_service(lambda _: completion("Score: 1", num_tokens=(40, 2))) as server:
        job = {"url": server.url, "model": "m", "rubric": "{response}", "pattern": "Score: (.*)", "prices": [1, 1]}
        reward = Reward.model_validate({"name": "judge", "type": "Judge", "judge": job})
        spec = scorer_spec(reward, "rewards[0]", None)
        assert spec is not None
        calls = call_settings(reward, "rewards[0]", 1)
        with worker_of(tmp_path, ScorerSettings(reward, "rewards[0]", spec, 1, calls)) as worker:
            batch = responses("a", "b", "a", "c")
            worker.start_scoring(batch)
            scores = worker.finish_scoring(batch)
            counts, again = worker.take_metrics(), worker.take_metrics()
    assert scores[score_column("judge")].tolist() == [1.0] * 4
    assert {name: counts[f"reward/judge/total_{name}"] for name in ("requests", "cache_hits", "prompt_tokens")} == {
        "requests": 3,
        "cache_hits": 1,
        "prompt_tokens": 120,
    }
    assert counts["reward/judge/total_cost"] == pytest.approx(126e-6)
    assert again == {}


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the object store."""
    monkeypatch.setattr("rljob_trainer.controller.rollout_phase.stored", lambda batch: batch)


def phase_of(group: OneWorker, stop: StopRequest | None = None) -> RolloutPhase:
    stop = stop or StopRequest()
    return RolloutPhase(Sampler(group, group, Engines(), stop), WEIGHTS, PhaseTimer(time.perf_counter), stop)


def begun(phase: RolloutPhase, *given: PromptRow) -> Rollout:
    prompts = given or [PromptRow(index, "p", "p", (1, 2), "", {"prompt": "p"}) for index in range(2)]
    return phase.begin(prompts, 2, SamplingSettings(1.0, 1.0, 0, 8, ()), torch.zeros(4, dtype=torch.int64))


@pytest.mark.usefixtures("in_place")
def test_rewards_are_columns_metrics_and_samples_by_name_and_their_weighted_sum_is_the_score(tmp_path: Path) -> None:
    with worker_of(tmp_path, function("length"), FORM) as worker:
        phase = phase_of(OneWorker(worker, *TEXTS))
        rollout = phase.scored(begun(phase))
        samples = phase.samples(rollout.selected(torch.arange(3)), 3, SampleKind.TRAIN)
    # By hand: a quarter of the characters; letters only or not; 4 of 8 tokens are free, then a quarter for each.
    named = {"length": [0.5, 1.0, 0.5, 1.5], "form": [1.0, 1.0, 0.0, 1.0], "brief": [0.0, 0.0, -0.75, -1.0]}
    totals = [0.5 - 0.5, 1.0 - 0.5, 0.5 - 0.1875, 1.5 - 0.5 - 0.25]
    assert {name: each.tolist() for name, each in rollout.named_rewards_B.items()} == named
    assert rollout.weights == WEIGHTS
    assert list(rollout.named_rewards_B) == list(WEIGHTS)
    assert rollout.batch[SCORES].tolist() == totals
    assert rollout.rewards_B.dtype == torch.float32
    metrics = rollout.metrics()
    assert metrics["critic/rewards/mean"] == sum(totals) / 4
    for name, values in named.items():
        assert metrics[f"reward/{name}/mean"] == sum(values) / 4
        assert metrics[f"reward/{name}/max"] == max(values)
        assert metrics[f"reward/{name}/min"] == min(values)
    assert "reward/brief/error_rate" not in metrics
    assert metrics["reward/form/error_rate"] == metrics["reward/error_rate"] == 0.0
    assert [sample.score for sample in samples] == totals[:3]
    assert [sample.group for sample in samples] == [0, 0, 1]
    assert samples[2].rewards == {"length": 0.5, "form": 0.0, "brief": -0.75}


@pytest.mark.usefixtures("in_place")
def test_only_the_rewards_that_a_dataset_names_score_its_prompts(tmp_path: Path) -> None:
    named = {"maths": ("length", "brief"), "style": ("form",)}
    prompts = [PromptRow(0, "p", "p", (1, 2), "", {}, dataset=name, rewards=named[name], source="w") for name in named]
    with worker_of(tmp_path, function("length"), FORM) as worker:
        phase = phase_of(OneWorker(worker, "ab", "abcd", "bad", "x1"))
        phase.names_rewards = True
        rollout = phase.scored(begun(phase, *prompts))
        samples, metrics = phase.samples(rollout, 1, SampleKind.TRAIN), rollout.metrics()
    assert rollout.rewards_B.tolist() == [0.5, 1.0, -0.5, 0.0]
    assert (rollout.is_excluded_B.any(), len(rollout.reasons())) == (False, 0)
    assert (samples[2].source, samples[2].rewards["length"], samples[2].rewards["form"]) == ("style/w", None, 1.0)
    assert (metrics["reward/length/mean"], metrics["reward/error_rate"], metrics["data/maths/prompts"]) == (0.75, 0, 1)


@pytest.mark.usefixtures("in_place")
def test_the_extracted_answer_of_a_reward_is_in_the_samples_by_its_name(tmp_path: Path) -> None:
    """For rewards that report one, and for responses that were scored; with bounded length."""
    tolerant = function("last_digit", on_error=ErrorPolicy.SCORE)
    with worker_of(tmp_path, tolerant, FORM) as worker:
        phase = phase_of(OneWorker(worker, "a1b2", "none", "bad", "long"))
        phase.weights = {"last_digit": 1.0, "form": 0.0, "brief": 0.0}
        rollout = phase.scored(begun(phase))
        samples = phase.samples(rollout, 3, SampleKind.SAMPLED)
    assert rollout.rewards_B.tolist() == [0.25, 0.25, 0.0, 0.5]
    assert [sample.found for sample in samples[:3]] == [{"last_digit": "2"}, {"last_digit": ""}, {}]
    assert samples[3].found["last_digit"] == f"{'7' * 100} ... (9800 characters) ... {'7' * 100}"


@pytest.mark.usefixtures("in_place")
def test_rewards_and_samples_have_the_start_of_the_turn_in_the_response_and_not_in_the_prompt(
    tmp_path: Path,
) -> None:
    thought = Reward(name="form", type=RewardType.FORMAT, format=FormatReward(pattern="<think>.*</think>.*"))
    scorer = FormatScorer("<think>.*</think>.*", "spec.training.rewards[1].format.pattern")
    prompts = [
        PromptRow(0, "<|user|>p<|assistant|><think>\n", "p", (1, 2), "", {}, turn_beginning="<think>\n"),
        PromptRow(1, "q", "q", (1, 2), "", {}),
    ]
    with worker_of(tmp_path, function("length"), ScorerSettings(thought, "rewards[1]", scorer, 1)) as worker:
        phase = phase_of(OneWorker(worker, "a</think>b", "a", "a</think>b", "<think></think>b"))
        seeds_B = torch.zeros(4, dtype=torch.int64)
        rollout = phase.run(prompts, 2, SamplingSettings(1.0, 1.0, 0, 8, ()), seeds_B)
        samples = phase.samples(rollout, 1, SampleKind.TRAIN)
    assert rollout.named_rewards_B["form"].tolist() == [1.0, 0.0, 0.0, 1.0]
    # A quarter of the characters; those of "<think>\n" are 8.
    assert rollout.named_rewards_B["length"].tolist() == [4.5, 2.25, 2.5, 4.0]
    assert [(sample.prompt, sample.response) for sample in samples] == [
        ("<|user|>p<|assistant|>", "<think>\na</think>b"),
        ("<|user|>p<|assistant|>", "<think>\na"),
        ("q", "a</think>b"),
        ("q", "<think></think>b"),
    ]


@pytest.mark.usefixtures("in_place")
def test_failures_are_counted_for_each_reward(tmp_path: Path) -> None:
    """An error gets the error score, as the job says; a timeout excludes its response."""
    tolerant = function("length", on_error=ErrorPolicy.SCORE, error_score=-2.0)
    slow = function("slow", timeout_seconds=1.0)
    with worker_of(tmp_path, tolerant, FORM, slow) as worker:
        phase = phase_of(OneWorker(worker, "bad", "hang", "a", "bad"))
        phase.weights = {**WEIGHTS, "slow": 1.0}
        rollout = phase.scored(begun(phase))
        metrics, samples = rollout.metrics(), phase.samples(rollout, 1, SampleKind.TRAIN)
    assert metrics["reward/length/error_rate"] == 0.5
    assert metrics["reward/length/min"] == -2.0
    assert metrics["reward/slow/timeout_rate"] == 0.25
    assert metrics["reward/slow/mean"] == 1.0
    assert (metrics["reward/slow/error_rate"], metrics["reward/form/error_rate"]) == (0.0, 0.0)
    assert (metrics["reward/error_rate"], metrics["reward/timeout_rate"]) == (0.5, 0.25)
    assert rollout.is_excluded_B.tolist() == [False, True, False, False]
    assert rollout.reasons() == {("slow", "TIMEOUT"): 1}
    assert [sample.score for sample in samples][:2] == [pytest.approx(-2.0 - 0.5 + 1.0), None]
    assert samples[1].rewards == {"length": 1.0, "form": 1.0, "brief": 0.0, "slow": None}
    assert samples[1].statuses == {"length": "OK", "form": "OK", "slow": "TIMEOUT"}
    assert [sample.outcome for sample in samples] == ["COMPLETED", "COMPLETED", "COMPLETED", "MAX_TOKENS"]


@pytest.mark.usefixtures("in_place")
def test_a_failure_beyond_the_limit_names_its_reward_unless_a_stop_was_requested(tmp_path: Path) -> None:
    stop = StopRequest()
    with worker_of(tmp_path, function("length"), FORM) as worker:
        phase = phase_of(OneWorker(worker, "bad", "a", "a", "a"), stop)
        with pytest.raises(RewardError, match=r"rewards\[length\] \(reward length\): several:length raised ValueError"):
            phase.scored(begun(phase))
        unscored = begun(phase)
        stop.is_requested = True
        with pytest.raises(StepAbandonedError):
            phase.scored(unscored)
        # Work that was abandoned is not in the way.
        stop.is_requested = False
        phase = phase_of(OneWorker(worker, *TEXTS))
        begun(phase)
        assert phase.scored(begun(phase)).named_rewards_B["form"].tolist() == [1.0, 1.0, 0.0, 1.0]


def test_scores_are_collected_for_any_responses_in_any_order(tmp_path: Path) -> None:
    def started(*samples: tuple[int, str]) -> None:
        ids = torch.tensor([sample_id for sample_id, _ in samples])
        worker.start_scoring(responses(*(text for _, text in samples)).with_columns({SAMPLE_IDS: ids}))

    def lengths_of(*ids: int) -> list[float]:
        scores = worker.finish_scoring(DataProto({SAMPLE_IDS: torch.tensor(ids)}))
        return [float(score) for score in scores[score_column("length")]]

    with worker_of(tmp_path, function("length")) as worker:
        started((7, "a"), (3, "ab"))
        started((5, "abc"))
        # Responses of two calls, and not all of the first one.
        assert lengths_of(5, 7) == [0.75, 0.25]
        started((8, "abcd"))
        assert lengths_of(8, 3) == [1.0, 0.5]
        assert not worker.started


def test_a_call_that_waits_for_scores_returns_each_response_once(tmp_path: Path) -> None:
    """Otherwise a controller that waits for the rest of a group would call again and again without waiting."""
    with worker_of(tmp_path, function("slow", timeout_seconds=600.0)) as worker:
        worker.start_scoring(responses("a"))
        worker.start_scoring(responses("hang").with_columns({SAMPLE_IDS: torch.tensor([1])}))
        assert worker.completed_ids(60.0) == [0]
        assert worker.completed_ids(0.01) == []
        worker.finish_scoring(DataProto({SAMPLE_IDS: torch.tensor([0])}))
        assert not worker.reported


def test_dropped_responses_do_not_delay_the_scoring_of_the_next_ones(tmp_path: Path) -> None:
    with worker_of(tmp_path, function("slow", timeout_seconds=600.0)) as worker:
        worker.start_scoring(responses("hang"))
        [[outcomes]] = [response.outcomes for response in worker.started.values()]
        worker.drop_scores()
        assert outcomes.cancelled()


def test_a_response_that_the_engine_did_not_complete_is_not_sent_to_a_reward(tmp_path: Path) -> None:
    """The reward raises an error for it, and its `onError` is Fail."""
    with worker_of(tmp_path, function("length")) as worker:
        incomplete = {IS_LOST: torch.tensor([False, True, False])}
        worker.start_scoring(responses("ab", "bad", "abcd").with_columns(incomplete))
        scores = worker.finish_scoring(DataProto({SAMPLE_IDS: torch.tensor([2, 0, 1])}))
    assert scores[score_column("length")].tolist() == [1.0, 0.5, 0.0]


def test_rewards_are_scored_concurrently_while_the_process_works(tmp_path: Path) -> None:
    """Two rewards of two processes each, which wait for each other before their scores are requested."""
    (tmp_path / "met").mkdir()
    again = function("meets", timeout_seconds=60.0)
    other = ScorerSettings(again.reward.model_copy(update={"name": "other"}), again.where, again.scorer, 2)
    with worker_of(tmp_path, again, other) as worker:
        worker.start_scoring(responses("a", "b"))
        give_up_at = time.monotonic() + 60
        while len(list((tmp_path / "met").iterdir())) < 4:
            assert time.monotonic() < give_up_at, "one reward waits for another"
            time.sleep(0.01)
        scores = worker.finish_scoring(DataProto({SAMPLE_IDS: torch.arange(2)}))
    assert scores[score_column("meets")].tolist() == scores[score_column("other")].tolist() == [1.0, 1.0]

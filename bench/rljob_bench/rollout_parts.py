"""The measurements of rollouts whose responses end at different times: scoring meanwhile, load balancing, and
dynamic sampling without rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rljob_bench.forced_rollouts import GROUP_SIZE, LONGEST, SAMPLING, Rollouts, prompt_rows, seeds_of
from rljob_bench.list_schedule import long_tailed, num_steps, num_steps_longest_first, num_steps_of_equal_parts
from rljob_bench.report import OURS, Bar, Measurement, ratio
from rljob_bench.rounds import Timings, Turn, interleaved
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.rollout_phase import RolloutPhase, prompt_batch
from rljob_trainer.controller.sampler import REWARD_COLUMNS
from rljob_trainer.controller.training_step import tickets_of
from rljob_trainer.datasets.cursor import DrawnRow
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.workers.columns import RESPONSE_LENGTHS, RESPONSE_TEXTS, SAMPLE_IDS

NUM_GROUPS = 16
SCORE_SECONDS = 2.0
MAX_OVERLAP_RATIO = 1.1
MEDIAN_LENGTH = 80
NUM_DRAWS, NUMBERS_OF_ENGINES = 200, (2, 4, 8, 16)
"""For the ratios that are only computed."""
FIRST_AFTERWARDS_ID = 10**9
"""SAMPLE_IDS that no sampler uses."""
WITHOUT, WITH, AFTERWARDS = "no time to score", f"{OURS}", "scored after the last response"
STATIC, DYNAMIC = f"{OURS}, Static", f"{OURS}, Dynamic"
ONE_QUEUE = "list schedule, one queue"
MAX_SCHEDULE_RATIO = 1.05
ROUND, CONTINUOUS = f"{OURS}, Round", f"{OURS}, Continuous"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    step_seconds: float
    num_rounds: int
    divisor: int = 1
    """Lengths and the time of a score are divided by this."""

    def length(self, tokens: int) -> int:
        """The length of a response that would otherwise have this many tokens."""
        return max(1, tokens // self.divisor)


def scoring(rollouts: Rollouts, scale: Scale) -> Measurement:
    """Groups of responses end evenly over the rollout; the seconds until all scores are there."""
    lengths = [
        scale.length(LONGEST * (group + 1) // NUM_GROUPS) for group in range(NUM_GROUPS) for _ in range(GROUP_SIZE)
    ]
    score_seconds = SCORE_SECONDS / scale.divisor
    free = prompt_rows(rollouts.model, NUM_GROUPS)
    slow = prompt_rows(rollouts.model, NUM_GROUPS, seconds=score_seconds)
    rollouts.set_step_seconds(scale.step_seconds)
    phase = rollouts.phase()
    warm_up(phase, free)
    waited: dict[str, list[float]] = {WITHOUT: [], WITH: [], AFTERWARDS: []}
    afterwards: list[float] = []

    def whole(name: str, prompts: Sequence[PromptRow]) -> tuple[Rollout, float]:
        begun = time.perf_counter()
        rollout = phase.run(prompts, GROUP_SIZE, SAMPLING, seeds_of(lengths))
        seconds = time.perf_counter() - begun
        waited[name].append(phase.timer.take()["timing_s/reward"])
        return rollout, seconds

    def without() -> list[float]:
        rollout, seconds = whole(WITHOUT, free)
        waited[AFTERWARDS].append(seconds_to_score(rollouts, rollout, slow))
        afterwards.append(seconds + waited[AFTERWARDS][-1])
        return [seconds]

    timings = interleaved({WITHOUT: without, WITH: lambda: [whole(WITH, slow)[1]]}, scale.num_rounds, counts_first=True)
    seconds = {name: each.seconds for name, each in timings.items()} | {AFTERWARDS: tuple(afterwards)}
    base = statistics.median(seconds[WITHOUT])
    rows = {
        name: (min(each), statistics.median(each), statistics.median(each) / base, statistics.median(waited[name]))
        for name, each in seconds.items()
    }
    return Measurement(
        f"Scoring while others generate: {len(lengths)} responses in {NUM_GROUPS} groups, 8 scoring processes, "
        f"{score_seconds:g} s per score",
        ("fastest, s", "median, s", f"median / {WITHOUT}", "after the last response, s"),
        rows,
        (Bar(f"at most 10 % longer than with {WITHOUT}", ratio(timings, WITH, WITHOUT), MAX_OVERLAP_RATIO),),
        seconds,
    )


def load_balancing(rollouts: Rollouts, scale: Scale, num_responses: int, seed: int) -> Measurement:
    """Responses with a long tail on two engines whose slots are the limit. `seed`: of the lengths."""
    engines, num_groups = rollouts.engines, num_responses // GROUP_SIZE
    lengths = drawn_lengths(scale, num_groups, seed)
    rollouts.set_step_seconds(scale.step_seconds)
    phases = {STATIC: rollouts.phase(), DYNAMIC: rollouts.phase(replace(engines, is_load_balanced=True))}
    prompts = prompt_rows(rollouts.model, num_groups)
    for phase in phases.values():
        warm_up(phase, prompts)
    rollouts.take_steps()
    steps: list[tuple[int, float]] = []
    num_made: dict[str, int] = {}

    def turn(name: str) -> list[float]:
        begun = time.perf_counter()
        phases[name].run(prompts, GROUP_SIZE, SAMPLING, seeds_of(lengths))
        seconds = time.perf_counter() - begun
        made = rollouts.take_steps()
        num_made[name] = max(number for number, _ in made)
        steps.extend(made)
        return [seconds]

    turns: dict[str, Turn] = {STATIC: lambda: turn(STATIC), DYNAMIC: lambda: turn(DYNAMIC)}
    timings = interleaved(turns, scale.num_rounds, counts_first=True)
    step_seconds = sum(seconds for _, seconds in steps) / sum(number for number, _ in steps)
    base = timings[DYNAMIC].median
    rows: dict[str, tuple[float | None, ...]] = {
        name: (num_made[name], each.fastest, each.median, each.median / base) for name, each in timings.items()
    }
    for name, number in schedules(lengths, engines.num_engines, engines.max_num_sequences).items():
        rows[name] = (number, None, number * step_seconds, number * step_seconds / base)
    return Measurement(
        f"Load balancing of {num_responses} responses on two engines of {engines.max_num_sequences} sequences, lengths "
        f"{seed} ({1e3 * step_seconds:.1f} ms per step)",
        ("steps", "fastest, s", "median, s", f"median / {DYNAMIC}"),
        rows,
        (
            Bar(
                f"{DYNAMIC} at most 5 % longer than {ONE_QUEUE}", base / (rows[ONE_QUEUE][2] or 1.0), MAX_SCHEDULE_RATIO
            ),
        ),
        {name: each.seconds for name, each in timings.items()},
    )


def refilling(rollouts: Rollouts, scale: Scale) -> Measurement:
    """Dynamic sampling when half of the groups have equal scores."""
    num_prompts = 10 * NUM_GROUPS
    differ = np.random.default_rng(0).permutation(np.arange(num_prompts) % 2 == 0).tolist()
    prompts = prompt_rows(rollouts.model, num_prompts, differ=differ)
    lengths = np.array(drawn_lengths(scale, num_prompts, 0)).reshape(num_prompts, GROUP_SIZE)
    rollouts.set_step_seconds(scale.step_seconds)
    phase = rollouts.phase()
    warm_up(phase, prompts[:NUM_GROUPS])
    num_generated: dict[str, int] = {}
    taken: dict[str, list[int]] = {}

    def seeds(rows: Sequence[PromptRow]) -> torch.Tensor:
        return seeds_of(lengths[[each.index for each in rows]].flatten().tolist())

    def turn(name: str) -> list[float]:
        sampling = rollouts.dynamic_sampling(prompts, name.rpartition(" ")[2])
        drawn = sampling.cursor.next_batch(NUM_GROUPS)
        before, begun = phase.sampler.num_samples, time.perf_counter()
        if sampling.is_continuous:
            phase.sampler.prepare(SAMPLING, syncs=False)
            rows = sampling.filled_continuously(
                drawn,
                0,
                lambda fresh, first: phase.request(
                    rows_of(fresh), GROUP_SIZE, seeds(rows_of(fresh)), tickets=tickets_of(fresh, 0, first)
                ),
                phase,
            )
        else:
            rows = sampling.filled(
                drawn,
                0,
                lambda fresh, first: phase.scored(
                    phase.begin(
                        rows_of(fresh),
                        GROUP_SIZE,
                        SAMPLING,
                        seeds(rows_of(fresh)),
                        syncs=False,
                        tickets=tickets_of(fresh, 0, first),
                    )
                ),
            )
        seconds = time.perf_counter() - begun
        num_generated[name] = phase.sampler.num_samples - before
        taken[name] = [each.index for each in rows.rollout.prompts]
        return [seconds]

    turns: dict[str, Turn] = {ROUND: lambda: turn(ROUND), CONTINUOUS: lambda: turn(CONTINUOUS)}
    timings = interleaved(turns, scale.num_rounds, counts_first=True)
    assert taken[ROUND] == taken[CONTINUOUS], f"the groups differ: {taken}"
    return _of_refills(rollouts, timings, num_generated)


def _of_refills(rollouts: Rollouts, timings: Mapping[str, Timings], num_generated: Mapping[str, int]) -> Measurement:
    base = timings[CONTINUOUS].median
    rows = {
        name: (num_generated[name], each.fastest, each.median, each.median / base) for name, each in timings.items()
    }
    return Measurement(
        f"Dynamic sampling of {NUM_GROUPS} groups, half of all groups have equal scores; one engine of "
        f"{rollouts.engines.max_num_sequences} sequences",
        ("responses", "fastest, s", "median, s", f"median / {CONTINUOUS}"),
        rows,
        (Bar(f"{CONTINUOUS} at most as long as {ROUND}", ratio(timings, CONTINUOUS, ROUND), 1.0),),
        {name: each.seconds for name, each in timings.items()},
    )


def rows_of(drawn: Sequence[DrawnRow[PromptRow]]) -> list[PromptRow]:
    """The prompts without their places in the data."""
    return [each.row for each in drawn]


def warm_up(phase: RolloutPhase, prompts: Sequence[PromptRow]) -> None:
    """Generates short responses, so that the engines have weights and the scoring processes are loaded."""
    phase.run(prompts, GROUP_SIZE, SAMPLING, seeds_of([4] * len(prompts) * GROUP_SIZE))
    phase.timer.take()


def seconds_to_score(rollouts: Rollouts, rollout: Rollout, prompts: Sequence[PromptRow]) -> float:
    """The seconds in which the reward worker scores all of these responses at once. `prompts`: one per group."""
    ids = torch.arange(FIRST_AFTERWARDS_ID, FIRST_AFTERWARDS_ID + len(rollout.prompts))
    texts = rollout.batch.only([RESPONSE_TEXTS, RESPONSE_LENGTHS]).with_columns({SAMPLE_IDS: ids})
    rows = texts.union(prompt_batch(prompts).repeat(GROUP_SIZE).only(REWARD_COLUMNS))
    begun = time.perf_counter()
    rollouts.reward.start_scoring([rows]).result()
    rollouts.reward.finish_scoring([rows.only([SAMPLE_IDS])])
    return time.perf_counter() - begun


def drawn_lengths(scale: Scale, num_groups: int, seed: int) -> list[int]:
    """Lengths of responses with a long tail."""
    drawn = long_tailed(num_groups, GROUP_SIZE, MEDIAN_LENGTH, LONGEST, seed)
    return [scale.length(tokens) for tokens in drawn]


def schedules(lengths: Sequence[int], num_engines: int, num_slots: int) -> dict[str, int]:
    """The steps of each list schedule."""
    return {
        "list schedule, a queue per engine": num_steps_of_equal_parts(lengths, num_engines, num_slots),
        ONE_QUEUE: num_steps(lengths, num_engines * num_slots),
        "list schedule, longest first": num_steps_longest_first(lengths, num_engines * num_slots),
    }


def many_schedules(num_slots: int) -> Measurement:
    """The list schedules of many draws of lengths, for several numbers of engines. Nothing is run."""
    rows: dict[str, tuple[float | None, ...]] = {}
    for num_engines in NUMBERS_OF_ENGINES:
        for per_slot in (3, 8):
            num_responses, found = per_slot * num_engines * num_slots, []
            for seed in range(NUM_DRAWS):
                lengths = long_tailed(num_responses // GROUP_SIZE, GROUP_SIZE, MEDIAN_LENGTH, LONGEST, seed)
                found.append(list(schedules(lengths, num_engines, num_slots).values()))
            apart, one, best = np.array(found).T
            rows[f"{num_engines} engines, {num_responses} responses"] = (
                float((apart / one).mean()),
                float((apart < one).mean()),
                float((one / best).mean()),
            )
    return Measurement(
        f"Computed: list schedules of {NUM_DRAWS} draws, {num_slots} sequences per engine",
        ("queue per engine / one queue, mean", "draws in which it is faster", "one queue / longest first, mean"),
        rows,
    )

"""What the controller's polls of an engine cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from rljob_bench.forced_rollouts import GROUP_SIZE, SAMPLING, Rollouts, prompt_rows, seeds_of
from rljob_bench.report import OURS, Bar, Measurement
from rljob_bench.rollout_parts import NUM_GROUPS, Scale, drawn_lengths, warm_up
from rljob_bench.rounds import Turn, interleaved, timed_calls
from rljob_trainer.controller import sampler as sampler_module
from rljob_trainer.controller.rollout_phase import prompt_batch
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.workers.columns import PROMPT_TOKEN_IDS, SAMPLE_IDS, SAMPLE_SEEDS

NUM_TAKEN = 8
TAKEN_TOKENS = 320
WHOLE_SECONDS = 3600.0
"""Longer than any rollout."""
POLLS, ONE_CALL = f"{OURS}, a poll every {sampler_module.TAKE_SECONDS:g} s", "one call that waits for all"
MAX_POLL_SHARE = 1.05
NUM_SHARE_ROUNDS = 4
"""For each round of the other parts, because these rollouts are short."""


def calls(rollouts: Rollouts, scale: Scale) -> Measurement:
    """Milliseconds of single calls."""
    prompts = prompt_rows(rollouts.model, NUM_GROUPS)
    rollouts.set_step_seconds(0.0)
    warm_up(rollouts.phase(), prompts)
    num_calls = 10 * scale.num_rounds
    timings = {
        "no call": [call_cost(rollouts, lambda: None) for _ in range(num_calls)],
        "take, nothing": [call_cost(rollouts, lambda: rollouts.hybrid.take(0.0)) for _ in range(num_calls)],
        f"take, {NUM_TAKEN} responses": [taken(rollouts, prompts, scale) for _ in range(num_calls)],
        f"poll, {NUM_TAKEN} responses, with the start of their scoring": [
            polled(rollouts, prompts, scale) for _ in range(num_calls)
        ],
    }
    base = statistics.median(cpu for _, cpu in timings.pop("no call"))
    rows: dict[str, tuple[float | None, ...]] = {}
    for name, costs in timings.items():
        seconds = [each for each, _ in costs]
        cpu = statistics.median(each for _, each in costs) - base
        rows[name] = (1e3 * min(seconds), 1e3 * statistics.median(seconds), max(0.0, 1e3 * cpu))
    of_busy = takes_beside_generation(rollouts, prompts, scale, num_calls)
    rows["take, nothing, while the engine generates"] = (1e3 * min(of_busy), 1e3 * statistics.median(of_busy), None)
    return Measurement(
        f"Calls of a poll; {OURS}, one engine, responses of {scale.length(TAKEN_TOKENS)} tokens",
        ("fastest, ms", "median, ms", "processor time of the worker, median, ms"),
        rows,
    )


def share(rollouts: Rollouts, scale: Scale) -> Measurement:
    """Rollouts at full speed with and without polls. Other programs on the machine change their seconds more than the
    polls do, so the processor time of the worker process, with all of its threads, is measured, too."""
    prompts = prompt_rows(rollouts.model, NUM_GROUPS)
    lengths = drawn_lengths(scale, NUM_GROUPS, 0)
    rollouts.set_step_seconds(0.0)
    phase = rollouts.phase()
    warm_up(phase, prompts)
    rollouts.take_steps()
    steps: list[tuple[int, float]] = []
    busy: dict[str, list[float]] = {ONE_CALL: [], POLLS: []}

    def turn(name: str) -> list[float]:
        [before] = rollouts.cpu_seconds()
        phase.run(prompts, GROUP_SIZE, SAMPLING, seeds_of(lengths))
        [after] = rollouts.cpu_seconds()
        busy[name].append(after - before)
        steps.extend(rollouts.take_steps())
        return [phase.timer.take()["timing_s/rollout"]]

    def one_call() -> list[float]:
        with take_seconds(WHOLE_SECONDS):
            return turn(ONE_CALL)

    turns: dict[str, Turn] = {ONE_CALL: one_call, POLLS: lambda: turn(POLLS)}
    timings = interleaved(turns, NUM_SHARE_ROUNDS * scale.num_rounds, counts_first=True)
    base, base_busy = timings[ONE_CALL].median, statistics.median(busy[ONE_CALL])
    step_seconds = sum(seconds for _, seconds in steps) / sum(number for number, _ in steps)
    return Measurement(
        f"Polls in a rollout without a minimum time of a step ({1e3 * step_seconds:.1f} ms per step)",
        ("fastest, s", "median, s", f"median / {ONE_CALL}", "processor time of the worker, s", f"/ {ONE_CALL}"),
        {
            name: (
                each.fastest,
                each.median,
                each.median / base,
                statistics.median(busy[name]),
                statistics.median(busy[name]) / base_busy,
            )
            for name, each in timings.items()
        },
        (
            Bar(
                "processor time of the worker with polls: at most 5 % more",
                statistics.median(busy[POLLS]) / base_busy,
                MAX_POLL_SHARE,
            ),
        ),
        {name: each.seconds for name, each in timings.items()},
    )


def takes_beside_generation(
    rollouts: Rollouts, prompts: Sequence[PromptRow], scale: Scale, num_calls: int
) -> list[float]:
    """Seconds of calls that return nothing while the engine generates."""
    rollouts.hybrid.begin_rollout(False)
    seconds: list[float] = []
    while len(seconds) < num_calls:
        submit(rollouts, prompts, scale)
        seconds += timed_calls(lambda: rollouts.hybrid.take(0.0), 10)
        rollouts.hybrid.take(WHOLE_SECONDS)
    return seconds[:num_calls]


def call_cost(rollouts: Rollouts, call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, and the processor time of the worker process, with that of one call that asks for it."""
    [before] = rollouts.cpu_seconds()
    [seconds] = timed_calls(call, 1)
    [after] = rollouts.cpu_seconds()
    return seconds, after - before


def taken(rollouts: Rollouts, prompts: Sequence[PromptRow], scale: Scale) -> tuple[float, float]:
    """The cost of a call that returns responses that have ended before."""
    rollouts.hybrid.begin_rollout(False)
    submit(rollouts, prompts, scale)
    return after_generation(rollouts, scale, lambda: rollouts.hybrid.take(0.0))


def polled(rollouts: Rollouts, prompts: Sequence[PromptRow], scale: Scale) -> tuple[float, float]:
    """The same for a poll of the sampler."""
    sampler = rollouts.sampler()
    sampler.prepare(SAMPLING, syncs=False)
    inputs = prompt_batch(prompts[:NUM_TAKEN])
    lengths = [scale.length(TAKEN_TOKENS)] * NUM_TAKEN
    ids = sampler.submit(inputs.with_columns({SAMPLE_SEEDS: seeds_of(lengths)}))
    cost = after_generation(rollouts, scale, sampler.poll)
    sampler.take_rows(ids)
    sampler.finish_scoring(ids)
    return cost


def submit(rollouts: Rollouts, prompts: Sequence[PromptRow], scale: Scale) -> None:
    """Requests NUM_TAKEN responses of equal length."""
    rollouts.take_steps()
    lengths = [scale.length(TAKEN_TOKENS)] * NUM_TAKEN
    columns = {SAMPLE_SEEDS: seeds_of(lengths), SAMPLE_IDS: torch.arange(NUM_TAKEN)}
    batch = prompt_batch(prompts[:NUM_TAKEN]).only([PROMPT_TOKEN_IDS]).with_columns(columns)
    rollouts.hybrid.submit([batch], SAMPLING)


def after_generation(rollouts: Rollouts, scale: Scale, call: Callable[[], object]) -> tuple[float, float]:
    """Waits until NUM_TAKEN responses have ended, and returns the cost of the call."""
    num_steps = 0
    while num_steps < scale.length(TAKEN_TOKENS):
        time.sleep(0.02)
        num_steps += sum(number for number, _ in rollouts.take_steps())
    return call_cost(rollouts, call)


@contextmanager
def take_seconds(seconds: float) -> Iterator[None]:
    """In this block, polls of this process wait that long for responses."""
    before = sampler_module.TAKE_SECONDS
    sampler_module.TAKE_SECONDS = seconds
    try:
        yield
    finally:
        sampler_module.TAKE_SECONDS = before

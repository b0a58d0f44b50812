"""Compares the planner's times with published measurements (bench/planner.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rljob_bench.published_runs import (
    GPUS_PER_NODE,
    PPO_SOURCE,
    PublishedDecoding,
    PublishedStep,
    PublishedUpdate,
    held_back_steps,
    ppo_placements,
    ppo_workload,
    published_decoding,
    published_steps,
    published_updates,
)
from rljob_bench.report import Bar, Measurement
from rljob_planner.advice.calibration import (
    DECODE_BANDWIDTH,
    DECODE_STEP,
    PASS_EFFICIENCY,
    PER_STEP,
    STEP,
    Adjustable,
    Observation,
    fit,
)
from rljob_planner.constants import Constants
from rljob_planner.kv_cache import engine_budget
from rljob_planner.timing.communication import NodeType
from rljob_planner.timing.generation import Requests, generation_cost
from rljob_planner.timing.lengths import Lengths
from rljob_planner.timing.passes import rows_of, update_cost
from rljob_planner.timing.step import step_time
from rljob_planner.workload import TrainLayout

EXPERT_EFFICIENCY = Adjustable(0.5, ("expert_efficiency_factor",))
FITTED = (PASS_EFFICIENCY, EXPERT_EFFICIENCY, DECODE_STEP, DECODE_BANDWIDTH, PER_STEP)
"""Five constants for all programs and kinds of GPU."""
NOISE = 0.25
"""Expected relative difference between other programs' steps and a correct model of ours."""
SERVER_STEP_SECONDS = 1.5e-3
"""Decode step of a server that does nothing else, in seconds per token of a batch; `decode_step_seconds` is for
training steps."""
MAX_MEAN_ERROR = 0.25
MAX_ERROR = 0.2
PPO_SIZES = (32, 64, 96, 128)
COLOCATED_UP_TO = 64
"""The largest number of GPUs in row 12 at which colocated roles were measured to be fastest."""


def time_measurements() -> tuple[Measurement, ...]:
    """All measurements; they take a second or two."""
    return (steps_left_out(), steps_held_back(), parts_of_steps(), ranking())


def steps_left_out() -> Measurement:
    """Rows 1 to 7, each predicted with constants that were fitted to the six other rows, starting at the defaults."""
    steps = published_steps()
    rows: dict[str, tuple[float | None, ...]] = {}
    errors: list[float] = []
    for step in steps:
        measured = step.seconds[STEP]
        default = _predicted(step, Constants())
        fitted = _predicted(step, fit(Constants(), _observations(steps, step.row), FITTED, NOISE))
        errors.append(abs(fitted / measured - 1))
        rows[f"{step.row} {step.title}"] = (measured, default, default / measured, fitted, fitted / measured)
    bar = Bar("mean error of what was left out", sum(errors) / len(errors), MAX_MEAN_ERROR)
    header = ("measured, s", "by defaults, s", "of measured", "left out, s", "of measured")
    return Measurement("Seconds of a step: published runs", header, rows, (bar,), num_decimals=2)


def steps_held_back() -> Measurement:
    """Predictions with the default constants for rows that were not used to choose anything, so there is no bar. The
    last number of the table is the mean error."""
    rows: dict[str, tuple[float | None, ...]] = {}
    for step in held_back_steps():
        found, measured = step_time(step.workload, step.placement, Constants()).total, step.seconds[STEP]
        likely = found.likely / measured
        rows[f"{step.row} {step.title}"] = (measured, found.low, found.likely, found.high, likely, abs(likely - 1))
    errors = [each[-1] or 0.0 for each in rows.values()]
    rows["mean"] = (None, None, None, None, None, sum(errors) / len(errors))
    header = ("measured, s", "low, s", "by defaults, s", "high, s", "of measured", "error")
    return Measurement("Seconds of a step: published runs that were held back", header, rows, num_decimals=2)


def _observations(steps: Sequence[PublishedStep], without: int) -> list[Observation]:
    return [Observation(each.workload, each.placement, each.seconds) for each in steps if each.row != without]


def _predicted(step: PublishedStep, constants: Constants) -> float:
    return step_time(step.workload, step.placement, constants).total.likely


def parts_of_steps() -> Measurement:
    """Rows 8 to 11, predicted with the default constants."""
    rows: dict[str, tuple[float | None, ...]] = {}
    bars: list[Bar] = []
    for update in published_updates():
        found = update_seconds(update, Constants())
        rows[f"{update.row} {update.title}: update, s"] = (update.seconds, found, found / update.seconds)
    for decoding in published_decoding():
        speed = tokens_per_second(decoding, replace(Constants(), decode_step_seconds=SERVER_STEP_SECONDS))
        measured = decoding.tokens_per_second
        rows[f"{decoding.row} {decoding.title}: tokens/s"] = (measured, speed, speed / measured)
    for name, (_, _, share) in rows.items():
        assert share is not None
        bars.append(Bar(f"error of {name.rpartition(':')[0]}", abs(share - 1), MAX_ERROR))
    return Measurement("Parts of steps: published", ("measured", "by defaults", "of measured"), rows, tuple(bars))


def update_seconds(update: PublishedUpdate, constants: Constants) -> float:
    """The predicted seconds of a published update."""
    lengths = Lengths(update.row_tokens, math.log(update.row_tokens))
    rows = rows_of(update.num_gpus * update.rows_per_gpu, 0.0, lengths)
    layout, site = TrainLayout(update.num_gpus, update.num_gpus), NodeType(update.gpu, GPUS_PER_NODE)
    return update_cost(update.model, rows, 1, update.row_tokens, layout, site, constants).seconds


def tokens_per_second(decoding: PublishedDecoding, constants: Constants) -> float:
    """The predicted speed of a published server."""
    lengths = Lengths(decoding.response, math.log(decoding.response))
    space = engine_budget(decoding.work, decoding.layout, decoding.gpu, constants)
    at_once = space.sequences_at_once(decoding.prompt + decoding.response / 2)
    requests = Requests(decoding.num_requests, 1, decoding.prompt, lengths)
    site = NodeType(decoding.gpu, GPUS_PER_NODE)
    cost = generation_cost(decoding.work, requests, decoding.layout, site, at_once, constants)
    return decoding.num_requests * decoding.response / cost.seconds


def ranking() -> Measurement:
    """Row 12: each placement with its best layout."""
    workload, constants = ppo_workload(), Constants()
    rows: dict[str, tuple[float | None, ...]] = {}
    names: tuple[str, ...] = ()
    num_right = 0
    for num_gpus in PPO_SIZES:
        seconds = {
            name: min((step_time(workload, each, constants).total.likely for each in placements), default=math.inf)
            for name, placements in ppo_placements(num_gpus).items()
        }
        names = tuple(seconds)
        num_right += min(seconds, key=lambda name: seconds[name]) == (
            "colocated" if num_gpus <= COLOCATED_UP_TO else "split"
        )
        rows[f"{num_gpus} A100"] = tuple(None if math.isinf(each) else each for each in seconds.values())
    bar = Bar(f"of {len(PPO_SIZES)} sizes those whose best placement comes first", num_right, len(PPO_SIZES), True)
    return Measurement(f"Seconds of a step of PPO with models of 34B ({PPO_SOURCE})", names, rows, (bar,))

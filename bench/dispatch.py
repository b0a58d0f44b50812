"""The cost of calling workers and of moving a batch to them, between them and back: RLJob, verl, plain Ray, memcpy.

    python bench/dispatch.py [--quick] [--without-peer] [--json PATH] [--ray ADDRESS]

All contenders take turns in one run, on one Ray cluster. Every process uses one thread. While one contender is
measured, the others are idle. The first round does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from rljob_bench.bare_ray import BareGroup
from rljob_bench.command_line import DEFAULT, NUMPY, Options, measuring, read_options
from rljob_bench.memory_copy import MemoryCopy
from rljob_bench.our_group import OurGroup
from rljob_bench.peer_process import PeerProcess
from rljob_bench.report import OURS, Bar, Measurement, Report, of_timings, ratio
from rljob_bench.rounds import Turn, interleaved

MIB = 1 << 20
BARE = "bare Ray"
ONE_COPY = "memcpy"
THREE_COPIES = "memcpy x 3"
PENDING, REFERENCES, EMPTY = f"{OURS}, Pending", f"{OURS}, references", f"{OURS}, empty call"
FUTURE, THROUGH_CONTROLLER = f"{DEFAULT}, DataProtoFuture", f"{DEFAULT}, through the controller"


@dataclass(frozen=True)
class Extent:
    """The sizes and numbers of calls that are measured."""

    num_bytes: int = 128 * MIB
    pass_on_bytes: tuple[int, ...] = (1 * MIB, 16 * MIB, 128 * MIB)
    num_rounds: int = 11
    num_large_calls: int = 3
    num_small_calls: int = 100
    worker_counts: tuple[int, ...] = (2, 4, 16)
    settle_seconds: float = 10.0
    """Pause after many processes have started: Ray ends the spare processes that it had started in advance."""


QUICK = Extent(4 * MIB, (1 * MIB, 4 * MIB), 2, 1, 3, worker_counts=(2,), settle_seconds=0.0)


@dataclass
class Groups:
    """Worker groups of one size."""

    num_workers: int
    ours: OurGroup
    bare: BareGroup
    peers: dict[str, PeerProcess] = field(default_factory=dict)

    def turns(self, operation: str, num_calls: int, num_bytes: int = 0) -> dict[str, Turn]:
        """The same operation of every contender."""
        turns: dict[str, Turn] = {
            OURS: partial(self.ours.measure, operation, num_calls, num_bytes),
            BARE: partial(self.bare.measure, operation, num_calls, num_bytes),
        }
        return turns | {name: self.peer_turn(name, operation, num_calls, num_bytes) for name in self.peers}

    def peer_turn(self, name: str, operation: str, num_calls: int, num_bytes: int = 0) -> Turn:
        """The operation of one peer."""
        return partial(
            self.peers[name].seconds, "measure", operation=operation, num_calls=num_calls, num_bytes=num_bytes
        )


@contextmanager
def started(num_workers: int, running: dict[str, PeerProcess], extent: Extent) -> Iterator[Groups]:
    """Starts groups with this number of workers and checks that they compute correct results."""
    with ExitStack() as stack:
        ours = OurGroup(num_workers)
        stack.callback(ours.close)
        bare = BareGroup(num_workers)
        stack.callback(bare.close)
        for peer in running.values():
            peer.ask("start", num_workers=num_workers)
            stack.callback(peer.ask, "stop")
        check_bytes = extent.pass_on_bytes[0]
        ours.check(check_bytes)
        bare.check(check_bytes)
        for peer in running.values():
            peer.ask("check", num_bytes=check_bytes)
        time.sleep(extent.settle_seconds)
        yield Groups(num_workers, ours, bare, running)


def controller_memory(groups: Groups, extent: Extent) -> Measurement:
    """Growth of the controller's memory: ten times, workers make a batch that is the argument of another call."""
    num_bytes, num_calls = extent.num_bytes, 10
    kinds: dict[str, Callable[[], int]] = {
        PENDING: partial(groups.ours.memory, "pass_on_pending", num_calls, num_bytes),
        REFERENCES: partial(groups.ours.memory, "pass_on", num_calls, num_bytes),
    }
    if DEFAULT in groups.peers:
        for name, operation in ((FUTURE, "pass_on_future"), (THROUGH_CONTROLLER, "pass_on")):
            kinds[name] = partial(_peer_memory, groups.peers[DEFAULT], operation, num_calls, num_bytes)
    grown = {name: kind() for name, kind in kinds.items()}
    return Measurement(
        f"Growth of the controller while workers pass {_size(num_bytes)} on, W={groups.num_workers}",
        ("MiB", "% of the bytes"),
        {name: (size / MIB, 100 * size / num_bytes) for name, size in grown.items()},
        tuple(
            Bar(f"{name}: at most 10 % of the bytes", 100 * grown[name] / num_bytes, 10)
            for name in (PENDING, REFERENCES)
        ),
    )


def _peer_memory(peer: PeerProcess, operation: str, num_calls: int, num_bytes: int) -> int:
    grown = peer.ask("memory", operation=operation, num_calls=num_calls, num_bytes=num_bytes)["bytes"]
    assert isinstance(grown, int)
    return grown


def dispatch(groups: Groups, extent: Extent, floor: MemoryCopy) -> Measurement:
    """A batch goes to the workers, which read all of it and return one number per row."""
    turns: dict[str, Turn] = {ONE_COPY: partial(floor.measure, 1, extent.num_large_calls)}
    turns |= groups.turns("read", extent.num_large_calls, extent.num_bytes)
    timings = interleaved(turns, extent.num_rounds)
    return of_timings(
        f"Dispatch {_size(extent.num_bytes)} to {groups.num_workers} workers, read there",
        timings,
        ONE_COPY,
        [Bar("at most 2 x memcpy of the same bytes", ratio(timings, OURS, ONE_COPY), 2)],
    )


def round_trip(groups: Groups, extent: Extent, floor: MemoryCopy) -> Measurement:
    """A batch goes to the workers, which write new columns of the same size, and back into one batch in the
    controller."""
    turns: dict[str, Turn] = {THREE_COPIES: partial(floor.measure, 3, extent.num_large_calls)}
    turns |= groups.turns("fresh", extent.num_large_calls, extent.num_bytes)
    timings = interleaved(turns, extent.num_rounds)
    return of_timings(
        f"Round trip of {_size(extent.num_bytes)}, freshly written, back in the controller, W={groups.num_workers}",
        timings,
        THREE_COPIES,
        [
            Bar("at most 2.5 x three memcpy passes", ratio(timings, OURS, THREE_COPIES), 2.5),
            Bar(f"{DEFAULT} takes at least 5 x as long", ratio(timings, DEFAULT, OURS), 5, is_at_least=True),
            Bar(f"{NUMPY} takes at least 1.5 x as long", ratio(timings, NUMPY, OURS), 1.5, is_at_least=True),
        ],
    )


def passed_on(groups: Groups, extent: Extent) -> list[Measurement]:
    """The workers' results are the arguments of another call, which reads almost nothing of them."""
    measured = []
    medians: dict[str, list[float]] = {PENDING: [], REFERENCES: []}
    for num_bytes in extent.pass_on_bytes:
        small, large = extent.num_small_calls, extent.num_large_calls
        turns: dict[str, Turn] = {
            EMPTY: partial(groups.ours.measure, "empty", small),
            PENDING: partial(groups.ours.measure, "pass_on_pending", small, num_bytes),
            REFERENCES: partial(groups.ours.measure, "pass_on", small, num_bytes),
            BARE: partial(groups.bare.measure, "pass_on", small, num_bytes),
        }
        if DEFAULT in groups.peers:
            turns[FUTURE] = groups.peer_turn(DEFAULT, "pass_on_future", large, num_bytes)
            turns[THROUGH_CONTROLLER] = groups.peer_turn(DEFAULT, "pass_on", large, num_bytes)
        timings = interleaved(turns, extent.num_rounds)
        bars = [Bar("Pending: at most 2 x an empty call", ratio(timings, PENDING, EMPTY), 2)]
        for name, values in medians.items():
            values.append(timings[name].median)
        if len(medians[PENDING]) == len(extent.pass_on_bytes):
            smallest = f"that of {_size(extent.pass_on_bytes[0])}"
            bars.append(Bar(f"Pending: at most 1.2 x {smallest}", medians[PENDING][-1] / medians[PENDING][0], 1.2))
        title = f"{_size(num_bytes)} passed on to the workers that made it, W={groups.num_workers}"
        measured.append(of_timings(title, timings, EMPTY, bars))
    return measured


def empty_call(groups: Groups, extent: Extent) -> Measurement:
    """A method without arguments and result, called on all workers."""
    timings = interleaved(groups.turns("empty", extent.num_small_calls), extent.num_rounds)
    return of_timings(
        f"Empty call, W={groups.num_workers}",
        timings,
        BARE,
        [Bar("at most 1.2 x bare Ray", ratio(timings, OURS, BARE), 1.2)],
    )


def measure(options: Options, report: Report, running: dict[str, PeerProcess]) -> None:
    """Makes all measurements for each number of workers."""
    extent = QUICK if options.is_quick else Extent()
    floor: MemoryCopy | None = None
    for num_workers in extent.worker_counts:
        # Many verl processes, half a gigabyte each, do not fit into a small machine together with the others.
        chosen = running if num_workers <= 4 else {}
        with started(num_workers, chosen, extent) as groups:
            if num_workers == 2:
                # The first measurement, while this process has no large data.
                report.add(controller_memory(groups, extent))
            floor = floor or MemoryCopy(extent.num_bytes)
            if num_workers == 2:
                report.add(dispatch(groups, extent, floor))
            if num_workers <= 4:
                report.add(round_trip(groups, extent, floor))
            if num_workers == 2:
                for measurement in passed_on(groups, extent):
                    report.add(measurement)
            report.add(empty_call(groups, extent))


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB"


def main() -> None:
    """Runs the benchmark."""
    options = read_options("Calls and data: RLJob, verl, plain Ray, memcpy.")
    torch.set_num_threads(1)
    with measuring(options, "bench/dispatch.py", (DEFAULT, NUMPY), num_cpus=10) as (running, report):
        measure(options, report, running)
        report.write(options.json_path)


if __name__ == "__main__":
    main()

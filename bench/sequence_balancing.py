"""How evenly sequences are distributed over workers and how long that takes: RLJob against verl's Karmarkar-Karp. How
long workers wait for each other in micro-batches that are packed together, or by each worker alone.

    PYTHONPATH=tests/support python bench/sequence_balancing.py [--quick] [--without-peer] [--json PATH]

8,192 lengths of several distributions are divided into 8 and 64 partitions of equal counts. No division can be better
than the bound: the mean, or more if the longest sequences, which cannot be split, require it.

Micro-batches: workers meet in each one, so the most expensive one counts. The cost of a row is its length, plus a
coefficient times its square for attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from rljob_bench.command_line import DEFAULT, measuring, read_options
from rljob_bench.peer_process import PeerProcess
from rljob_bench.report import OURS, Bar, Measurement
from rljob_bench.rounds import Turn, interleaved, timed_calls
from rljob_testing.training.long_rows import LONGEST as LONGEST_ROW
from rljob_testing.training.long_rows import imbalance_alone, imbalance_together, long_rows
from rljob_trainer.batch.balancing import balanced_partitions
from rljob_trainer.controller.balanced_order import RowCosts

Lengths = npt.NDArray[np.int64]
Partitions = list[list[int]]

NUM_LENGTHS = 8192
NUM_PARTITIONS = (8, 64)
LONGEST = 32_768
MAX_OVER_BOUND = 1.001
MAX_MILLISECONDS = 30.0
SORTING = "np.argsort"
SHARES = ((512, 8, 4), (2048, 64, 4), (2048, 64, 1), (8192, 64, 1))
"""Rows, workers and updates of a step."""
COSTS = {"tokens": 0.0, "with attention, as Qwen3-8B": 1.95e-5}
NUM_DRAWS = 5
MAX_OVER_MEAN = 1.03
MAX_PLANNING_MILLISECONDS = 100.0
"""Of a step with 2,048 rows in four updates."""


def distributions(num_lengths: int) -> dict[str, Lengths]:
    """Response lengths in tokens, similar to those of real runs."""
    random = np.random.default_rng(0)
    short = random.lognormal(5.0, 0.5, num_lengths)
    drawn = {
        "lognormal(6.5, 0.9)": random.lognormal(6.5, 0.9, num_lengths),
        "uniform 1 to 8,192": random.integers(1, 8193, num_lengths),
        "Pareto(1.2) from 64, cut at 32,768": 64 * (1 + random.pareto(1.2, num_lengths)),
        "30 % cut at 4,096, the rest short": np.where(random.random(num_lengths) < 0.3, 4096, short),
        "all alike": np.full(num_lengths, 1024),
    }
    return {name: np.clip(lengths, 1, LONGEST).astype(np.int64) for name, lengths in drawn.items()}


def bound(lengths: Lengths, num_partitions: int) -> float:
    """A lower bound for the sum of the fullest of `num_partitions` partitions.

    Consider the j longest sequences. Either no two of them share a partition: then j partitions hold them and their
    companions, which are at least as long as the shortest sequences of all. Or two of them share one.
    """
    descending = np.sort(lengths)[::-1]
    count = len(lengths) // num_partitions
    long, short = np.cumsum(descending), np.concatenate(([0], np.cumsum(descending[::-1])))
    least = float(lengths.sum()) / num_partitions
    for j in range(1, num_partitions + 2):
        apart = (long[j - 1] + short[j * (count - 1)]) / j if j <= num_partitions else np.inf
        together = descending[j - 1] + descending[j - 2] + short[max(0, count - 2)] if j > 1 else np.inf
        least = max(least, float(min(apart, together)))
    return least


def checked_fullest(lengths: Lengths, partitions: Partitions, num_partitions: int) -> int:
    """The sum of the fullest partition. Raises AssertionError if these are not valid partitions of the lengths."""
    assert len(partitions) == num_partitions
    assert sorted(item for partition in partitions for item in partition) == list(range(len(lengths)))
    assert len({len(partition) for partition in partitions}) == 1
    return max(int(lengths[partition].sum()) for partition in partitions)


class Contender:
    """Keeps the partitions of its last call."""

    def __init__(self, measure: Callable[[], tuple[list[float], Partitions]]) -> None:
        self._measure = measure
        self.partitions: Partitions = []

    def turn(self) -> list[float]:
        """The seconds of one call."""
        seconds, self.partitions = self._measure()
        return seconds


def measure_ours(lengths: list[int], num_partitions: int) -> tuple[list[float], Partitions]:
    """Measures one call. Both sides get the lengths as a list."""
    found: Partitions = []

    def call() -> None:
        found[:] = balanced_partitions(lengths, num_partitions)

    return timed_calls(call, 1), found


def measure_peer(peer: PeerProcess, lengths: list[int], num_partitions: int) -> tuple[list[float], Partitions]:
    """Measures one call of verl."""
    answer = peer.ask("balance", lengths=lengths, num_partitions=num_partitions, num_calls=1)
    seconds, partitions = answer["seconds"], answer["partitions"]
    assert isinstance(seconds, list)
    assert isinstance(partitions, list)
    return seconds, partitions


def measure(num_partitions: int, running: dict[str, PeerProcess], num_rounds: int) -> Measurement:
    """Measures all distributions."""
    rows: dict[str, tuple[float | None, ...]] = {}
    seconds: dict[str, tuple[float, ...]] = {}
    worst: dict[str, float] = {}
    for name, lengths in distributions(NUM_LENGTHS).items():
        given = lengths.tolist()
        contenders = {OURS: Contender(partial(measure_ours, given, num_partitions))}
        if DEFAULT in running:
            contenders[DEFAULT] = Contender(partial(measure_peer, running[DEFAULT], given, num_partitions))
        turns: dict[str, Turn] = {SORTING: partial(timed_calls, partial(np.argsort, lengths), 1)}
        turns |= {contender: each.turn for contender, each in contenders.items()}
        timings = interleaved(turns, num_rounds)
        least, mean = bound(lengths, num_partitions), lengths.sum() / num_partitions
        values: list[float | None] = [least / mean, 1e3 * timings[SORTING].median]
        for contender in (OURS, DEFAULT):
            if contender not in contenders:
                values += [None, None, None]
                continue
            fullest = checked_fullest(lengths, contenders[contender].partitions, num_partitions)
            values += [fullest / mean, 1e3 * timings[contender].fastest, 1e3 * timings[contender].median]
            if contender == OURS:
                _raise_to(worst, "max / bound", fullest / least)
                _raise_to(worst, "ms", 1e3 * timings[OURS].median)
        rows[name] = tuple(values)
        seconds |= {f"{name}: {contender}": each.seconds for contender, each in timings.items()}
    return Measurement(
        f"{NUM_LENGTHS:,} lengths into {num_partitions} partitions of equal counts",
        _header(),
        rows,
        (
            Bar(
                f"max / max(mean, bound) at most {MAX_OVER_BOUND}, the worst case", worst["max / bound"], MAX_OVER_BOUND
            ),
            Bar(f"at most {MAX_MILLISECONDS:g} ms, the slowest median", worst["ms"], MAX_MILLISECONDS),
        ),
        seconds,
        num_decimals=4,
    )


def measure_micro_batches() -> Measurement:
    """Measures the plans of steps, each for several draws of rows."""
    rows: dict[str, tuple[float | None, ...]] = {}
    seconds: dict[str, tuple[float, ...]] = {}
    worst, slowest = 0.0, 0.0
    for num_rows, num_workers, num_updates in SHARES:
        for name, per_square in COSTS.items():
            costs = RowCosts(LONGEST_ROW, per_square)
            draws = [long_rows(num_rows, seed) for seed in range(NUM_DRAWS)]
            alone = [imbalance_alone(lengths, num_workers, num_updates, costs) for lengths in draws]
            together: list[float] = []
            times: list[float] = []
            for lengths in draws:
                plan = partial(imbalance_together, lengths, num_workers, num_updates, costs)
                together.append(plan())
                times += timed_calls(plan, 1)
            case = f"{num_rows:,} rows, {num_workers} workers, {num_updates} updates; {name}"
            mean, median = float(np.mean(together)), 1e3 * float(np.median(times))
            rows[case] = (float(np.mean(alone)), mean, max(together), median)
            seconds[case] = tuple(times)
            worst = max(worst, mean)
            slowest = max(slowest, median if num_rows <= 2048 and num_updates == 4 else 0.0)
    return Measurement(
        f"micro-batches of {LONGEST_ROW:,} tokens, rows with a median of 4,096: most expensive / mean",
        ("each worker alone", "RLJob", "RLJob, worst draw", "median, ms"),
        rows,
        (
            Bar(f"RLJob at most {MAX_OVER_MEAN}, the worst mean", worst, MAX_OVER_MEAN),
            Bar(
                f"at most {MAX_PLANNING_MILLISECONDS:g} ms for 2,048 rows in four updates",
                slowest,
                MAX_PLANNING_MILLISECONDS,
            ),
        ),
        seconds,
        num_decimals=4,
    )


def _header() -> tuple[str, ...]:
    of_each = [f"{name} {what}" for name in (OURS, DEFAULT) for what in ("max / mean", "fastest, ms", "median, ms")]
    return ("bound / mean", f"{SORTING}, ms", *of_each)


def _raise_to(worst: dict[str, float], name: str, value: float) -> None:
    worst[name] = max(worst.get(name, value), value)


def main() -> None:
    """Runs the benchmark."""
    options = read_options("Balanced partitions: RLJob and verl.")
    torch.set_num_threads(1)
    with measuring(options, "bench/sequence_balancing.py", (DEFAULT,)) as (running, report):
        for num_partitions in NUM_PARTITIONS:
            report.add(measure(num_partitions, running, 2 if options.is_quick else 8))
        report.add(measure_micro_batches())
        report.write(options.json_path)


if __name__ == "__main__":
    main()

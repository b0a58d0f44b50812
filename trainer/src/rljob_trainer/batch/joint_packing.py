"""Packs rows into micro-batches for all workers together.

Workers wait for each other in every micro-batch. Round k has the k-th micro-batch of every worker. So the time of an
update is the sum, over rounds, of the cost of the most expensive micro-batch of the round.

1. Each round gets a target for the cost of its micro-batches. The targets are equal, except in the first rounds if the
   most expensive rows exceed them.
2. Greedy packing, the longest row first: each row goes to the micro-batch that is furthest below its target. The
   micro-batches of the first rounds should be as full as possible, because their most expensive rows determine the
   time anyway: a row goes to the one with the least room in which it fits, if there is one.
3. Each worker gets one micro-batch of each round, so that all workers have about the same number of rows. Single rows
   move until no worker has too many.
4. The most expensive micro-batch of a round exchanges rows with others as long as this reduces its cost and makes no
   other round more expensive.

Legend: B rows, W workers, K rounds, M = W x K micro-batches (micro-batch m belongs to worker m // K and round m % K).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_trainer.batch.balancing import balanced_partitions

Integers = npt.NDArray[np.int64]

CLOSE_ENOUGH = 1e-3
"""The search stops in rounds whose most expensive micro-batch exceeds the mean by less than this, as a fraction of the
mean of all rounds."""
FULL, MUCH_LOST = 0.98, 0.01
"""A round is added if micro-batches have more than the part FULL of their tokens and workers would wait for more than
the part MUCH_LOST of the time, because little can be exchanged between full micro-batches."""
FEW_ROWS_OF_WORKER, ROWS_OF_PART = 8, 2048
"""Larger updates are packed in parts: of at most ROWS_OF_PART rows, or FEW_ROWS_OF_WORKER rows of each worker."""
MAX_STEPS = 4000
"""The search ends after this number of exchanges and moves."""
NUM_PARTNERS = 512
"""A micro-batch exchanges rows only with this number of micro-batches: those with the most room below the maximum of
their round."""
NONE = -1
"""The round of a row without tokens."""


@dataclass(frozen=True)
class Packing:
    """Which worker processes each row in which round."""

    worker_B: Integers
    round_B: Integers
    """NONE for rows without tokens."""

    def sums(self, values_B: Integers, num_workers: int) -> Integers:
        """[W, K]: the sum of the rows' values in each micro-batch."""
        num_rounds = int(self.round_B.max(initial=NONE)) + 1
        sums_WK = np.zeros((num_workers, num_rounds), dtype=np.int64)
        is_packed_B = self.round_B != NONE
        np.add.at(sums_WK, (self.worker_B[is_packed_B], self.round_B[is_packed_B]), values_B[is_packed_B])
        return sums_WK


def packed_jointly(lengths_B: Integers, costs_B: Integers, num_workers: int, max_tokens: int) -> Packing:
    """Packs rows so that all workers have the same number of rows, and in each round about the same cost. The number of
    rounds is the smallest one that was found, or one more. A micro-batch has at most `max_tokens` tokens, or as many as
    the longest row if that is longer.

    `lengths_B`: tokens of each row. `costs_B`: their costs; 0 where the length is 0. The number of rows must be a
    multiple of `num_workers`. The result is deterministic on every machine, because all numbers are integers."""
    order_B = np.argsort(-lengths_B, kind="stable")
    rows_of_worker = len(lengths_B) // num_workers
    num_parts = -(-rows_of_worker // max(FEW_ROWS_OF_WORKER, ROWS_OF_PART // num_workers))
    worker_B, round_B = np.empty_like(lengths_B), np.full_like(lengths_B, NONE)
    num_rounds = 0
    for number in range(num_parts):
        # All parts have about the same lengths.
        rows = order_B.reshape(rows_of_worker, num_workers)[number::num_parts].ravel()
        worker_B[rows], rounds = _packed_part(lengths_B[rows], costs_B[rows], num_workers, max_tokens)
        round_B[rows] = np.where(rounds == NONE, NONE, rounds + num_rounds)
        num_rounds = max(num_rounds, int(round_B.max(initial=NONE)) + 1)
    return Packing(worker_B, round_B)


def _packed_part(
    lengths_B: Integers, costs_B: Integers, num_workers: int, max_tokens: int
) -> tuple[Integers, Integers]:
    """Worker and round of each row. The rows must be sorted by length, longest first."""
    max_tokens = max(max_tokens, int(lengths_B.max(initial=1)))
    num_packed, rows_of_worker = np.count_nonzero(lengths_B), len(lengths_B) // num_workers
    needed_rounds = int(lengths_B.sum()) / (num_workers * max_tokens)
    # Of the rows that are longer than a half, a third, a fourth of a micro-batch, one, two, three fit into it.
    num_long = [int(np.count_nonzero(lengths_B * (each + 1) > max_tokens)) for each in (1, 2, 3)]
    num_rounds = max(
        math.ceil(needed_rounds), *(-(-num // (each * num_workers)) for each, num in enumerate(num_long, 1))
    )
    if num_rounds <= 1:
        worker_B = np.empty_like(lengths_B)
        for worker, rows in enumerate(balanced_partitions(costs_B, num_workers)):
            worker_B[rows] = worker
        if np.bincount(worker_B, lengths_B, num_workers).max() <= max_tokens:
            return worker_B, np.where(lengths_B > 0, 0, NONE)
        num_rounds = 2
    while True:
        bins = _Bins(lengths_B[:num_packed], costs_B[:num_packed], num_workers, num_rounds, max_tokens, rows_of_worker)
        if bins.fill() and bins.equalize_counts():
            bins.exchange()
            if needed_rounds <= FULL * num_rounds or bins.lost <= MUCH_LOST:
                break
        # At the latest with a round for each row of a worker, there is room for all.
        num_rounds += 1
    worker_B, rounds = np.divmod(bins.bin_B, num_rounds)
    # Numbers of rounds without rows are left out.
    rounds = np.unique(rounds, return_inverse=True)[1]
    num_empty = len(lengths_B) - num_packed
    empty = np.repeat(np.arange(num_workers), rows_of_worker - bins.counts_W)
    return np.concatenate([worker_B, empty]), np.concatenate([rounds, np.full(num_empty, NONE)])


class _Bins:
    """The micro-batches of all workers while they are packed. The rows must be sorted by length, longest first."""

    def __init__(
        self,
        lengths_B: Integers,
        costs_B: Integers,
        num_workers: int,
        num_rounds: int,
        max_tokens: int,
        rows_of_worker: int,
    ) -> None:
        self.lengths_B, self.costs_B = lengths_B, costs_B
        self.num_workers, self.num_rounds, self.rows_of_worker = num_workers, num_rounds, rows_of_worker
        num_bins = num_workers * num_rounds
        self.bin_B = np.full(len(lengths_B), NONE, dtype=np.int64)
        self.costs_M = np.zeros(num_bins, dtype=np.int64)
        self.room_M = np.full(num_bins, max_tokens, dtype=np.int64)
        """Tokens for which there is still room."""
        self.counts_W = np.zeros(num_workers, dtype=np.int64)
        """Rows of each worker."""
        self.round_M = np.arange(num_bins) % num_rounds
        self.targets_M = self._targets()[self.round_M]

    def fill(self) -> bool:
        """Puts each row into a micro-batch that has room for it; False if there is none. Ignores the number of rows of
        a worker."""
        is_first_M = self.targets_M > self.targets_M.min()
        num_first, nowhere = int(is_first_M.sum()), -int(self.costs_B.sum()) - 1
        for row, (length, cost) in enumerate(zip(self.lengths_B.tolist(), self.costs_B.tolist(), strict=True)):
            has_room_M, remaining_M = self.room_M >= length, self.targets_M - self.costs_M
            found_M = has_room_M & is_first_M & (remaining_M >= cost)
            if row >= num_first and found_M.any():
                place = int(np.where(found_M, -self.room_M, nowhere).argmax())
            elif has_room_M.any():
                place = int(np.where(has_room_M, remaining_M, nowhere).argmax())
            else:
                return False
            self._put(row, place)
        return True

    def equalize_counts(self) -> bool:
        """Gives each worker one micro-batch of each round, and at most `rows_of_worker` rows; False if some rows fit
        nowhere."""
        self._match_counts()
        while self.counts_W.max() > self.rows_of_worker:
            worker = int(self.counts_W.argmax())
            rows = np.flatnonzero(self.bin_B // self.num_rounds == worker)
            places = np.flatnonzero(np.repeat(self.counts_W < self.rows_of_worker, self.num_rounds))
            # The move that increases the sum of squared distances to the targets the least.
            costs = self.costs_B[rows]
            above_M = self.costs_M - self.targets_M
            change = costs[:, None] * (above_M[places] - above_M[self.bin_B[rows]][:, None] + costs[:, None])
            fits = self.lengths_B[rows][:, None] <= self.room_M[places]
            if not fits.any():
                return False
            row, place = np.unravel_index(np.where(fits, change, np.iinfo(np.int64).max).argmin(), change.shape)
            self._move(int(rows[row]), int(places[place]))
        return True

    def exchange(self) -> None:
        """Exchanges rows, and moves them to micro-batches of the same worker or of workers with room for another row,
        until the sum of the rounds' maxima does not fall any more.

        The loop ends, because each step reduces the cost of one of the most expensive micro-batches of a round, and the
        other micro-batch stays below the maximum of its round."""
        is_open_K = np.ones(self.num_rounds, dtype=bool)
        costs_WK = self.costs_M.reshape(self.num_workers, self.num_rounds)
        enough = CLOSE_ENOUGH * self.num_workers * self.costs_M.mean()
        for _ in range(MAX_STEPS):
            maxima_K = costs_WK.max(axis=0)
            excess_K = np.where(is_open_K, maxima_K * self.num_workers - costs_WK.sum(axis=0), 0)
            number = int(excess_K.argmax())
            if excess_K[number] <= enough:
                return
            full = int(costs_WK[:, number].argmax()) * self.num_rounds + number
            is_open_K[number] = False
            if self._relieve(full, maxima_K[self.round_M] - self.costs_M):
                is_open_K[:] = True

    @property
    def lost(self) -> float:
        """The part of the time in which a worker waits for others, on average."""
        costs_WK = self.costs_M.reshape(self.num_workers, self.num_rounds)
        return 1 - float(costs_WK.mean(axis=0).sum() / costs_WK.max(axis=0).sum())

    def _targets(self) -> Integers:
        """[K]: the cost of a micro-batch in each round, descending. Their sum is the cost of a worker. The rows are so
        many that the j-th round has a row as expensive as row W x j; no target is below that if the sum allows it."""
        highest_K = np.zeros(self.num_rounds, dtype=np.int64)
        layers = np.sort(self.costs_B)[::-1][:: self.num_workers][: self.num_rounds]
        highest_K[: len(layers)] = layers
        total = int(self.costs_B.sum()) // self.num_workers
        low, high = 0, total
        while low < high:
            middle = (low + high + 1) // 2
            if int(np.maximum(highest_K, middle).sum()) <= total:
                low = middle
            else:
                high = middle - 1
        return np.maximum(highest_K, low)

    def _match_counts(self) -> None:
        """Assigns the micro-batches of each round to workers: those with the most rows to the workers with the fewest
        rows in earlier rounds."""
        counts_WK = np.bincount(self.bin_B, minlength=len(self.costs_M)).reshape(self.num_workers, self.num_rounds)
        self.counts_W = np.zeros(self.num_workers, dtype=np.int64)
        new_M = np.empty_like(self.round_M)
        for number in range(self.num_rounds):
            most_rows = np.argsort(-counts_WK[:, number], kind="stable")
            workers = np.argsort(self.counts_W, kind="stable")
            new_M[most_rows * self.num_rounds + number] = workers * self.num_rounds + number
            self.counts_W[workers] += counts_WK[most_rows, number]
        self.bin_B = new_M[self.bin_B]
        for values_M in (self.costs_M, self.room_M):
            values_M[new_M] = values_M.copy()

    def _relieve(self, full: int, slack_M: Integers) -> bool:
        """Reduces the cost of micro-batch `full` by the exchange or move that reduces it the most, or leaves the most
        room below the other round's maximum. `slack_M`: how far each micro-batch is below the maximum of its round.
        Returns whether there was one."""
        rows = np.flatnonzero(self.bin_B == full)
        costs, lengths = self.costs_B[rows][:, None], self.lengths_B[rows][:, None]
        worker = full // self.num_rounds
        has_room_W = self.counts_W < self.rows_of_worker
        has_room_W[worker] = True
        places = np.flatnonzero(np.repeat(has_room_W, self.num_rounds))
        moved = _gains(costs, slack_M[places], (lengths <= self.room_M[places]) & (places != full))
        partners = self._partners(slack_M)
        bins = self.bin_B[partners]
        change, tokens = costs - self.costs_B[partners], lengths - self.lengths_B[partners]
        exchanged = _gains(change, slack_M[bins], (tokens <= self.room_M[bins]) & (-tokens <= self.room_M[full]))
        best_move, best_exchange = int(moved.argmax()), int(exchanged.argmax()) if exchanged.size else -1
        gain_of_move = moved.flat[best_move]
        gain_of_exchange = exchanged.flat[best_exchange] if exchanged.size else 0
        if max(gain_of_move, gain_of_exchange) <= 0:
            return False
        if gain_of_move >= gain_of_exchange:
            row, place = divmod(best_move, len(places))
            self._move(int(rows[row]), int(places[place]))
        else:
            row, other = divmod(best_exchange, len(partners))
            self._move(int(rows[row]), int(bins[other]))
            self._move(int(partners[other]), full)
        return True

    def _partners(self, slack_M: Integers) -> Integers:
        """The rows of the NUM_PARTNERS micro-batches with the most slack."""
        if len(slack_M) <= NUM_PARTNERS:
            return np.arange(len(self.bin_B))
        is_partner_M = np.zeros(len(slack_M), dtype=bool)
        is_partner_M[np.argsort(-slack_M, kind="stable")[:NUM_PARTNERS]] = True
        return np.flatnonzero(is_partner_M[self.bin_B])

    def _put(self, row: int, place: int) -> None:
        self.bin_B[row] = place
        self.costs_M[place] += self.costs_B[row]
        self.room_M[place] -= self.lengths_B[row]
        self.counts_W[place // self.num_rounds] += 1

    def _move(self, row: int, place: int) -> None:
        before = self.bin_B[row]
        self.costs_M[before] -= self.costs_B[row]
        self.room_M[before] += self.lengths_B[row]
        self.counts_W[before // self.num_rounds] -= 1
        self._put(row, place)


def _gains(change: Integers, slack: Integers, fits: npt.NDArray[np.bool_]) -> Integers:
    """By how much a move or exchange helps: the smaller of the cost that it takes away, and the slack that it leaves;
    at most 0 if it does not help or does not fit."""
    return np.where(fits, np.minimum(change, slack - change), 0)

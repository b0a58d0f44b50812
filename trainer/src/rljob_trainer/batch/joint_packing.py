"""Packs rows into micro-batches for all workers together.

Workers wait for each other in every micro-batch. Round k has the k-th micro-batch of every worker. So the time of an
update is the sum, over rounds, of the cost of the most expensive micro-batch of the round.

1. Each round gets a target for the cost of its micro-batches. All targets are equal, unless single rows cost more.
   Such rows go to the first rounds, whose targets are raised to the cost of these rows.
2. Greedy packing, the longest row first: each row goes to the micro-batch that is furthest below its target. Exception:
   a row that fits into micro-batches of the raised rounds goes to the one of them with the least room. These should be
   as full as possible, because the most expensive row of such a round determines its time anyway.
3. Each worker gets one micro-batch of each round, so that all workers have about the same number of rows. Single rows
   move until no worker has too many.
4. The most expensive micro-batch of a round exchanges rows with others as long as this reduces its cost and makes no
   other round more expensive.

Legend: B rows, W workers, K rounds, M = W x K micro-batches (micro-batch m belongs to worker m // K and round m % K).
*Room* is in tokens, below the limit of a micro-batch; *slack* is in cost, below the maximum of its round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_trainer.batch.balancing import balanced_partitions

Integers = npt.NDArray[np.int64]

CLOSE_ENOUGH = 1e-3
"""A round is balanced if its maximum exceeds its mean by at most this fraction of the mean cost of all
micro-batches."""
FULL, MUCH_LOST = 0.98, 0.01
"""A round is added if all rows need more than the fraction FULL of the micro-batches' tokens, and workers would wait
for more than the fraction MUCH_LOST of the time. Full micro-batches have no room for exchanges."""
FEW_ROWS_OF_WORKER, ROWS_OF_PART = 8, 2048
"""Updates with more rows are packed in parts. A part has at most ROWS_OF_PART rows, or FEW_ROWS_OF_WORKER rows of each
worker if these are more."""
MAX_STEPS = 4000
"""The search ends after this number of exchanges and moves."""
NUM_PARTNERS = 512
"""A micro-batch exchanges rows only with this number of micro-batches: those with the most slack."""
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
    """Packs rows so that all workers have the same number of rows, and in each round about the same cost. In each part
    of the rows (see ROWS_OF_PART), the number of rounds is the smallest one that was found, or a few more (see FULL). A
    micro-batch has at most `max_tokens` tokens, or as many as the longest row if that is longer.

    `lengths_B`: tokens of each row. `costs_B`: their costs; 0 where the length is 0. The number of rows must be a
    multiple of `num_workers`. The result is deterministic on every machine, because all numbers are integers."""
    order_B = np.argsort(-lengths_B, kind="stable")
    rows_of_worker = len(lengths_B) // num_workers
    num_parts = -(-rows_of_worker // max(FEW_ROWS_OF_WORKER, ROWS_OF_PART // num_workers))
    worker_B, round_B = np.empty_like(lengths_B), np.full_like(lengths_B, NONE)
    num_rounds = 0
    for part in range(num_parts):
        # All parts have about the same lengths.
        rows = order_B.reshape(rows_of_worker, num_workers)[part::num_parts].ravel()
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
        packed = _MicroBatches(
            lengths_B[:num_packed], costs_B[:num_packed], num_workers, num_rounds, max_tokens, rows_of_worker
        )
        if packed.fill() and packed.equalize_counts():
            packed.exchange()
            if needed_rounds <= FULL * num_rounds or packed.lost <= MUCH_LOST:
                break
        # The loop ends: with as many rounds as a worker has rows, each row can have a micro-batch of its own.
        num_rounds += 1
    worker_B, rounds = np.divmod(packed.micro_batch_B, num_rounds)
    # Numbers of rounds without rows are left out.
    rounds = np.unique(rounds, return_inverse=True)[1]
    num_empty = len(lengths_B) - num_packed
    empty = np.repeat(np.arange(num_workers), rows_of_worker - packed.counts_W)
    return np.concatenate([worker_B, empty]), np.concatenate([rounds, np.full(num_empty, NONE)])


class _MicroBatches:
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
        num_micro_batches = num_workers * num_rounds
        self.micro_batch_B = np.full(len(lengths_B), NONE, dtype=np.int64)
        self.costs_M = np.zeros(num_micro_batches, dtype=np.int64)
        self.room_M = np.full(num_micro_batches, max_tokens, dtype=np.int64)
        """Tokens for which there is still room."""
        self.counts_W = np.zeros(num_workers, dtype=np.int64)
        """Rows of each worker."""
        self.round_M = np.arange(num_micro_batches) % num_rounds
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
                micro_batch = int(np.where(found_M, -self.room_M, nowhere).argmax())
            elif has_room_M.any():
                micro_batch = int(np.where(has_room_M, remaining_M, nowhere).argmax())
            else:
                return False
            self._put(row, micro_batch)
        return True

    def equalize_counts(self) -> bool:
        """Gives each worker one micro-batch of each round, and at most `rows_of_worker` rows; False if some rows fit
        nowhere."""
        self._match_counts()
        while self.counts_W.max() > self.rows_of_worker:
            worker = int(self.counts_W.argmax())
            rows = np.flatnonzero(self.micro_batch_B // self.num_rounds == worker)
            micro_batches = np.flatnonzero(np.repeat(self.counts_W < self.rows_of_worker, self.num_rounds))
            # The move that increases the sum of squared distances to the targets the least.
            costs = self.costs_B[rows]
            above_M = self.costs_M - self.targets_M
            change = costs[:, None] * (
                above_M[micro_batches] - above_M[self.micro_batch_B[rows]][:, None] + costs[:, None]
            )
            fits = self.lengths_B[rows][:, None] <= self.room_M[micro_batches]
            if not fits.any():
                return False
            row, index = np.unravel_index(np.where(fits, change, np.iinfo(np.int64).max).argmin(), change.shape)
            self._move(int(rows[row]), int(micro_batches[index]))
        return True

    def exchange(self) -> None:
        """Exchanges rows, and moves them to micro-batches of the same worker or of workers with room for another row,
        until the sum of the rounds' maxima does not fall any more.

        The loop ends: each step reduces the cost of a micro-batch that is the most expensive one of its round, and its
        partner stays below the maximum of the partner's round. So the sum of the maxima never rises."""
        is_open_K = np.ones(self.num_rounds, dtype=bool)
        costs_WK = self.costs_M.reshape(self.num_workers, self.num_rounds)
        enough = CLOSE_ENOUGH * self.num_workers * self.costs_M.mean()
        for _ in range(MAX_STEPS):
            maxima_K = costs_WK.max(axis=0)
            excess_K = np.where(is_open_K, maxima_K * self.num_workers - costs_WK.sum(axis=0), 0)
            round_ = int(excess_K.argmax())
            if excess_K[round_] <= enough:
                return
            most_expensive = int(costs_WK[:, round_].argmax()) * self.num_rounds + round_
            is_open_K[round_] = False
            if self._relieve(most_expensive, maxima_K[self.round_M] - self.costs_M):
                is_open_K[:] = True

    @property
    def lost(self) -> float:
        """The part of the time in which a worker waits for others, on average."""
        costs_WK = self.costs_M.reshape(self.num_workers, self.num_rounds)
        return 1 - float(costs_WK.mean(axis=0).sum() / costs_WK.max(axis=0).sum())

    def _targets(self) -> Integers:
        """[K], descending: the cost that the micro-batches of each round should have. If rows are sorted by cost, the W
        x j + 1 most expensive ones do not fit into W x j micro-batches with one row each. So round j gets at least the
        cost of row W x j (both counted from 0). The other rounds share the rest of a worker's cost equally. The sum of
        the targets is the cost of a worker, or more if these minima alone exceed it."""
        highest_K = np.zeros(self.num_rounds, dtype=np.int64)
        minima = np.sort(self.costs_B)[::-1][:: self.num_workers][: self.num_rounds]
        highest_K[: len(minima)] = minima
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
        counts_WK = np.bincount(self.micro_batch_B, minlength=len(self.costs_M)).reshape(
            self.num_workers, self.num_rounds
        )
        self.counts_W = np.zeros(self.num_workers, dtype=np.int64)
        new_M = np.empty_like(self.round_M)
        for round_ in range(self.num_rounds):
            most_rows = np.argsort(-counts_WK[:, round_], kind="stable")
            workers = np.argsort(self.counts_W, kind="stable")
            new_M[most_rows * self.num_rounds + round_] = workers * self.num_rounds + round_
            self.counts_W[workers] += counts_WK[most_rows, round_]
        self.micro_batch_B = new_M[self.micro_batch_B]
        for values_M in (self.costs_M, self.room_M):
            values_M[new_M] = values_M.copy()

    def _relieve(self, most_expensive: int, slack_M: Integers) -> bool:
        """Reduces the cost of micro-batch `most_expensive` by the exchange or move with the largest gain (see
        `_gains`). `slack_M`: how far each micro-batch is below the maximum of its round. Returns whether there was
        one."""
        rows = np.flatnonzero(self.micro_batch_B == most_expensive)
        costs, lengths = self.costs_B[rows][:, None], self.lengths_B[rows][:, None]
        worker = most_expensive // self.num_rounds
        has_room_W = self.counts_W < self.rows_of_worker
        has_room_W[worker] = True
        micro_batches = np.flatnonzero(np.repeat(has_room_W, self.num_rounds))
        moved = _gains(
            costs, slack_M[micro_batches], (lengths <= self.room_M[micro_batches]) & (micro_batches != most_expensive)
        )
        partners = self._partners(slack_M)
        others = self.micro_batch_B[partners]
        change, tokens = costs - self.costs_B[partners], lengths - self.lengths_B[partners]
        exchanged = _gains(
            change, slack_M[others], (tokens <= self.room_M[others]) & (-tokens <= self.room_M[most_expensive])
        )
        best_move, best_exchange = int(moved.argmax()), int(exchanged.argmax()) if exchanged.size else -1
        gain_of_move = moved.flat[best_move]
        gain_of_exchange = exchanged.flat[best_exchange] if exchanged.size else 0
        if max(gain_of_move, gain_of_exchange) <= 0:
            return False
        if gain_of_move >= gain_of_exchange:
            row, index = divmod(best_move, len(micro_batches))
            self._move(int(rows[row]), int(micro_batches[index]))
        else:
            row, other = divmod(best_exchange, len(partners))
            self._move(int(rows[row]), int(others[other]))
            self._move(int(partners[other]), most_expensive)
        return True

    def _partners(self, slack_M: Integers) -> Integers:
        """The rows of the NUM_PARTNERS micro-batches with the most slack."""
        if len(slack_M) <= NUM_PARTNERS:
            return np.arange(len(self.micro_batch_B))
        is_partner_M = np.zeros(len(slack_M), dtype=bool)
        is_partner_M[np.argsort(-slack_M, kind="stable")[:NUM_PARTNERS]] = True
        return np.flatnonzero(is_partner_M[self.micro_batch_B])

    def _put(self, row: int, micro_batch: int) -> None:
        self.micro_batch_B[row] = micro_batch
        self.costs_M[micro_batch] += self.costs_B[row]
        self.room_M[micro_batch] -= self.lengths_B[row]
        self.counts_W[micro_batch // self.num_rounds] += 1

    def _move(self, row: int, micro_batch: int) -> None:
        before = self.micro_batch_B[row]
        self.costs_M[before] -= self.costs_B[row]
        self.room_M[before] += self.lengths_B[row]
        self.counts_W[before // self.num_rounds] -= 1
        self._put(row, micro_batch)


def _gains(change: Integers, slack: Integers, fits: npt.NDArray[np.bool_]) -> Integers:
    """By how much a move or exchange helps: the smaller of the cost that it takes away, and the slack that it leaves;
    at most 0 if it does not help or does not fit."""
    return np.where(fits, np.minimum(change, slack - change), 0)

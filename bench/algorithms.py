"""Losses and advantages per token: RLJob's flat tokens against verl's padded tables.

    python bench/algorithms.py [--quick] [--without-peer] [--json PATH]

A loss is measured with its metrics and its gradient with respect to the log-probabilities, and the results of both
sides are compared. An advantage is measured up to its values per token; on our side every call also builds the
segments. verl's `grpo` loops over the rows in Python; its vectorized variant `grpo_vectorized` is shown next to it. The
floor copies as many bytes as the inputs and results have. Both sides use one thread. Functions that go from token to
token are also measured on a large batch with two threads on our side, where verl makes one torch call per column. There
is no bar for the ratio to verl's time: our losses are written as their papers write them, and they take milliseconds of
a step of seconds.

A time is that of the fastest call: a call takes from a fraction of a millisecond to some tens of milliseconds and needs
only memory and cores, so any extra time is caused by other load on the machine. Next to it is the ratio of the medians
of the same rounds.

Clip-Cov and KL-Cov select tokens in a pass over the mini-batch: the selection is measured, the model's forward pass is
not. verl selects within the loss of a micro-batch.

Legend: B rows, N response tokens of all rows, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from rljob_api.v1alpha1.advantage import Gae, ReinforcePlusPlus
from rljob_api.v1alpha1.algorithm import Algorithm, LossAggregation
from rljob_api.v1alpha1.kl import KlEstimator
from rljob_api.v1alpha1.recipes import BY_STD, DUAL_CLIPPED, resolve_algorithm
from rljob_bench.command_line import DEFAULT, measuring, read_options
from rljob_bench.loss_case import LOSS_CASES
from rljob_bench.peer_process import PeerProcess
from rljob_bench.report import FLOOR, OURS, Measurement, ratio
from rljob_bench.rounds import Turn, interleaved, timed_calls
from rljob_bench.token_case import (
    ADVANTAGES,
    CLIPPED_BY_SEQUENCE,
    CLIPPED_WITH_KL,
    GAE,
    GAMMA,
    KL_COEFFICIENT,
    LAMBDA,
    ON_TOKENS,
    OPERATIONS,
    REINFORCE_PLUS_PLUS,
    WHITENING,
    Outcome,
    TokenCase,
    outcome,
    random_tables,
)
from rljob_trainer.algorithms.advantages import group_relative_advantages
from rljob_trainer.algorithms.aggregation import aggregate_loss, count_denominators
from rljob_trainer.algorithms.interfaces import (
    KL_PENALTIES,
    ROLLOUT_LOGPROBS,
    VALUES,
    LossInputs,
    OneWorker,
    PolicyLoss,
    ResponseInputs,
    TokenInputs,
    TokenLosses,
    WholeInputs,
)
from rljob_trainer.algorithms.kl import kl_estimate
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.algorithms.policy_losses import clipped_surrogate
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.token_advantages import generalized_advantages, reinforce_plus_plus_advantages
from rljob_trainer.algorithms.whitening import whitened

CASES = {
    "a micro-batch: 16 rows of 1,024 tokens": TokenCase(16, 1024, is_ragged=False),
    "a micro-batch: 32 rows of up to 2,048 tokens": TokenCase(32, 2048, is_ragged=True),
    "a batch: 256 rows of 4,096 tokens": TokenCase(256, 4096, is_ragged=False),
    "a batch: 256 rows of up to 4,096 tokens": TokenCase(256, 4096, is_ragged=True),
}
QUICK_CASES = {
    "16 rows of 64 tokens": TokenCase(16, 64, is_ragged=False),
    "16 rows of up to 64 tokens": TokenCase(16, 64, is_ragged=True),
}
LARGE_CASES = {
    "a large batch: 1,024 rows of 4,096 tokens": TokenCase(1024, 4096, is_ragged=False),
    "a large batch: 1,024 rows of up to 4,096 tokens": TokenCase(1024, 4096, is_ragged=True),
}
QUICK_LARGE_CASES = {"64 rows of 64 tokens": TokenCase(64, 64, is_ragged=False)}
MAX_ROWS_OF_MICRO_BATCH = 32
CALLS_PER_TURN = 5
TOLERANCE = 1e-4
CPU = torch.device("cpu")


class Tokens:
    """A case in the trainer's form: response tokens only."""

    def __init__(self, case: TokenCase) -> None:
        tables = random_tables(case)
        mask_BT = tables.mask_BT
        self.lengths = tuple(mask_BT.sum(dim=1).tolist())
        self.max_new_tokens = case.width
        self.logprobs_N = tables.logprobs_BT[mask_BT].requires_grad_()
        self.old_logprobs_N = tables.old_logprobs_BT[mask_BT]
        self.reference_logprobs_N = tables.reference_logprobs_BT[mask_BT]
        self.advantages_N = tables.advantages_BT[mask_BT]
        self.values_N = tables.values_BT[mask_BT]
        self.penalties_N = torch.zeros_like(self.values_N)
        self.rewards_B = tables.rewards_B
        self.groups_B = tables.groups_B

    def call(self, operation: str) -> Callable[[], Tensor]:
        """A function that runs an operation once, with its gradient if it is a loss, and returns the loss or the
        values."""
        if operation == WHITENING:
            return partial(whitened, self.advantages_N, OneWorker())
        if operation in LOSS_CASES:
            case = LOSS_CASES[operation]
            loss = policy_loss(resolve_algorithm(Algorithm.from_wire({"loss": case.wire})))
            return partial(self._named_loss, loss, case.by_sequence)
        if operation in ON_TOKENS:
            return partial(self._on_tokens, operation)
        return self._group_relative if operation in ADVANTAGES else partial(self._loss, operation)

    def num_moved(self, operation: str) -> int:
        """Minimum number of values that the operation reads and writes."""
        num_tokens = len(self.logprobs_N)
        if operation in ADVANTAGES:
            return num_tokens * {WHITENING: 2, GAE: 4, REINFORCE_PLUS_PLUS: 2}.get(operation, 1)
        return num_tokens * (5 if operation == CLIPPED_WITH_KL else 4)

    def outcome(self, operation: str) -> Outcome:
        """The result of one call, for comparison with verl."""
        found = self.call(operation)()
        if operation in ADVANTAGES:
            return outcome(float(found.sum()), found)
        assert self.logprobs_N.grad is not None
        return outcome(float(found), self.logprobs_N.grad)

    def _group_relative(self) -> Tensor:
        segments = Segments.of(self.lengths, CPU)
        inputs = ResponseInputs(self.rewards_B, self.groups_B, segments.lengths_B)
        return segments.spread(group_relative_advantages(inputs, BY_STD))

    def _on_tokens(self, operation: str) -> Tensor:
        columns = {VALUES: self.values_N, KL_PENALTIES: self.penalties_N}
        inputs = TokenInputs(self.rewards_B, self.groups_B, Segments.of(self.lengths, CPU), columns)
        if operation == GAE:
            return generalized_advantages(inputs, OneWorker(), Gae(gamma=GAMMA, lambda_=LAMBDA)).advantages_N
        return reinforce_plus_plus_advantages(inputs, OneWorker(), ReinforcePlusPlus(gamma=GAMMA)).advantages_N

    def _loss(self, operation: str) -> Tensor:
        segments = Segments.of(self.lengths, CPU)
        found = clipped_surrogate(
            LossInputs(segments, self.logprobs_N, self.old_logprobs_N, self.advantages_N), DUAL_CLIPPED
        )
        by_sequence = operation == CLIPPED_BY_SEQUENCE
        loss = self._aggregated(found.losses_N, segments, by_sequence)
        if operation == CLIPPED_WITH_KL:
            kl_N = kl_estimate(self.logprobs_N, self.reference_logprobs_N, KlEstimator.K3)
            loss = loss + KL_COEFFICIENT * self._aggregated(kl_N, segments, by_sequence)
        return self._with_gradient(loss, found)

    def _named_loss(self, loss: PolicyLoss, by_sequence: bool) -> Tensor:
        segments = Segments.of(self.lengths, CPU)
        tokens = (self.old_logprobs_N, self.advantages_N, {ROLLOUT_LOGPROBS: self.old_logprobs_N})
        whole: Mapping[str, Tensor] = {}
        if loss.whole_pass is not None:
            whole = loss.whole_pass(WholeInputs(segments, self.logprobs_N.detach(), *tokens), OneWorker())
        found = loss.compute(LossInputs(segments, self.logprobs_N, *tokens, whole=whole))
        return self._with_gradient(self._aggregated(found.losses_N, segments, by_sequence), found)

    def _with_gradient(self, loss: Tensor, found: TokenLosses) -> Tensor:
        self.logprobs_N.grad = None
        torch.autograd.backward(loss)
        for value in found.sums.values():
            value.item()
        return loss.detach()

    def _aggregated(self, values_N: Tensor, segments: Segments, by_sequence: bool) -> Tensor:
        aggregation = LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN if by_sequence else LossAggregation.TOKEN_MEAN
        return aggregate_loss(values_N, segments, aggregation, count_denominators(segments), 1, self.max_new_tokens)


def check_alike(operation: str, ours: Outcome, theirs: object) -> None:
    """Raises AssertionError if the two sides computed different results."""
    assert isinstance(theirs, dict)
    for name, value in asdict(ours).items():
        difference = abs(value - float(theirs[name]))
        assert difference <= TOLERANCE * max(1.0, ours.norm), f"{operation}: {name} {value}, verl's {theirs[name]}"


def measure(
    title: str,
    case: TokenCase,
    running: dict[str, PeerProcess],
    num_rounds: int,
    operations: tuple[str, ...] = (*OPERATIONS, *LOSS_CASES),
) -> Measurement:
    """Measures operations on one case."""
    tokens = Tokens(case)
    rows: dict[str, tuple[float | None, ...]] = {}
    seconds: dict[str, tuple[float, ...]] = {}
    for operation in operations:
        copied = torch.zeros(tokens.num_moved(operation) // 2)
        turns: dict[str, Turn] = {
            FLOOR: partial(timed_calls, partial(torch.zeros_like(copied).copy_, copied), CALLS_PER_TURN),
            OURS: partial(timed_calls, tokens.call(operation), CALLS_PER_TURN),
        }
        if DEFAULT in running:
            asked = {"operation": operation, "case": asdict(case)}
            theirs = running[DEFAULT].ask("algorithm", **asked, num_calls=1)["outcome"]
            if operation not in LOSS_CASES or not LOSS_CASES[operation].is_drawn:
                check_alike(operation, tokens.outcome(operation), theirs)
            turns[DEFAULT] = partial(running[DEFAULT].seconds, "algorithm", **asked, num_calls=CALLS_PER_TURN)
        timings = interleaved(turns, num_rounds)
        fastest = {name: 1e3 * each.fastest for name, each in timings.items()}
        of_peer = fastest[OURS] / fastest[DEFAULT] if DEFAULT in fastest else None
        shown = [fastest.get(name) for name in (FLOOR, OURS, DEFAULT)]
        rows[operation] = (*shown, fastest[OURS] / fastest[FLOOR], of_peer, ratio(timings, OURS, DEFAULT))
        seconds |= {f"{operation}: {name}": each.seconds for name, each in timings.items()}
    return Measurement(
        f"{title}, {len(tokens.logprobs_N):,} in all",
        ("floor, ms", f"{OURS}, ms", f"{DEFAULT}, ms", f"{OURS} / floor", f"{OURS} / {DEFAULT}", "of the medians"),
        rows,
        (),
        seconds,
    )


def main() -> None:
    """Runs the benchmark."""
    options = read_options("Losses and advantages: RLJob and verl.")
    torch.set_num_threads(1)
    with measuring(options, "bench/algorithms.py", (DEFAULT,)) as (running, report):
        for title, case in (QUICK_CASES if options.is_quick else CASES).items():
            # More rounds for shorter calls: a second or two for each operation.
            rounds = 2 if options.is_quick else 60 if case.num_rows <= MAX_ROWS_OF_MICRO_BATCH else 8
            report.add(measure(title, case, running, rounds))
        torch.set_num_threads(2)
        for title, case in (QUICK_LARGE_CASES if options.is_quick else LARGE_CASES).items():
            rounds = 2 if options.is_quick else 8
            report.add(measure(f"{title}, two threads", case, running, rounds, ON_TOKENS))
        report.write(options.json_path)


if __name__ == "__main__":
    main()

"""Tries a user's advantage or loss on small made-up inputs before a model is loaded.

Legend: B responses, N response tokens, S responses of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice, pairwise

import torch
from torch import Tensor

from rljob_trainer.algorithms.function_results import NOT_FINITE_SUM, NamedFunction
from rljob_trainer.algorithms.interfaces import (
    VALUES,
    AdvantageEstimator,
    LossInputs,
    OneWorker,
    PolicyLoss,
    Reduce,
    ResponseInputs,
    TokenInputs,
    WholeInputs,
)
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.several_workers import on_workers
from rljob_trainer.errors import AlgorithmFunctionError

CPU = torch.device("cpu")
LENGTHS = (5, 3, 1)
"""The number of tokens of each made-up response."""
LOGPROB_DIFFERENCES = (0.1, 0.0)
"""Differences of new and old log-probabilities to try: one that is within every trust region, and 0 as in a step's
first update."""
TOLERANCE = 1e-4
"""Relative and absolute tolerance for results that must be equal up to rounding."""

WITHOUT_TOKENS = "in a trial of a worker without any token; such a worker must call `reduce` like the others"
ON_SEVERAL_WORKERS = "in a trial with three workers: two that share the rows, and one without any token"
"""Hints that are added to the errors of a trial (`_with_hint`)."""


def try_advantage(estimator: AdvantageEstimator, named: NamedFunction, group_size: int) -> None:
    """Raises AlgorithmFunctionError if the function fails, is not deterministic, or returns something invalid.

    An advantage per token must not depend on how rows are distributed across workers."""
    if estimator.for_responses is not None:
        once_B, again_B = (estimator.for_responses(_responses(group_size)) for _ in range(2))
        _refuse_unequal(once_B, again_B, named)
    if estimator.for_tokens is not None:
        together, again = (
            estimator.for_tokens(_token_inputs(group_size, estimator.needs), OneWorker()) for _ in range(2)
        )
        if VALUES in estimator.needs and together.returns_N is None:
            raise named.error(
                f"needs {VALUES!r} but returned no returns, although the critic is trained on returns; return "
                "TokenAdvantages(advantages_N, returns_N)"
            )
        together_N, again_N = together.advantages_N, again.advantages_N
        _refuse_unequal(together_N, again_N, named)
        first, second, nothing = _on_three_workers(_token_inputs(group_size, estimator.needs), group_size)
        with _with_hint(WITHOUT_TOKENS):
            estimator.for_tokens(nothing, OneWorker())
        with _with_hint(ON_SEVERAL_WORKERS), named.naming_errors():
            on_three = on_workers([first, second, nothing], estimator.for_tokens)
        distributed_N = torch.cat([each.advantages_N for each in on_three])
        if not torch.allclose(distributed_N, together_N, rtol=TOLERANCE, atol=TOLERANCE):
            raise named.error(
                "returned a different advantage for the same token when other rows were on another worker, so training "
                "would depend on how rows are distributed across workers; use `reduce` for statistics over all rows"
            )


def try_loss(loss: PolicyLoss, named: NamedFunction) -> None:
    """Raises AlgorithmFunctionError if the function fails or returns something invalid.

    A loss and its gradient must be finite, and the loss of a token must not depend on the other rows of its
    micro-batch."""
    if loss.whole_pass is not None:
        with _with_hint(WITHOUT_TOKENS):
            loss.whole_pass(_whole_inputs(_loss_inputs((), 0.0, loss)), OneWorker())
    for difference in LOGPROB_DIFFERENCES:
        inputs = _loss_inputs(LENGTHS, difference, loss)
        if loss.whole_pass is not None:
            inputs = replace(inputs, whole=loss.whole_pass(_whole_inputs(inputs), OneWorker()))
            _try_whole_pass(loss.whole_pass, inputs, _loss_inputs((), difference, loss), named)
        together_N = _tried_losses(loss, inputs, named)
        alone_N = torch.cat([_tried_losses(loss, each, named) for each in _rows_alone(inputs)])
        if not torch.allclose(alone_N, together_N, rtol=TOLERANCE, atol=TOLERANCE):
            raise named.error(
                "returned a different loss for the same token when other rows were in its micro-batch, so training "
                "would depend on how rows are distributed; use `whole_pass` for statistics over all rows"
            )


def _refuse_unequal(once: Tensor, again: Tensor, named: NamedFunction) -> None:
    if not torch.equal(once, again):
        raise named.error(
            "returned different advantages for equal inputs, so a resumed run would differ from an uninterrupted one; "
            "keep no state between calls and draw no random numbers"
        )


def _try_whole_pass(
    whole_pass: Callable[[WholeInputs, Reduce], Mapping[str, Tensor]],
    together: LossInputs,
    nothing: LossInputs,
    named: NamedFunction,
) -> None:
    """Tries `whole_pass` with each row on a separate worker. `together` has all rows, and the result of the pass for
    these rows on a single worker; `nothing` has no rows."""
    parts = [_whole_inputs(each) for each in (*_rows_alone(together), nothing)]
    with _with_hint("in a trial with four workers: one for each row, and one without any token"), named.naming_errors():
        found = on_workers(parts, whole_pass)
    names = [set(each) for each in (together.whole, *found)]
    if any(each != names[0] for each in names):
        raise named.error(
            f"returned different names from its whole pass on some workers ({names}); return the same names on all"
        )
    for name, values in together.whole.items():
        distributed = [each[name] for each in found]
        if not bool(values.isfinite().all()):
            raise named.error(f"returned NaN or infinity as {name!r} from its whole pass; return finite numbers")
        if any((each.dim(), each.dtype) != (values.dim(), values.dtype) for each in distributed):
            raise named.error(
                f"returned {name!r} from its whole pass with different dimensions or another dtype for few rows than "
                "for many; return the same on all workers"
            )
        same = [torch.cat(distributed)] if values.dim() else distributed
        if not all(torch.allclose(each, values, rtol=TOLERANCE, atol=TOLERANCE) for each in same):
            raise named.error(
                f"returned a different {name!r} from its whole pass when rows were on other workers, so training would "
                "depend on how rows are distributed across workers; use `reduce` for statistics over all rows"
            )


@contextmanager
def _with_hint(circumstances: str) -> Iterator[None]:
    """Adds the circumstances of a trial to errors of the block."""
    try:
        yield
    except AlgorithmFunctionError as error:
        raise AlgorithmFunctionError(f"{error}\n({circumstances})") from error.__cause__


def _tried_losses(loss: PolicyLoss, inputs: LossInputs, named: NamedFunction) -> Tensor:
    """Returns the losses of these inputs. Raises AlgorithmFunctionError unless they and their gradient are finite."""
    found = loss.compute(inputs)
    if num_bad := int(found.sums[NOT_FINITE_SUM]):
        raise named.error(
            f"returned NaN or infinity for {num_bad} of {inputs.segments.num_values} tokens; return finite losses"
        )
    with named.naming_errors():
        (gradient_N,) = torch.autograd.grad(found.losses_N.sum(), inputs.logprobs_N, allow_unused=True)
    if gradient_N is None:
        raise named.error("returned losses whose gradient does not reach logprobs_N; compute them from logprobs_N")
    if not bool(gradient_N.isfinite().all()):
        raise named.error("returned losses whose gradient is NaN or infinite; look for square roots and powers of 0")
    return found.losses_N.detach()


def _responses(group_size: int) -> ResponseInputs:
    """Three groups: one with different rewards, one with equal rewards, one with negative rewards."""
    different_S = torch.linspace(0.0, 1.0, group_size)
    rewards_B = torch.cat([different_S, torch.ones(group_size), different_S - 1.5])
    groups_B = torch.arange(3).repeat_interleave(group_size)
    return ResponseInputs(rewards_B, groups_B, torch.arange(len(rewards_B)) % 7 + 1)


def _token_inputs(group_size: int, needs: Iterable[str]) -> TokenInputs:
    """Two groups. The first row is the longest, the last has the best reward."""
    num_rows = 2 * group_size
    segments = Segments.of([max(LENGTHS) + 2, *islice(cycle(LENGTHS), num_rows - 1)], CPU)
    rewards_B, groups_B = torch.linspace(-0.5, 1.0, num_rows), torch.arange(num_rows) // group_size
    return TokenInputs(rewards_B, groups_B, segments, _columns(needs, segments.num_values))


def _on_three_workers(inputs: TokenInputs, group_size: int) -> Iterator[TokenInputs]:
    """Distributes the rows across three workers: half of the first group, the other rows, and none."""
    lengths = inputs.segments.lengths
    bounds = (0, (group_size + 1) // 2, len(lengths), len(lengths))
    for start, stop in pairwise(bounds):
        tokens = slice(sum(lengths[:start]), sum(lengths[:stop]))
        yield TokenInputs(
            inputs.rewards_B[start:stop],
            inputs.groups_B[start:stop],
            Segments.of(lengths[start:stop], CPU),
            {name: values_N[tokens] for name, values_N in inputs.columns.items()},
        )


def _loss_inputs(lengths: Sequence[int], difference: float, loss: PolicyLoss) -> LossInputs:
    """Rows of these lengths. Old log-probabilities differ from new ones by `difference`, up and down in turns."""
    segments = Segments.of(lengths, CPU)
    num_tokens = segments.num_values
    logprobs_N = -torch.linspace(0.05, 3.0, num_tokens)
    alternating_N = 1.0 - 2.0 * (torch.arange(num_tokens) % 2)
    return LossInputs(
        segments=segments,
        logprobs_N=logprobs_N.clone().requires_grad_(),
        old_logprobs_N=logprobs_N + difference * alternating_N,
        advantages_N=torch.tensor([1.0, -0.5, 0.0]).repeat(num_tokens)[:num_tokens],
        columns=_columns(loss.needs, num_tokens),
        entropy_N=torch.linspace(0.1, 2.0, num_tokens) if loss.wanted.entropy else None,
        squares_N=torch.linspace(0.2, 0.9, num_tokens) if loss.wanted.squares else None,
    )


def _columns(needs: Iterable[str], num_tokens: int) -> dict[str, Tensor]:
    names = sorted(needs)
    return {name: -torch.linspace(0.04 + 0.01 * index, 2.9, num_tokens) for index, name in enumerate(names)}


def _whole_inputs(inputs: LossInputs) -> WholeInputs:
    return WholeInputs(
        inputs.segments, inputs.logprobs_N.detach(), inputs.old_logprobs_N, inputs.advantages_N, inputs.columns
    )


def _rows_alone(inputs: LossInputs) -> Iterator[LossInputs]:
    """Yields each row as a separate micro-batch."""
    lengths = list(inputs.segments.lengths)

    def part(values: Tensor, row: int) -> Tensor:
        return torch.split_with_sizes(values, lengths)[row] if values.dim() else values

    for row, length in enumerate(lengths):
        yield LossInputs(
            segments=Segments.of([length], CPU),
            logprobs_N=part(inputs.logprobs_N.detach(), row).clone().requires_grad_(),
            old_logprobs_N=part(inputs.old_logprobs_N, row),
            advantages_N=part(inputs.advantages_N, row),
            columns={name: part(values, row) for name, values in inputs.columns.items()},
            entropy_N=None if inputs.entropy_N is None else part(inputs.entropy_N, row),
            squares_N=None if inputs.squares_N is None else part(inputs.squares_N, row),
            whole={name: part(values, row) for name, values in inputs.whole.items()},
        )

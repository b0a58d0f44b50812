"""Checks and converts the results of a user's advantage or loss; errors name the job's field and the function.

Legend: N response tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import ADVANTAGE_COLUMNS, TokenAdvantages, TokenLosses
from rljob_trainer.errors import AlgorithmFunctionError, TrainerError
from rljob_trainer.observability.metrics import (
    ENTROPY,
    GRADIENT_NORM,
    KL_COEFFICIENT,
    KL_LOSS,
    LEARNING_RATE,
    NUM_SKIPPED_UPDATES,
    POLICY_LOSS,
    Reduction,
    reduction_of,
)
from rljob_trainer.user_functions import last_lines

METRIC_PREFIX = "actor/"
"""Before the name of a sum in the metrics."""
NOT_FINITE_SUM = "not_finite"
"""Added to the sums of a user's loss: the number of tokens whose loss is NaN or infinite."""

_RESERVED_METRICS = (POLICY_LOSS, ENTROPY, KL_LOSS, KL_COEFFICIENT, GRADIENT_NORM, LEARNING_RATE, NUM_SKIPPED_UPDATES)
_SUM_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class NamedFunction:
    """Names a user's function in errors, and checks its results. The checks raise AlgorithmFunctionError."""

    where: str
    """The job's field, such as `spec.training.algorithm.loss.function.path`."""
    path: str
    """The value of that field, such as `my_algorithms:my_loss`."""

    def error(self, problem: str) -> AlgorithmFunctionError:
        """An error that says what the function did wrong. `problem` starts with a verb: "returned None; ..."."""
        return AlgorithmFunctionError(f"{self.where}: {self.path} {problem}")

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Converts errors that the function raises in this block into AlgorithmFunctionErrors that name it.

        `sys.exit` counts as an error, because it would end the run as if the job were complete; Ctrl-C does not. Errors
        of the trainer itself pass unchanged."""
        try:
            yield
        except TrainerError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            raise self.error(f"raised {type(error).__name__}; fix it:\n{last_lines(error)}") from error

    def advantages(self, given: object, like: Tensor, what: str) -> Tensor:
        """One advantage for each of `what` ("responses" or "tokens"), with the shape, dtype and device of `like`."""
        # Converted before the check, because a float64 may become infinite in the dtype of `like`.
        numbers = self._numbers(given, like, f"return one advantage per {what.removesuffix('s')}")
        values = numbers.detach().to(like.dtype)
        finite = values.isfinite()
        if not bool(finite.all()):
            first = int(finite.logical_not().nonzero()[0, 0])
            raise self.error(
                f"returned NaN or infinity for {int(finite.logical_not().sum())} of {len(values)} {what}, first at "
                f"index {first}, where the reward is {float(like[first]):g}; return finite numbers, also for groups "
                "whose rewards are all equal"
            )
        return values

    def token_advantages(self, given: object, like: Tensor) -> TokenAdvantages:
        """One advantage per token, and one return per token if the function returns them, with the shape of `like`."""
        if not isinstance(given, TokenAdvantages):
            return TokenAdvantages(self.advantages(given, like, "tokens"))
        returns_N = None if given.returns_N is None else self.advantages(given.returns_N, like, "tokens")
        return TokenAdvantages(self.advantages(given.advantages_N, like, "tokens"), returns_N)

    def losses(self, given: object, logprobs_N: Tensor) -> TokenLosses:
        """The losses and sums that the function returned, plus NOT_FINITE_SUM."""
        found = TokenLosses(given) if isinstance(given, Tensor) else given
        if not isinstance(found, TokenLosses):
            raise self.error(
                f"returned {_described(given)}; return one loss per token, {_shape(logprobs_N)}, or TokenLosses"
            )
        losses_N = self._numbers(found.losses_N, logprobs_N, "return one loss per token")
        if not isinstance(found.sums, Mapping):
            raise self.error(
                f"returned {_described(found.sums)} as sums; return a mapping of names to tensors of shape []"
            )
        if logprobs_N.requires_grad and not losses_N.requires_grad:
            raise self.error("returned losses without a gradient; compute them from logprobs_N, without detach()")
        sums = {name: self._sum(name, value, logprobs_N.device) for name, value in found.sums.items()}
        return TokenLosses(losses_N, {**sums, NOT_FINITE_SUM: losses_N.detach().isfinite().logical_not().sum()})

    def whole_values(self, given: object, logprobs_N: Tensor) -> Mapping[str, Tensor]:
        """The named [N] and 0-d tensors that `whole_pass` returned, without gradient."""
        if not isinstance(given, Mapping):
            raise self.error(f"returned {_described(given)} from its whole pass; return a mapping of names to tensors")
        for name, value in given.items():
            if not isinstance(name, str) or name in (*ADVANTAGE_COLUMNS, "advantages"):
                raise self.error(
                    f"named a value of its whole pass {name!r}; use a name that no column has, as a string"
                )
            if not isinstance(value, Tensor) or (value.dim() and value.shape != logprobs_N.shape):
                raise self.error(
                    f"returned {_described(value)} as {name!r} from its whole pass; return a value per token, "
                    f"{_shape(logprobs_N)}, or a single number, []"
                )
        return {name: value.detach() for name, value in given.items()}

    def _numbers(self, given: object, like: Tensor, wanted: str) -> Tensor:
        if not isinstance(given, Tensor) or given.shape != like.shape or not given.is_floating_point():
            raise self.error(f"returned {_described(given)}; {wanted}, floating-point numbers of shape {_shape(like)}")
        if given.layout != torch.strided:
            raise self.error(f"returned a tensor of layout {given.layout}; {wanted} as a dense tensor")
        if given.device != like.device:
            raise self.error(f"returned a tensor on {given.device}; {wanted} on {like.device}, where the inputs are")
        return given

    def _sum(self, name: object, value: object, device: torch.device) -> Tensor:
        if not isinstance(name, str) or not _SUM_NAME.fullmatch(name):
            raise self.error(f"named a sum {name!r}; use lower-case letters, digits and underscores")
        metric = METRIC_PREFIX + name
        if metric in _RESERVED_METRICS or name == NOT_FINITE_SUM or reduction_of(metric) is Reduction.SUM:
            raise self.error(
                f"named a sum {name!r}; it is reported as {metric}, a mean over tokens, but this metric name is "
                "reserved for other values; use another name"
            )
        if not isinstance(value, Tensor) or value.dim():
            raise self.error(f"returned {_described(value)} as the sum {name!r}; return a tensor of shape []")
        return value.detach().to(device, non_blocking=True)


def _described(given: object) -> str:
    if isinstance(given, Tensor):
        return f"a tensor {_shape(given)} of {str(given.dtype).removeprefix('torch.')}"
    return "None" if given is None else f"a {type(given).__name__}"


def _shape(values: Tensor) -> str:
    return str(list(values.shape))

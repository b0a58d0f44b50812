"""What a user's function gave: taken as it is meant, or refused by name.

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
NOT_FINITE_SUM = "not_finite"
"""Added to the sums of a user's loss: tokens whose loss is NaN or infinite."""

_TAKEN_METRICS = (POLICY_LOSS, ENTROPY, KL_LOSS, KL_COEFFICIENT, GRADIENT_NORM, LEARNING_RATE, NUM_SKIPPED_UPDATES)
_SUM_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class NamedFunction:
    """Who is to blame: the job's field and the path in it. All methods raise AlgorithmFunctionError."""

    where: str
    path: str

    def error(self, problem: str) -> AlgorithmFunctionError:
        """The function did this."""
        return AlgorithmFunctionError(f"{self.where}: {self.path} {problem}")

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """What is raised within is the function's fault, unless it is an error of the trainer's own. So is `sys.exit`,
        which would end the run as if it had been completed; Ctrl-C is not."""
        try:
            yield
        except TrainerError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            raise self.error(f"raised {type(error).__name__}; fix it:\n{last_lines(error)}") from error

    def advantages(self, given: object, like: Tensor, what: str) -> Tensor:
        """One advantage for each of `what` (responses or tokens), as `like` in shape, dtype and device."""
        # In the dtype in which they are used: of what is beyond its range infinity becomes.
        values = self._numbers(given, like, f"give one advantage per {what.removesuffix('s')}").detach().to(like.dtype)
        finite = values.isfinite()
        if not bool(finite.all()):
            first = int(finite.logical_not().nonzero()[0, 0])
            raise self.error(
                f"gave NaN or infinity for {int(finite.logical_not().sum())} of {len(values)} {what}, first for number "
                f"{first}, whose reward is {float(like[first]):g}; give finite numbers, for groups whose rewards are "
                "all equal, too"
            )
        return values

    def token_advantages(self, given: object, like: Tensor) -> TokenAdvantages:
        """An advantage for each token, and its return where the function gives them, as `like`."""
        if not isinstance(given, TokenAdvantages):
            return TokenAdvantages(self.advantages(given, like, "tokens"))
        returns_N = None if given.returns_N is None else self.advantages(given.returns_N, like, "tokens")
        return TokenAdvantages(self.advantages(given.advantages_N, like, "tokens"), returns_N)

    def losses(self, given: object, logprobs_N: Tensor) -> TokenLosses:
        """Losses with their sums, to which the number of losses that are not finite is added."""
        found = TokenLosses(given) if isinstance(given, Tensor) else given
        if not isinstance(found, TokenLosses):
            raise self.error(f"gave {_described(given)}; give one loss per token, {_shape(logprobs_N)}, or TokenLosses")
        losses_N = self._numbers(found.losses_N, logprobs_N, "give one loss per token")
        if not isinstance(found.sums, Mapping):
            raise self.error(f"gave {_described(found.sums)} as sums; give a mapping of names to tensors of shape []")
        if logprobs_N.requires_grad and not losses_N.requires_grad:
            raise self.error("gave losses without a gradient; compute them from logprobs_N, without detach()")
        sums = {name: self._sum(name, value, logprobs_N.device) for name, value in found.sums.items()}
        return TokenLosses(losses_N, {**sums, NOT_FINITE_SUM: losses_N.detach().isfinite().logical_not().sum()})

    def whole_values(self, given: object, logprobs_N: Tensor) -> Mapping[str, Tensor]:
        """What the pass over the whole mini-batch gave: [N] and 0-d."""
        if not isinstance(given, Mapping):
            raise self.error(f"gave {_described(given)} from its whole pass; give a mapping of names to tensors")
        for name, value in given.items():
            if not isinstance(name, str) or name in (*ADVANTAGE_COLUMNS, "advantages"):
                raise self.error(f"named a value of its whole pass {name!r}; take a name that is not a column's")
            if not isinstance(value, Tensor) or (value.dim() and value.shape != logprobs_N.shape):
                raise self.error(
                    f"gave {_described(value)} as {name!r} from its whole pass; give a value per token, "
                    f"{_shape(logprobs_N)}, or a single number, []"
                )
        return {name: value.detach() for name, value in given.items()}

    def _numbers(self, given: object, like: Tensor, wanted: str) -> Tensor:
        if not isinstance(given, Tensor) or given.shape != like.shape or not given.is_floating_point():
            raise self.error(f"gave {_described(given)}; {wanted}, floating-point numbers of shape {_shape(like)}")
        if given.layout != torch.strided:
            raise self.error(f"gave a tensor of layout {given.layout}; {wanted} as a dense tensor")
        if given.device != like.device:
            raise self.error(f"gave a tensor on {given.device}; {wanted} on {like.device}, where the inputs are")
        return given

    def _sum(self, name: object, value: object, device: torch.device) -> Tensor:
        if not isinstance(name, str) or not _SUM_NAME.fullmatch(name):
            raise self.error(f"named a sum {name!r}; use lower-case letters, digits and underscores")
        metric = METRIC_PREFIX + name
        if metric in _TAKEN_METRICS or name == NOT_FINITE_SUM or reduction_of(metric) is Reduction.SUM:
            raise self.error(f"named a sum {name!r}; it is reported as {metric}, a mean over tokens: take another name")
        if not isinstance(value, Tensor) or value.dim():
            raise self.error(f"gave {_described(value)} as the sum {name!r}; give a tensor of shape []")
        return value.detach().to(device, non_blocking=True)


def _described(given: object) -> str:
    if isinstance(given, Tensor):
        return f"a tensor {_shape(given)} of {str(given.dtype).removeprefix('torch.')}"
    return "None" if given is None else f"a {type(given).__name__}"


def _shape(values: Tensor) -> str:
    return str(list(values.shape))

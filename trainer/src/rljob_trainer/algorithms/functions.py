"""A user's own advantages and losses: how they are declared, loaded and tried.

A plain function computes an advantage per response, or a loss that needs no optional inputs:

    def advantage(inputs: ResponseInputs) -> Tensor: ...      # [B]
    def loss(inputs: LossInputs) -> Tensor: ...               # [N]

An advantage per token is decorated with `token_advantage`, a loss that needs optional inputs with
`policy_loss_function`. Before the first step each function is tried on small made-up inputs (`function_trial`), so that
most mistakes are found before a model is loaded. Its results are also checked in every step.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rljob_api.v1alpha1.advantage import Function
from rljob_trainer.algorithms.function_results import METRIC_PREFIX, NOT_FINITE_SUM, NamedFunction
from rljob_trainer.algorithms.function_trial import try_advantage, try_loss
from rljob_trainer.algorithms.interfaces import (
    ADVANTAGE_COLUMNS,
    LOSS_COLUMNS,
    AdvantageEstimator,
    HeadOutputs,
    LossInputs,
    PolicyLoss,
    Reduce,
    ResponseInputs,
    TokenAdvantages,
    TokenInputs,
    TokenLosses,
    WholeInputs,
)
from rljob_trainer.errors import AlgorithmFunctionError, ConfigurationError
from rljob_trainer.user_functions import find_named, plain_function

ADVANTAGE_FIELD = "spec.training.algorithm.advantage.function.path"
LOSS_FIELD = "spec.training.algorithm.loss.function.path"

TokenFunction = Callable[[TokenInputs, Reduce], Tensor | TokenAdvantages]
LossFunction = Callable[[LossInputs], Tensor | TokenLosses]
WholeFunction = Callable[[WholeInputs, Reduce], Mapping[str, Tensor]]


def token_advantage(*, needs: Iterable[str] = ()) -> Callable[[TokenFunction], AdvantageEstimator]:
    """Decorates a function that computes an advantage per token on the workers.

    `function(inputs: TokenInputs, reduce: Reduce)` returns a tensor [N], or `TokenAdvantages` with returns for a
    critic. `needs`: the columns of `ADVANTAGE_COLUMNS` that the function reads."""

    def declare(function: TokenFunction) -> AdvantageEstimator:
        return AdvantageEstimator(_name(function), for_tokens=partial(_with_returns, function), needs=_names(needs))

    return declare


def policy_loss_function(
    *,
    needs: Iterable[str] = (),
    entropy: bool = False,
    squares: bool = False,
    whole_pass: WholeFunction | None = None,
) -> Callable[[LossFunction], PolicyLoss]:
    """Decorates a function that computes a loss per token.

    `function(inputs: LossInputs)` returns a tensor [N], or `TokenLosses` with sums to report as metrics. `needs`: the
    columns of `LOSS_COLUMNS` that the function reads. For `entropy` and `squares` see `HeadOutputs`, for `whole_pass`
    see `PolicyLoss.whole_pass`."""

    def declare(function: LossFunction) -> PolicyLoss:
        return PolicyLoss(
            _name(function), partial(_with_sums, function), _names(needs), HeadOutputs(entropy, squares), whole_pass
        )

    return declare


def function_path(function: Function | None, field: str) -> str:
    """The import path of the user's function. Raises ConfigurationError if the `function` block is missing."""
    if function is None:
        raise ConfigurationError(
            f"{field}: missing for type Function; add `function: {{path: package.module:function}}`"
        )
    return function.path


def load_advantage(path: str, group_size: int) -> AdvantageEstimator:
    """Loads the user's advantage and tries it on groups of this size. Raises ConfigurationError if either fails."""
    named = NamedFunction(ADVANTAGE_FIELD, path)
    found = find_named(path, ADVANTAGE_FIELD)
    if isinstance(found, PolicyLoss):
        raise ConfigurationError(f"{ADVANTAGE_FIELD}: {path} is a policy loss; name it in algorithm.loss.function")
    if isinstance(found, AdvantageEstimator):
        _refuse_unknown(found.needs, ADVANTAGE_COLUMNS, named)
        estimator = replace(
            found,
            name=path,
            for_responses=None if found.for_responses is None else _checked_for_responses(found.for_responses, named),
            for_tokens=None if found.for_tokens is None else _checked_for_tokens(found.for_tokens, named),
        )
    else:
        function = _plain_function(found, named, "decorate an advantage per token with @token_advantage()")
        estimator = AdvantageEstimator(path, for_responses=_checked_for_responses(function, named))
    with _as_configuration_error():
        try_advantage(estimator, named, group_size)
    return estimator


def load_policy_loss(path: str) -> PolicyLoss:
    """Loads the user's policy loss and tries it. Raises ConfigurationError if either fails."""
    named = NamedFunction(LOSS_FIELD, path)
    found = find_named(path, LOSS_FIELD)
    if isinstance(found, AdvantageEstimator):
        raise ConfigurationError(f"{LOSS_FIELD}: {path} is an advantage; name it in algorithm.advantage.function")
    if isinstance(found, PolicyLoss):
        _refuse_unknown(found.needs, LOSS_COLUMNS, named)
        whole_pass = None if found.whole_pass is None else _checked_whole_pass(found.whole_pass, named)
        loss = replace(found, name=path, compute=_checked_compute(found.compute, named), whole_pass=whole_pass)
    else:
        function = _plain_function(found, named, "declare optional inputs with @policy_loss_function(...)")
        loss = PolicyLoss(path, _checked_compute(function, named))
    with _as_configuration_error():
        try_loss(loss, named)
    return loss


@contextmanager
def in_step(step: int) -> Iterator[None]:
    """Adds the step to errors of the user's functions. `step` counts from 0; the message counts from 1."""
    try:
        yield
    except AlgorithmFunctionError as error:
        raise type(error)(f"step {step + 1}: {error}") from error.__cause__


def refuse_not_finite(loss: PolicyLoss, metrics: Mapping[str, float]) -> None:
    """Raises AlgorithmFunctionError if losses of a user's function were NaN or infinite.

    `metrics` are those of a step, including the loss's sums. This is checked once per step, because reading the sums of
    each micro-batch would make the host wait for the device."""
    if fraction := metrics.get(METRIC_PREFIX + NOT_FINITE_SUM, 0.0):
        raise NamedFunction(LOSS_FIELD, loss.name).error(
            f"returned NaN or infinity for {100 * fraction:.3g} % of the tokens; look for divisions, logarithms and "
            "exponentials of unbounded values in this function"
        )


def _checked_for_responses(
    function: Callable[[ResponseInputs], object], named: NamedFunction
) -> Callable[[ResponseInputs], Tensor]:
    """Returns the function with checks of its results, and with errors that name it. The next three functions do the
    same."""

    def for_responses(inputs: ResponseInputs) -> Tensor:
        with named.naming_errors():
            given = function(inputs)
        return named.advantages(given, inputs.rewards_B, "responses")

    return for_responses


def _checked_for_tokens(
    function: Callable[[TokenInputs, Reduce], object], named: NamedFunction
) -> Callable[[TokenInputs, Reduce], TokenAdvantages]:
    def for_tokens(inputs: TokenInputs, reduce: Reduce) -> TokenAdvantages:
        with named.naming_errors(), torch.no_grad():
            given = function(inputs, reduce)
        return named.token_advantages(given, inputs.segments.spread(inputs.rewards_B))

    return for_tokens


def _checked_compute(
    function: Callable[[LossInputs], object], named: NamedFunction
) -> Callable[[LossInputs], TokenLosses]:
    def compute(inputs: LossInputs) -> TokenLosses:
        if not inputs.segments.num_values:
            # A worker without tokens does not call the function, but needs a graph for the backward collectives.
            return TokenLosses(inputs.logprobs_N)
        with named.naming_errors():
            given = function(inputs)
        return named.losses(given, inputs.logprobs_N)

    return compute


def _checked_whole_pass(
    function: Callable[[WholeInputs, Reduce], object], named: NamedFunction
) -> Callable[[WholeInputs, Reduce], Mapping[str, Tensor]]:
    def whole_pass(inputs: WholeInputs, reduce: Reduce) -> Mapping[str, Tensor]:
        with named.naming_errors(), torch.no_grad():
            given = function(inputs, reduce)
        return named.whole_values(given, inputs.logprobs_N)

    return whole_pass


def _plain_function(found: object, named: NamedFunction, otherwise: str) -> Callable[..., object]:
    """The function, if it can be called with the inputs as its only argument. Raises ConfigurationError otherwise."""
    function, signature = plain_function(found, named.path, named.where)
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigurationError(
            f"{named.where}: {named.path}{signature} cannot be called as function(inputs): {error}; {otherwise}"
        ) from error
    return function


def _refuse_unknown(needs: frozenset[str], known: tuple[str, ...], named: NamedFunction) -> None:
    if unknown := sorted(needs - set(known)):
        raise ConfigurationError(
            f"{named.where}: {named.path} needs {', '.join(map(repr, unknown))}, which is not available; use "
            f"{', '.join(known)}"
        )


@contextmanager
def _as_configuration_error() -> Iterator[None]:
    try:
        yield
    except AlgorithmFunctionError as error:
        raise ConfigurationError(f"{error}\n(in a trial on small made-up inputs, before step 1)") from error.__cause__


def _with_returns(function: TokenFunction, inputs: TokenInputs, reduce: Reduce) -> TokenAdvantages:
    given = function(inputs, reduce)
    # A result of any other type is rejected later, by `_checked_for_tokens`.
    return TokenAdvantages(given) if isinstance(given, Tensor) else given


def _with_sums(function: LossFunction, inputs: LossInputs) -> TokenLosses:
    given = function(inputs)
    return TokenLosses(given) if isinstance(given, Tensor) else given


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _names(needs: Iterable[str]) -> frozenset[str]:
    return frozenset([needs] if isinstance(needs, str) else needs)

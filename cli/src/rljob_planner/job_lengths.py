"""The lengths of prompts and responses of a job, and the number of turns."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.environment import Environment
from rljob_api.v1alpha1.training import Training
from rljob_planner.errors import PlanError
from rljob_planner.workload import TokenLengths

TURNS = 0.5
"""Mean number of turns of a rollout with an environment, divided by `maxTurns`. A guess."""


@dataclass(frozen=True)
class LengthOptions:
    """Mean lengths in tokens that the user passes as options; None if unknown. The maxima are in the job file."""

    prompt_mean: float | None = None
    response_mean: float | None = None


def token_lengths(training: Training, known: LengthOptions) -> TokenLengths:
    """The lengths of prompts and responses. Maxima come from the job. An unknown mean is assumed to be half of the
    maximum (of a conversation: half of what the longest response leaves). For responses, the range of seconds then
    covers means from a quarter of the maximum to the maximum.

    Raises PlanError if a given mean is not above 0, or larger than the maximum."""
    longest, environment = training.rollout.max_new_tokens, training.environment
    conversation_max = None if environment is None else environment.max_context_tokens
    rest = training.max_sequence_tokens - longest
    caps = {"prompt": rest if conversation_max is None else conversation_max - 1, "response": longest}
    guessed = {"prompt": rest / 2, "response": longest / 2}
    given = {"prompt": known.prompt_mean, "response": known.response_mean}
    means = {}
    for name, cap in caps.items():
        means[name] = mean = guessed[name] if (chosen := given[name]) is None else chosen
        if not 0 < mean <= cap:
            raise PlanError(
                f"--mean-{name}: must be greater than 0 and at most the job's limit of {cap} tokens (seen {mean:g});"
                " correct the value"
            )
    guesses = [name for name, mean in given.items() if mean is None]
    names, options = (" and ".join(each.format(name) for name in guesses) for each in ("{}s", "--mean-{}"))
    is_guess = "response" in guesses
    return TokenLengths(
        prompt_mean=means["prompt"],
        prompt_max=caps["prompt"],
        response_mean=means["response"],
        response_max=longest,
        response_mean_low=longest / 4 if is_guess else None,
        response_mean_high=float(longest) if is_guess else None,
        assumption=(
            f"the mean length of {names} is assumed to be half of the limit; set {options} for a better estimate"
            if guesses
            else ""
        ),
        conversation_max=conversation_max,
        num_turns=assumed_turns(environment),
    )


def assumed_turns(environment: Environment | None) -> float:
    """The assumed mean number of turns of a rollout."""
    return 1.0 if environment is None else max(1.0, TURNS * environment.max_turns)

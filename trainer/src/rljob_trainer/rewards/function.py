"""A user's own reward function, named by `package.module:function`.

What a call of the function gets depends on `function.takes`:

| takes | parameters | returns |
|---|---|---|
| Response | `prompt`, `response`, `answer`, `row` | a number |
| Batch | `prompts`, `responses`, `answers`, `rows`: lists of the same length | one number per response |
| Group | `prompt`, `responses`, `answer`, `row`: all responses to one prompt | one number per response |

A function that has a parameter `messages` also gets the conversation of each response. An `async def` function runs in
an event loop, several calls at the same time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import AsyncCalls, RewardRequest, Scorer, SyncCalls, Takes
from rljob_trainer.user_functions import find_named, is_async_function, plain_function

ARGUMENTS: Mapping[Takes, tuple[str, ...]] = {
    Takes.RESPONSE: ("prompt", "response", "answer", "row"),
    Takes.BATCH: ("prompts", "responses", "answers", "rows"),
    Takes.GROUP: ("prompt", "responses", "answer", "row"),
}
MESSAGES = "messages"


@dataclass(frozen=True)
class FunctionScorer:
    """Calls the function with keyword arguments, to prevent mistakes in their order."""

    path: str
    where: str
    takes: str = Takes.RESPONSE
    needs_async: bool = False
    """Whether the job has a setting that only applies to `async def` functions."""

    @property
    def name(self) -> str:
        """The function's path."""
        return self.path

    def load(self) -> Scorer | SyncCalls | AsyncCalls:
        """Raises ConfigurationError if the module or the function is missing, or if the function cannot be called with
        the arguments of `takes`."""
        function, names = self._checked_function()
        if is_async_function(function):
            coroutine_function = cast(Callable[..., Awaitable[object]], function)

            async def scores_async(requests: Sequence[RewardRequest]) -> Sequence[object]:
                value = await coroutine_function(**self._arguments(requests, names))
                return self._values(value, len(requests))

            return AsyncCalls(scores_async)
        if self.needs_async:
            raise ConfigurationError(
                f"{self.where}: {self.path} is not an `async def` function, so maxConcurrency would have no effect; "
                "make the function async, or remove maxConcurrency (numProcesses sets how many calls run at the same "
                "time)"
            )
        if self.takes == Takes.RESPONSE:

            def score(request: RewardRequest) -> object:
                return function(**self._arguments([request], names))

            return score

        def scores(requests: Sequence[RewardRequest]) -> Sequence[object]:
            return self._values(function(**self._arguments(requests, names)), len(requests))

        return SyncCalls(scores)

    def _checked_function(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        """The function, and the names of its parameters."""
        found = find_named(self.path, self.where)
        function, signature = plain_function(found, self.path, self.where, may_be_async=True)
        names = ARGUMENTS[Takes(self.takes)]
        if MESSAGES in signature.parameters:
            names = (*names, MESSAGES)
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            arguments = ", ".join(f"{name}=..." for name in ARGUMENTS[Takes(self.takes)])
            advice = "give it these four parameters"
            fitting = [takes for takes in Takes if takes != self.takes and _has_parameters(signature.parameters, takes)]
            if fitting:
                advice = f"its parameters are those of `takes: {fitting[0]}`: set this in the job, or change them"
            raise ConfigurationError(
                f"{self.where}: {self.path}{signature} cannot be called as ({arguments}): {error}; {advice}"
            ) from error
        return function, names

    def _arguments(self, requests: Sequence[RewardRequest], names: Sequence[str]) -> dict[str, object]:
        first = requests[0]
        messages = [[dict(message) for message in each.messages] for each in requests]
        is_single = self.takes == Takes.RESPONSE
        given: dict[str, object] = {
            "prompt": first.prompt,
            "prompts": [each.prompt for each in requests],
            "response": first.response,
            "responses": [each.response for each in requests],
            "answer": first.answer,
            "answers": [each.answer for each in requests],
            "row": dict(first.row),
            "rows": [dict(each.row) for each in requests],
            MESSAGES: messages[0] if is_single else messages,
        }
        return {name: given[name] for name in names}

    def _values(self, value: object, num_responses: int) -> Sequence[object]:
        """One value for each response. Raises TypeError or ValueError."""
        if self.takes == Takes.RESPONSE:
            return [value]
        return score_list(value, num_responses)


def score_list(value: object, num_responses: int) -> Sequence[object]:
    """The values that a function returned for several responses. Raises TypeError or ValueError if it did not return
    one for each."""
    to_list = getattr(value, "tolist", None)
    values = to_list() if callable(to_list) else value
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(
            f"returned a {type(value).__name__} for {num_responses} responses; return a list with one number for each"
        )
    if len(values) != num_responses:
        raise ValueError(
            f"returned {len(values)} scores for {num_responses} responses; return one number for each, in their order"
        )
    return values


def _has_parameters(parameters: Mapping[str, object], takes: Takes) -> bool:
    return set(ARGUMENTS[takes]) <= parameters.keys()

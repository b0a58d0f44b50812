"""The objects of the user's classes in an environment process, one for each open rollout, and calls to them."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rljob_trainer.environments.description import (
    CLOSE,
    GET_REWARD,
    NAME_COLUMN,
    RESET,
    RESPOND,
    ClassSpec,
    is_closable,
    is_reusable,
    load_class,
    required_arguments,
    takes_seed,
    tool_names,
)
from rljob_trainer.environments.returned_values import (
    MAX_CHARACTERS,
    as_opening,
    as_reply,
    as_reward,
    as_tool_text,
)
from rljob_trainer.environments.user_calls import CallResult, UserCall, UserCalls
from rljob_trainer.processes.child_program import MAX_DETAIL_CHARACTERS, describe_error, printable
from rljob_trainer.rewards.unreachable import is_unreachable
from rljob_trainer.user_functions import TRAINER_FOLDER

OK = "OK"
ERROR = "ERROR"
UNREACHABLE = "UNREACHABLE"
Report = Callable[[bool], None]
Value = TypeVar("Value")


class CallError(Exception):
    """A call of the user's code failed; `status` is ERROR, or UNREACHABLE if a service could not be reached."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True)
class LoadedClass:
    """A class of the job with what the process needs to know about it."""

    cls: type
    spec: ClassSpec
    tools: frozenset[str]

    @classmethod
    def load(cls, spec: ClassSpec) -> LoadedClass:
        """Imports the class. Raises ConfigurationError if it cannot be used."""
        loaded = load_class(spec)
        return cls(loaded, spec, frozenset(tool_names(loaded)))


@dataclass
class _Rollout:
    of: LoadedClass
    instance: object
    has_failed: bool = False
    """True after an error in `reset`, `respond` or `get_reward`: the object is not used again."""


class UserObjects:
    """Answers requests; each method gets `report`, which reports the beginning of a call (see `UserCall`)."""

    def __init__(self, classes: Sequence[LoadedClass], calls: UserCalls) -> None:
        self._classes = {each.spec.name: each for each in classes}
        self._calls = calls
        self._open: dict[int, _Rollout] = {}
        self._reusable: defaultdict[str, list[object]] = defaultdict(list)
        """Objects of ended rollouts, by the name of their class."""

    async def open(self, rollout: int, name: str, row: Mapping[str, object], seed: int, report: Report) -> object:
        """Calls `reset` of a new or reused object. Raises CallError if the code fails."""
        of = self._classes[name]
        self._calls.random_states.seed(rollout, seed)
        if self._reusable[name]:
            instance = self._reusable[name].pop()
        else:
            made = await self._calls.run(UserCall(rollout, report, of.cls, (), dict(of.spec.arguments)))
            instance = result_of(made, "the constructor")
        self._open[rollout] = _Rollout(of, instance)
        columns = dict(row)
        if len(self._classes) > 1:
            columns.pop(NAME_COLUMN, None)
        # A column of the row comes first, because the class may have been written for it. A null is no seed.
        if takes_seed(of.cls) and columns.get("seed") is None:
            columns["seed"] = seed
        if missing := [each for each in required_arguments(instance) if each not in columns]:
            raise CallError(ERROR, _missing_columns_text(missing, row, of.spec))
        return await self._checked(rollout, RESET, (), columns, as_opening, report)

    async def call_tools(self, rollout: int, tool_calls: Sequence[object], report: Report) -> list[list[object]]:
        """The text of each call's result or error, and whether it is an error. Calls that are not async run first, in
        order; then the async ones together, as in TRL."""
        texts: dict[int, list[object]] = {}
        waiting: dict[int, UserCall] = {}
        most_characters = MAX_CHARACTERS // max(1, len(tool_calls))
        for index, tool_call in enumerate(tool_calls):
            try:
                call = self._tool_call(rollout, tool_call, report)
            except (TypeError, ValueError) as error:
                texts[index] = _error_text(error)
                continue
            if inspect.iscoroutinefunction(call.function):
                waiting[index] = call
            else:
                texts[index] = _tool_text(await self._calls.run(call), most_characters)
        outcomes = await asyncio.gather(*map(self._calls.run, waiting.values()))
        texts |= {index: _tool_text(each, most_characters) for index, each in zip(waiting, outcomes, strict=True)}
        return [texts[index] for index in range(len(tool_calls))]

    async def respond(self, rollout: int, message: object, report: Report) -> object:
        """Calls `respond`. Raises CallError if it fails."""
        return await self._checked(rollout, RESPOND, (message,), {}, as_reply, report)

    async def reward(self, rollout: int, report: Report) -> object:
        """Calls `get_reward`. Raises CallError if it fails."""
        return await self._checked(rollout, GET_REWARD, (), {}, as_reward, report)

    async def close(self, rollout: int, report: Report) -> None:
        """Ends a rollout: its object is kept for another rollout, or closed. An error of `close` is only logged."""
        ended = self._open.pop(rollout, None)
        if ended is not None and is_reusable(ended.of.cls) and not ended.has_failed:
            self._reusable[ended.of.spec.name].append(ended.instance)
        elif ended is not None and is_closable(ended.of.cls):
            outcome = await self._calls.run(UserCall(rollout, report, getattr(ended.instance, CLOSE)))
            if outcome.error is not None:
                what = describe_error(outcome.error, TRAINER_FOLDER)
                print(f"{ended.of.spec.path}.close() {what}", file=sys.stderr)
        self._calls.random_states.forget(rollout)

    async def _checked(
        self,
        rollout: int,
        method: str,
        arguments: tuple[object, ...],
        named: Mapping[str, object],
        check: Callable[[object], Value],
        report: Report,
    ) -> Value:
        """Calls a method and checks what it returned. Raises CallError."""
        of = self._open[rollout]
        try:
            call = UserCall(rollout, report, getattr(of.instance, method), arguments, named)
            return checked_result(result_of(await self._calls.run(call), method), method, check)
        except BaseException:
            # Also a cancelled call leaves an object that is not reused.
            of.has_failed = True
            raise

    def _tool_call(self, rollout: int, tool_call: object, report: Report) -> UserCall:
        """The call of a tool. Raises ValueError or TypeError, for the model, if there is no such tool or if its
        arguments do not fit."""
        of = self._open[rollout]
        match tool_call:
            case [str() as name, dict() as named] if name in of.of.tools:
                function = getattr(of.instance, name)
                # Raises TypeError for wrong arguments.
                inspect.signature(function).bind(**named)
                return UserCall(rollout, report, function, (), named)
            case [str() as name, _] if name in of.of.tools:
                raise TypeError(f"The arguments of tool {name} must be an object.")
            case [name, _]:
                raise ValueError(f"Tool {name} not found.")
        raise TypeError(f"not a call of a tool: {tool_call!r:.200}")


def _missing_columns_text(missing: Sequence[str], row: Mapping[str, object], spec: ClassSpec) -> str:
    names = ", ".join(map(repr, missing))
    if row:
        seen = f"this row has only the columns {', '.join(map(repr, row))}"
        advice = "add what is missing to each row of the dataset"
    else:
        seen, advice = "the job has no dataset", "add a dataset with this column"
    return (
        f"reset of {spec.path} needs {names} from the row's columns, but {seen}; {advice}, or give the parameter a "
        "default value"
    )


def result_of(outcome: CallResult, method: str) -> object:
    """What a call returned. Raises CallError if it raised an exception; `method` names what was called."""
    if outcome.error is None:
        return outcome.value
    raise CallError(_status_of(outcome.error), f"{method} {describe_error(outcome.error, TRAINER_FOLDER)}")


def checked_result(value: object, method: str, check: Callable[[object], Value]) -> Value:
    """The value that `check` makes of a result. Raises CallError if it rejects the result."""
    try:
        return check(value)
    except (TypeError, ValueError) as error:
        raise CallError(ERROR, f"{method} {printable(str(error))[:MAX_DETAIL_CHARACTERS]}") from error
    except BaseException as error:
        # Raised by code of the returned value, for example its `__len__`.
        raise CallError(ERROR, f"{method} {describe_error(error, TRAINER_FOLDER)}") from error


def _status_of(error: BaseException) -> str:
    """ERROR or UNREACHABLE; also works if an attribute of the exception raises."""
    try:
        return UNREACHABLE if is_unreachable(error) else ERROR
    except BaseException:
        return ERROR


def _tool_text(outcome: CallResult, max_characters: int) -> list[object]:
    if outcome.error is not None:
        return _error_text(outcome.error)
    try:
        return [as_tool_text(outcome.value, max_characters), False]
    except BaseException as error:
        # Also what `__str__` of the result raises.
        return _error_text(error)


def _error_text(error: BaseException) -> list[object]:
    """An error as the model sees it, in the form that TRL uses."""
    try:
        what = str(error) or type(error).__name__
    except BaseException:
        what = type(error).__name__
    return [printable(str({"error": what[:MAX_DETAIL_CHARACTERS]})), True]

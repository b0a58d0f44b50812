"""The program of one environment process: runs the rollouts that share it.

`child_process` starts it as `python -m rljob_trainer.environments.environment_program SOCKET_FD LIFELINE_FD`.

Requests are frames (see `child_program`) with values (see `wire`): `[kind, argument, ...]`. The first one is `["load",
classes]`. For each frame, the program writes `["begun", blocks]` before each call of user code, where `blocks` is true
if nothing else can run in the process meanwhile, and one result:

| request | result |
|---|---|
| `load`, classes | `["OK", null]`, `["REFUSED", text]` |
| `describe`, class name | `["OK", description]`, `["REFUSED", text]` |
| `open`, rollout, class name, row, seed | `["OK", string, messages or null]` or a failure |
| `call_tools`, rollout, [[name, arguments], ...] | `["OK", [[text, is an error], ...]]` |
| `respond`, rollout, message | `["OK", messages or null]` or a failure |
| `reward`, rollout | `["OK", number or mapping]` or a failure |
| `run`, rollout, name, fields of the session, row, seed | `["OK", number, mapping or null]` or a failure |
| `close`, rollout | `["OK", null]` |
| `cancel`, token of an earlier frame | nothing; the earlier one gets a failure |

A failure is `["ERROR" or "UNREACHABLE", text]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from rljob_trainer.environments.agent_runs import AgentRuns, LoadedAgent
from rljob_trainer.environments.description import ClassSpec, describe_class, describe_function
from rljob_trainer.environments.user_calls import UserCall, UserCalls
from rljob_trainer.environments.user_objects import ERROR, OK, CallError, LoadedClass, UserObjects
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.processes.child_program import FrameReader, connect, describe_error, printable, send
from rljob_trainer.processes.wire import decode

REFUSED = "REFUSED"
BEGUN = "begun"
DESCRIBING = -1
"""The number of the rollout for code that runs while the classes are described."""


def main() -> None:
    """Runs until the parent closes the connection or ends."""
    descriptor = connect("environment")
    reader = FrameReader(descriptor)
    token, frame = next(iter(reader))
    try:
        # Before a loop runs, because code that runs at import may start one.
        specs = _class_specs(frame)
        classes = [LoadedClass.load(spec) for spec in specs if not spec.is_agent]
        agents = [LoadedAgent.load(spec) for spec in specs if spec.is_agent]
    except ConfigurationError as error:
        send(descriptor, token, [REFUSED, printable(str(error))])
        return
    send(descriptor, token, [OK, None])
    program = _Program(descriptor, classes, agents)
    # Frames that arrived together with the first one are in the reader already.
    program.calls.loop.call_soon(program.read, reader)
    program.calls.loop.add_reader(descriptor, program.read, reader)
    program.calls.run_forever()


class _Program:
    """Starts a task for each request."""

    def __init__(self, descriptor: int, classes: list[LoadedClass], agents: list[LoadedAgent]) -> None:
        self.calls = UserCalls()
        self._descriptor = descriptor
        self._classes = classes
        self._agents = agents
        self._objects = UserObjects(classes, self.calls)
        self._runs = AgentRuns(agents, self.calls)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Requests that have no result yet, by their tokens."""

    def read(self, reader: FrameReader) -> None:
        """Starts what has been requested."""
        frames = reader.read_available()
        if frames is None:
            self.calls.end()
            return
        for token, frame in frames:
            match decode(frame):
                case ["cancel", str() as cancelled]:
                    if (task := self._tasks.get(cancelled)) is not None:
                        task.cancel()
                case request:
                    task = self.calls.loop.create_task(self._handle(token, request))
                    self._tasks[token] = task
                    task.add_done_callback(partial(self._finish, token))

    async def _handle(self, token: str, request: object) -> None:
        def reply(*values: object) -> None:
            send(self._descriptor, token, values)

        try:
            reply(OK, await self._result(request, lambda blocks: reply(BEGUN, blocks)))
        except CallError as error:
            reply(error.status, str(error))
        except ConfigurationError as error:
            reply(REFUSED, printable(str(error)))

    def _finish(self, token: str, task: asyncio.Task[None]) -> None:
        del self._tasks[token]
        if task.cancelled():
            send(self._descriptor, token, [ERROR, "was cancelled"])
        elif (error := task.exception()) is not None:
            send(self._descriptor, token, [ERROR, describe_error(error)])

    async def _result(self, request: object, report: Callable[[bool], None]) -> object:
        match request:
            case ["describe", str() as name]:
                outcome = await self.calls.run(UserCall(DESCRIBING, report, self._description, (name,)))
                if outcome.error is not None:
                    raise outcome.error
                return outcome.value
            case ["open", int() as rollout, str() as name, dict() as row, int() as seed]:
                return await self._objects.open(rollout, name, row, seed, report)
            case ["call_tools", int() as rollout, list() as tool_calls]:
                return await self._objects.call_tools(rollout, tool_calls, report)
            case ["respond", int() as rollout, message]:
                return await self._objects.respond(rollout, message, report)
            case ["reward", int() as rollout]:
                return await self._objects.reward(rollout, report)
            case ["run", int() as rollout, str() as name, dict() as session, dict() as row, int() as seed]:
                return await self._runs.run(rollout, name, session, row, seed, report)
            case ["close", int() as rollout]:
                await self._objects.close(rollout, report)
                return None
        raise CallError(ERROR, f"not a request: {request!r:.200}")

    def _description(self, name: str) -> dict[str, object]:
        for of in self._classes:
            if of.spec.name == name:
                return describe_class(of.cls, of.spec).to_json()
        [agent] = self._agents
        return describe_function(agent.function, agent.spec).to_json()


def _class_specs(frame: bytes) -> list[ClassSpec]:
    match decode(frame):
        case ["load", [*classes]]:
            return [_class_spec(each) for each in classes]
    raise ConfigurationError(f"spec.training.environment.classes: not a request to load classes: {frame!r:.200}")


def _class_spec(value: object) -> ClassSpec:
    match value:
        case [str() as name, str() as path, dict() as arguments, str() as where, bool() as is_agent]:
            return ClassSpec(name, path, arguments, where, is_agent)
    raise ConfigurationError(f"spec.training.environment.classes: not a class: {value!r:.200}")


if __name__ == "__main__":
    main()

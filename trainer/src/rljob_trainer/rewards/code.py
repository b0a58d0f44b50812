"""A reward for Python code: runs the code of a response in the sandbox against the tests of its row."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import NoReturn

from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.rewards.base import RewardRequest, Scored, Scorer
from rljob_trainer.rewards.code_comparison import is_expected_output, is_expected_value
from rljob_trainer.rewards.code_tests import CallTest, CodeTest, OutputTest, StatementTest, largest, parse_tests
from rljob_trainer.rewards.final_message import SPECIAL_TOKEN, without_thinking
from rljob_trainer.sandbox.confinement import make_unreadable
from rljob_trainer.sandbox.programs import Mode
from rljob_trainer.sandbox.sandbox import (
    ProgramLimits,
    Sandbox,
    SandboxError,
    SandboxKilledError,
    SandboxUnavailableError,
)

FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")
"""The line before or after a block: its indentation, the fence, and the name of a language."""
MAX_OUTPUT_BYTES = 1 << 20
"""A program may write this much plus twice the length of the expected output."""
POOL_FACTOR, POOL_SECONDS = 10.0, 60.0
"""See `pool_seconds`."""

TRIAL_FAILURE = "a forbidden system call succeeded"
TRIAL = f"""
import os
for attempt in (os.fork, lambda: os.kill(os.getppid(), 9), lambda: os.execv("/bin/true", ["true"])):
    try:
        attempt()
    except PermissionError:
        continue
    raise SystemExit({TRIAL_FAILURE!r})
print("confined")
"""
"""A program that attempts forbidden system calls. It prints `confined` if all of them fail."""


@dataclass(frozen=True)
class CodeScorer:
    """The fraction of the row's tests that the code in the last fenced block of a response passes.

    Each test runs in a process of its own. If the sandbox fails, this process ends, and the pool scores the response
    again in another one.
    """

    where: str
    is_fraction: bool
    """Whether the score is the fraction; otherwise it is 1 if all tests pass, else 0."""
    max_tests: int
    test_seconds: float
    response_seconds: float
    memory_bytes: int
    name: str = "Code"

    def load(self) -> Scorer:
        """Starts the sandbox and tests it. Raises ConfigurationError if this machine cannot confine code, and
        ResourceError if the sandbox failed in another way, such as for lack of memory."""
        try:
            sandbox = Sandbox(self.memory_bytes)
            trial = sandbox.run(Mode.SCRIPT, {"code": TRIAL}, b"", ProgramLimits(60.0, MAX_OUTPUT_BYTES))
        except SandboxKilledError as error:
            _end_process(error)
        except SandboxUnavailableError as error:
            raise self._cannot_confine(str(error)) from error
        except SandboxError as error:
            raise self._has_failed(str(error)) from error
        if TRIAL_FAILURE in trial.failure:
            raise self._cannot_confine(trial.failure)
        if trial.failure or trial.output != b"confined\n":
            raise self._has_failed(trial.failure or repr(trial.output))
        if not sandbox.layers.landlock_abi:
            make_unreadable()
        print(f"sandbox: {sandbox.layers.describe()}", flush=True)

        def score(request: RewardRequest) -> object:
            tests = largest(_tests_of(request), self.max_tests)
            code = find_code(request.last_turn)
            if code is None:
                return Scored(0.0, "")
            try:
                return self._score(sandbox, code, tests)
            except SandboxError as error:
                _end_process(error)

        return score

    def _cannot_confine(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.where}: the code of responses cannot be confined on this machine: {reason} (the sandbox needs "
            "Linux with seccomp, in a container whose seccomp profile allows it, such as RuntimeDefault)"
        )

    def _has_failed(self, reason: str) -> ResourceError:
        return ResourceError(
            f"{self.where}: the sandbox failed on this machine: {reason}; check its memory, number of processes, open "
            "files and the disk of temporary files; if the code of responses needs more memory, increase code.memory"
        )

    def _score(self, sandbox: Sandbox, code: str, tests: list[CodeTest]) -> Scored:
        seconds_left, num_passed, first_failure = self.response_seconds, 0, ""
        for number, test in enumerate(tests, 1):
            began = time.monotonic()
            limit = min(self.test_seconds, seconds_left)
            failure = run_test(sandbox, code, test, limit) if limit > 0 else "no time left (timeoutSeconds)"
            # Time in which the program waited for a core does not count, so a test uses at most its limit.
            seconds_left -= min(time.monotonic() - began, limit)
            if not failure:
                num_passed += 1
                continue
            first_failure = first_failure or f"; test {number}: {failure}"
            if not self.is_fraction:
                return Scored(0.0, f"failed test {number} of {len(tests)}: {failure}")
        return Scored(num_passed / len(tests), f"passed {num_passed} of {len(tests)} tests{first_failure}")


def pool_seconds(response_seconds: float) -> float:
    """The time limit of the pool for one response. It ends only a scoring process that hangs; the sandbox ends slow
    code. Unlike the sandbox's limit, it also counts the time in which the code waits for a core."""
    return POOL_FACTOR * response_seconds + POOL_SECONDS


def run_test(sandbox: Sandbox, code: str, test: CodeTest, seconds: float) -> str:
    """Why the code fails the test; empty if it passes. Raises ValueError for a test that cannot be used."""
    match test:
        case OutputTest():
            limits = ProgramLimits(seconds, MAX_OUTPUT_BYTES + 2 * len(test.expected))
            run = sandbox.run(Mode.SCRIPT, {"code": code}, test.stdin.encode(errors="surrogatepass"), limits)
            output = run.output.decode(errors="replace")
            return run.failure or ("" if is_expected_output(output, test.expected) else "wrong output")
        case CallTest():
            limits = ProgramLimits(seconds, MAX_OUTPUT_BYTES + 2 * len(json.dumps(test.expected)))
            call = {"function": test.function, "arguments": list(test.arguments), "keywords": dict(test.keywords)}
            run = sandbox.run(Mode.CALL, {"code": code, **call}, b"", limits)
            return run.failure or ("" if is_expected_value(run.result, test.expected) else "wrong value")
        case StatementTest():
            run = sandbox.run_statement(code, test.source, ProgramLimits(seconds, MAX_OUTPUT_BYTES))
            return _statement_failure(run.failure, run.result)


def find_code(response: str) -> str | None:
    """The content of the last fenced block of the final message, as in Markdown; None if there is none. Thinking is
    ignored. A block that is not closed is not found: the response was truncated."""
    found: str | None = None
    opening: re.Match[str] | None = None
    block: list[str] = []
    for line in without_thinking(response).split("\n"):
        fence = FENCE.fullmatch(SPECIAL_TOKEN.sub("", line))
        if opening is None:
            if fence is not None and "`" not in fence[3]:
                opening, block = fence, []
        elif fence is not None and fence[2].startswith(opening[2]) and not fence[3].strip():
            found, opening = "".join(f"{each}\n" for each in block), None
        else:
            indentation = opening[1]
            block.append(line.removeprefix(indentation))
    return found


def _tests_of(request: RewardRequest) -> list[CodeTest]:
    try:
        return parse_tests(request.answer)
    except ValueError as error:
        raise ValueError(f"the row's answer is {error}; correct it, or remove the row") from None


def _statement_failure(failure: str, result: bytes) -> str:
    """Why a statement failed, according to the result that its process wrote; empty if it passed. Raises ValueError if
    the test cannot be used."""
    match json.loads(result) if result and not failure else None:
        case {"passed": _}:
            return ""
        case {"failed": str() as text}:
            return text
        case {"unusable": str() as text}:
            raise ValueError(f"a test of the row cannot be used: {text}; correct it, or remove the row")
    return failure or "the test gave no result"


def _end_process(error: SandboxError) -> NoReturn:
    """Ends this scoring process, because its sandbox has failed. The pool then scores the response again in another
    process. After SIGKILL it reports that memory ran out, which no policy turns into a score."""
    print(f"sandbox: {error}", flush=True)
    if isinstance(error, SandboxKilledError):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)

"""Scoring is retried: once alone after a timeout or a dead process, after pauses if a service is unreachable."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rljob_trainer.errors import RewardError
from rljob_trainer.rewards import process_pool
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.rewards.unreachable import is_unreachable

USER_CODE = """
import os, time
from pathlib import Path

FOLDER = Path(__file__).parent

def score(prompt, response, answer, row):
    with (FOLDER / "begun").open("a") as begun:
        begun.write(f"{response},{os.getpid()}\\n")
    num_begun = (FOLDER / "begun").read_text().count(response + ",")
    verb, _, value = response.partition(" ")
    if verb == "hangs" or verb == "hangs_once" and num_begun == 1:
        time.sleep(600)
    while verb == "waits" and not (FOLDER / "go").exists():
        time.sleep(0.01)
    if verb == "exits" or verb == "exits_once" and num_begun == 1:
        os._exit(7)
    if verb == "busy" or verb == "busy_twice" and num_begun <= 2:
        raise ConnectionRefusedError("the judge does not listen")
    return float(value or 1)
"""


@contextmanager
def pool_in(folder: Path, *, timeout_seconds: float = 60.0) -> Iterator[ScorerPool]:
    (folder / "flaky.py").write_text(USER_CODE)
    with ScorerPool(
        FunctionScorer("flaky:score", "here"),
        name="score",
        num_processes=1,
        timeout_seconds=timeout_seconds,
        log_folder=folder / "logs",
        environment=scorer_environment(os.environ, [], [folder]),
    ) as pool:
        pool.wait_until_ready()
        yield pool


def run(pool: ScorerPool, *responses: str) -> list[RewardOutcome]:
    return pool.submit([RewardRequest("p", response, None, {}) for response in responses]).result(timeout=60)


def begun(folder: Path) -> list[tuple[str, str]]:
    """Response and process of each attempt, in order."""
    return [(line.split(",")[0], line.split(",")[1]) for line in (folder / "begun").read_text().splitlines()]


def processes(folder: Path, response: str) -> list[str]:
    return [process for each, process in begun(folder) if each == response]


def test_a_timeout_and_a_dead_process_are_retried_once_alone_in_a_fresh_process(tmp_path: Path) -> None:
    responses = ["number 1", "hangs_once 2", "exits_once 3", "exits", "number 4", "number 5"]
    with pool_in(tmp_path, timeout_seconds=1.0) as pool:
        outcomes = run(pool, *responses)
    assert [outcome.status for outcome in outcomes] == ["OK", "OK", "OK", "DIED", "OK", "OK"]
    assert [outcome.score for outcome in outcomes] == [1.0, 2.0, 3.0, None, 4.0, 5.0]
    attempts = begun(tmp_path)
    for response in ("hangs_once 2", "exits_once 3", "exits"):
        first, second = processes(tmp_path, response)
        assert first != second
        # The second attempt is the first work of its process.
        assert next(each for each, process in attempts if process == second) == response


def test_a_response_that_always_hangs_has_two_attempts_and_no_score(tmp_path: Path) -> None:
    with pool_in(tmp_path, timeout_seconds=0.5) as pool:
        hanging, fine = run(pool, "hangs", "number 2")
    assert (hanging.status, hanging.score) == ("TIMEOUT", None)
    assert (fine.status, fine.score) == ("OK", 2.0)
    assert len(processes(tmp_path, "hangs")) == 2


def test_an_unreachable_service_is_tried_again_while_other_responses_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "UNREACHABLE_PAUSES", (0.3, 0.6, 0.3))
    with pool_in(tmp_path) as pool:
        started = time.monotonic()
        busy, twice, fine = run(pool, "busy", "busy_twice 2", "number 3")
        assert time.monotonic() - started > 1.2, "the pauses"
    assert (busy.status, busy.score) == ("UNREACHABLE", None)
    assert busy.detail.startswith("raised ConnectionRefusedError: the judge does not listen")
    assert (twice.status, twice.score) == ("OK", 2.0)
    assert (fine.status, fine.score) == ("OK", 3.0)
    attempts = [response for response, _ in begun(tmp_path)]
    assert attempts.count("busy") == 4
    assert attempts.count("busy_twice 2") == 3
    # Nothing waits for the pauses.
    assert attempts[:3] == ["busy", "busy_twice 2", "number 3"]
    assert len({process for _, process in begun(tmp_path)}) == 1, "no process ended"


def made(module: str, name: str, *bases: type[Exception], **attributes: object) -> Exception:
    """An exception of a class with this module and name, as a library that is not installed would raise it."""
    return type(name, bases or (Exception,), {"__module__": module, **attributes})("no answer")


def answered(status: int) -> object:
    return type("Response", (), {"status_code": status})()


CONNECT_ERROR = type("NetworkError", (Exception,), {"__module__": "httpx"})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError("reset"), True),
        (TimeoutError("timed out"), True),
        (made("requests.exceptions", "ConnectionError", OSError), True),
        (made("httpx", "ConnectError", CONNECT_ERROR), True),
        (made("urllib3.exceptions", "MaxRetryError"), True),
        (made("aiohttp.client_exceptions", "ClientConnectionError"), True),
        (made("openai", "APIConnectionError"), True),
        (made("openai", "APIStatusError", status_code=429), True),
        (made("openai", "APIStatusError", status_code=401), False),
        (made("requests.exceptions", "HTTPError", OSError, response=answered(503)), True),
        (made("requests.exceptions", "HTTPError", OSError, response=answered(404)), False),
        (made("requests.exceptions", "HTTPError", OSError, response=None), False),
        (made("urllib.error", "HTTPError", OSError, code=502), True),
        (made("aiohttp.client_exceptions", "ClientResponseError", status=500), True),
        (made("grpc._channel", "_InactiveRpcError", type("RpcError", (Exception,), {"__module__": "grpc"})), False),
        (made("my_rewards", "ConnectionError"), False),
        (BrokenPipeError(), False),
        (ValueError("no number"), False),
        (FileNotFoundError("no file"), False),
        (ExceptionGroup("both", [ConnectionResetError(), TimeoutError()]), True),
        (ExceptionGroup("one", [ConnectionResetError(), KeyError("typo")]), False),
    ],
    ids=repr,
)
def test_unreachable_services_are_distinguished_from_errors_of_the_code(error: Exception, expected: bool) -> None:
    assert is_unreachable(error) is expected


@pytest.mark.parametrize(("other", "expected"), [(TimeoutError(), True), (KeyError("typo"), False)])
def test_a_group_that_led_to_the_error_counts_as_the_group_itself(other: Exception, expected: bool) -> None:
    """A judge's client with an asyncio.TaskGroup raises such errors."""
    error = RuntimeError("no verdict")
    error.__cause__ = ExceptionGroup("both", [ConnectionResetError(), other])
    error.__cause__.__context__ = ConnectionResetError()
    assert is_unreachable(error) is expected


def test_the_codes_of_grpc_count() -> None:
    rpc_error = type("RpcError", (Exception,), {"__module__": "grpc"})
    for name, expected in (("UNAVAILABLE", True), ("INVALID_ARGUMENT", False)):
        code = type("StatusCode", (), {"name": name})()
        error = type("_InactiveRpcError", (rpc_error,), {"code": lambda _, code=code: code})()
        assert is_unreachable(error) is expected


def raised(raise_error: str) -> Exception:
    """The exception that the handler of a failed connection raises."""
    try:
        try:
            raise ConnectionResetError("reset")
        except ConnectionResetError as error:
            if raise_error == "from":
                raise RuntimeError("the judge is down") from error
            if raise_error == "implicit":
                raise RuntimeError("the judge is down")  # noqa: B904 (a user may write it)
            if raise_error == "hidden":
                raise RuntimeError("the judge is down") from None
            undefined  # noqa: B018, F821 (the mistake)  # type: ignore[name-defined]
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("how", "expected"), [("from", True), ("implicit", True), ("hidden", False), ("typo", False)])
def test_the_cause_of_an_error_counts_unless_the_error_is_a_mistake_in_the_code(how: str, expected: bool) -> None:
    assert is_unreachable(raised(how)) is expected


def test_responses_of_a_cancelled_batch_are_not_scored_if_no_process_has_them(tmp_path: Path) -> None:
    with pool_in(tmp_path) as pool:
        waiting, dropped = (pool.submit([RewardRequest("p", name, None, {})]) for name in ("waits", "dropped"))
        assert dropped.cancel()
        (tmp_path / "go").touch()
        assert run(pool, "next")[0].score == 1.0
        assert waiting.result(timeout=60)[0].score == 1.0
    assert [response for response, _ in begun(tmp_path)] == ["waits", "next"]


def test_a_response_whose_second_process_does_not_load_fails_and_does_not_wait(tmp_path: Path) -> None:
    with pool_in(tmp_path) as pool:
        path = tmp_path / "flaky.py"
        path.write_text(f"{USER_CODE}\nos._exit(3)")
        with pytest.raises(RewardError, match=r"ended its process \(exit code 3\)"):
            run(pool, "exits")

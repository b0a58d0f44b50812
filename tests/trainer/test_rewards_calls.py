"""Reward functions that are asynchronous, or get several responses in one call. Real processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import CallSettings, RewardOutcome, RewardRequest, Takes
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.rewards.scorer_environment import scorer_environment

USER_CODE = """
import asyncio, os, sys, time
from pathlib import Path

FOLDER = Path(__file__).parent
ALL_HAVE_BEGUN = asyncio.Event()
begun = []

async def meet(prompt, response, answer, row):
    # Each call waits for the others, so they must run at the same time.
    begun.append(response)
    if len(begun) == 40:
        ALL_HAVE_BEGUN.set()
    await ALL_HAVE_BEGUN.wait()
    return float(response)

async def verbs(prompt, response, answer, row):
    with (FOLDER / "attempts").open("a") as attempts:
        attempts.write(f"{response},{os.getpid()}\\n")
    verb, _, value = response.partition(" ")
    if verb == "waits":
        await asyncio.sleep(600)
    if verb == "ignores":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
    if verb == "blocks":
        time.sleep(600)
    if verb == "dies":
        os._exit(3)
    if verb == "exits":
        sys.exit(3)
    if verb == "raises":
        raise KeyError("no such colour")
    if verb == "text":
        return "high"
    await asyncio.sleep(0.05)
    return float(value)

def batch(prompts, responses, answers, rows):
    assert len(prompts) == len(responses) == len(answers) == len(rows)
    with (FOLDER / "sizes").open("a") as sizes:
        sizes.write(f"{len(responses)}\\n")
    if "one less" in responses:
        return [1.0]
    if "number" in responses:
        return 1.0
    return [float("nan") if each == "nan" else row["base"] + len(each) for each, row in zip(responses, rows)]

def group(prompt, responses, answer, row):
    if "raises" in responses:
        raise ValueError(f"group of {prompt}")
    mean = sum(map(len, responses)) / len(responses)
    return [len(each) - mean for each in responses]

async def async_group(prompt, responses, answer, row, messages):
    await asyncio.sleep(0)
    return [len(responses) + len(each) for each in messages]
"""


@contextmanager
def pool_of(
    folder: Path, name: str, calls: CallSettings, *, timeout_seconds: float = 60.0, needs_async: bool = False
) -> Iterator[ScorerPool]:
    (folder / "several_calls.py").write_text(USER_CODE)
    with ScorerPool(
        FunctionScorer(f"several_calls:{name}", "spec.training.rewards[0].function.path", calls.takes, needs_async),
        name="score",
        num_processes=1,
        timeout_seconds=timeout_seconds,
        log_folder=folder / "logs",
        environment=scorer_environment(os.environ, [], [folder]),
        calls=calls,
    ) as pool:
        pool.wait_until_ready()
        yield pool


def requests(*responses: str) -> list[RewardRequest]:
    return [RewardRequest("p", response, None, {"base": 10}) for response in responses]


def seen(outcomes: list[RewardOutcome]) -> list[tuple[str, float | None]]:
    return [(outcome.status, outcome.score) for outcome in outcomes]


def test_calls_of_an_async_function_run_at_the_same_time_in_one_process(tmp_path: Path) -> None:
    with pool_of(tmp_path, "meet", CallSettings(max_calls=40)) as pool:
        outcomes = pool.submit(requests(*map(str, range(40)))).result(timeout=60)
    assert seen(outcomes) == [("OK", float(each)) for each in range(40)]


def attempts(folder: Path) -> list[tuple[str, str]]:
    """Response and process of each attempt."""
    return [(line.split(",")[0], line.split(",")[1]) for line in (folder / "attempts").read_text().splitlines()]


def test_failures_of_async_calls_do_not_affect_others(tmp_path: Path) -> None:
    texts = ["number 1", "waits", "raises", "ignores", "number 2", "text", "exits", "number 3", "number 4"]
    with pool_of(tmp_path, "verbs", CallSettings(max_calls=4), timeout_seconds=1.0) as pool:
        outcomes = pool.submit(requests(*texts)).result(timeout=60)
    by_text = dict(zip(texts, outcomes, strict=True))
    assert [by_text[f"number {each}"].score for each in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
    for waiting in ("waits", "ignores"):
        outcome = by_text[waiting]
        assert (outcome.status, outcome.score, outcome.seconds) == ("TIMEOUT", None, 1.0)
        assert outcome.detail == "ran longer than 1 s and was cancelled"
    assert by_text["raises"].status == by_text["text"].status == by_text["exits"].status == "ERROR"
    assert by_text["raises"].detail.startswith("raised KeyError: 'no such colour'")
    assert "several_calls.py" in by_text["raises"].detail
    assert by_text["text"].detail.startswith("returned a str ('high')")
    assert len({process for _, process in attempts(tmp_path)}) == 1, "no process ended"
    assert [response for response, _ in attempts(tmp_path)].count("waits") == 2


def test_a_call_that_blocks_alone_is_made_a_second_time_alone(tmp_path: Path) -> None:
    with pool_of(tmp_path, "verbs", CallSettings(max_calls=4), timeout_seconds=1.0) as pool:
        before = pool.process_ids()
        first = pool.submit(requests("blocks"))
        while pool.process_ids() in (before, []):
            time.sleep(0.01)
        # The process was replaced, and the next one makes the call again.
        others = pool.submit(requests("number 1", "number 2"))
        assert [outcome.status for outcome in first.result(timeout=60)] == ["TIMEOUT"]
        assert seen(others.result(timeout=60)) == [("OK", 1.0), ("OK", 2.0)]
    assert [response for response, _ in attempts(tmp_path)].count("blocks") == 2


@pytest.mark.parametrize(("verb", "status"), [("blocks", "TIMEOUT"), ("dies", "DIED")])
def test_a_call_that_stops_its_process_is_found_among_those_at_the_same_time(
    tmp_path: Path, verb: str, status: str
) -> None:
    texts = [f"number {each}" for each in range(6)]
    with pool_of(tmp_path, "verbs", CallSettings(max_calls=8), timeout_seconds=0.8) as pool:
        *fine, stopping = pool.submit(requests(*texts, verb)).result(timeout=60)
    assert seen(fine) == [("OK", float(each)) for each in range(6)]
    assert (stopping.status, stopping.score) == (status, None)


def test_a_batch_function_gets_lists_of_limited_length(tmp_path: Path) -> None:
    with pool_of(tmp_path, "batch", CallSettings(Takes.BATCH, max_responses=4)) as pool:
        outcomes = pool.submit(requests("a", "bb", "nan", "dddd", "eeeee", "f")).result(timeout=60)
        short = pool.submit(requests("one less", "b")).result(timeout=60)
        number = pool.submit(requests("number", "b")).result(timeout=60)
    assert seen(outcomes) == [("OK", 11), ("OK", 12), ("ERROR", None), ("OK", 14), ("OK", 15), ("OK", 11)]
    assert outcomes[2].detail == "returned nan; return a finite number"
    assert (tmp_path / "sizes").read_text().split() == ["4", "2", "2", "2"]
    assert [each.status for each in (*short, *number)] == ["ERROR"] * 4
    assert "returned 1 scores for 2 responses; return one number for each, in their order" in short[1].detail
    assert "returned a float for 2 responses; return a list with one number for each" in number[0].detail


def test_a_group_function_gets_all_responses_of_each_group(tmp_path: Path) -> None:
    texts = ["a", "bb", "cccc", "dd", "raises", "e"]
    with pool_of(tmp_path, "group", CallSettings(Takes.GROUP)) as pool:
        outcomes = pool.submit(requests(*texts), groups=[0, 5, 0, 5, 7, 7]).result(timeout=60)
        assert pool.submit([], groups=[]).result(timeout=60) == []
    assert seen(outcomes[:4]) == [("OK", -1.5), ("OK", 0), ("OK", 1.5), ("OK", 0)]
    assert [each.status for each in outcomes[4:]] == ["ERROR", "ERROR"]
    assert outcomes[5].detail.startswith("raised ValueError: group of p")


def test_an_async_group_function_gets_the_conversations(tmp_path: Path) -> None:
    talk = [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "?"}]
    asked = [RewardRequest("p", "a", None, {}, talk), RewardRequest("p", "b", None, {}, talk[:1])]
    with pool_of(tmp_path, "async_group", CallSettings(Takes.GROUP, max_calls=4)) as pool:
        assert seen(pool.submit(asked, groups=[1, 1]).result(timeout=60)) == [("OK", 4.0), ("OK", 3.0)]


@pytest.mark.parametrize(
    ("name", "takes", "needs_async", "message"),
    [
        (
            "batch",
            Takes.RESPONSE,
            False,
            r"batch\(prompts, .*\) cannot be called as \(prompt=.*`takes: Batch`: set",
        ),
        ("group", Takes.BATCH, False, r"group\(prompt, .*\) cannot be called as \(prompts=.*`takes: Group`: set this"),
        ("meet", Takes.GROUP, False, r"meet\(prompt, response, .*cannot be called as .*`takes: Response`: set this"),
        ("group", Takes.GROUP, True, r"group is not an `async def` function, so maxConcurrency would have no effect"),
    ],
)
def test_a_function_with_other_parameters_is_rejected_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, takes: Takes, needs_async: bool, message: str
) -> None:
    (tmp_path / "several_calls.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "several_calls", raising=False)
    where = "spec.training.rewards[0].function.path"
    with pytest.raises(ConfigurationError, match=rf"(?s)^spec.training.rewards\[0\].function.path: .*{message}"):
        FunctionScorer(f"several_calls:{name}", where, takes, needs_async).load()
    monkeypatch.delitem(sys.modules, "several_calls")

"""Reward servers, called over HTTP: replies, failures. A real server on this machine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from rljob_testing.local_servers import free_port
from rljob_testing.reward_services import Answer, RewardService, reward_service
from rljob_trainer.errors import ResourceError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest
from rljob_trainer.rewards.services import service
from rljob_trainer.rewards.services.reward_server import RewardServer
from rljob_trainer.rewards.services.scorers import RemoteScorer

FINE = Answer("{}")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[RewardService]:
    with reward_service(lambda _: FINE) as running:
        yield running


def request(response: str) -> RewardRequest:
    return RewardRequest("p", response, "a", {})


def probed(spec: RemoteScorer) -> None:
    asyncio.run(RewardServer(spec).probe())


REMOTE = RemoteScorer("spec.training.rewards[0].remote (reward mine)", "", None, 10.0)


def scored_remotely(
    server: RewardService, given: Answer, *responses: str, url: str | None = None
) -> list[tuple[str, float | None, str]]:
    async def run(spec: RemoteScorer) -> Sequence[RewardOutcome]:
        remote = RewardServer(spec)
        found = await remote.scores([request(each) for each in responses])
        await remote.service.close()
        return found

    server.answers(given)
    outcomes = asyncio.run(run(replace(REMOTE, url=url or server.url)))
    for received in server.received:
        assert received.body == {
            "prompts": ["p"] * len(responses),
            "responses": list(responses),
            "answers": ["a"] * len(responses),
            "rows": [{}] * len(responses),
            "query": [f"p{each}" for each in responses],
            "labels": ["a"] * len(responses),
        }
    return [(outcome.status, outcome.score, outcome.detail) for outcome in outcomes]


def test_a_reward_server_scores_batches_by_either_protocol(server: RewardService) -> None:
    assert scored_remotely(server, Answer('{"scores": [1, 0.25]}'), "r", "s") == [("OK", 1.0, ""), ("OK", 0.25, "")]
    both = Answer('{"rewards": [2.5, -1], "scores": [1, 0], "extra_logs": {}}')
    assert scored_remotely(server, both, "r", "s") == [("OK", 2.5, ""), ("OK", -1.0, "")]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"scores": [1]}', "returned 1 scores for 2 responses"),
        ('{"scores": 1}', "returned a int for 2 responses; return a list with one number for each"),
        ('{"score": [1, 2]}', 'returned a JSON object without "scores" (keys: score); return {"scores": ['),
        ('{"scores": "12"}', "returned a str for 2 responses"),
    ],
)
def test_a_wrong_reply_of_a_reward_server_is_an_error_of_its_batch(
    server: RewardService, body: str, problem: str
) -> None:
    found = scored_remotely(server, Answer(body), "r", "s")
    assert [(status, score) for status, score, _ in found] == [("ERROR", None)] * 2
    assert all(problem in detail for _, _, detail in found)


def test_a_wrong_score_of_a_reward_server_is_an_error_of_its_response(server: RewardService) -> None:
    found = scored_remotely(server, Answer('{"scores": [1, NaN, null, "2", [3]]}'), *"abcde")
    assert [(status, score) for status, score, _ in found] == [("OK", 1.0), *[("ERROR", None)] * 4]
    assert found[1][2] == "returned nan; return a finite number"


def test_a_reward_server_that_fails_gives_no_scores(server: RewardService) -> None:
    for failure in (Answer("oops", 500), Answer("<html>"), Answer('{"scores": [1', 200)):
        found = scored_remotely(server, failure, "r", "s")
        assert [(status, score) for status, score, _ in found] == [("UNREACHABLE", None)] * 2
    gone = f"http://127.0.0.1:{free_port()}"
    [(status, score, _)] = scored_remotely(server, FINE, "r", url=gone)
    assert (status, score) == ("UNREACHABLE", None)
    with pytest.raises(ResourceError, match=r"the reward server cannot be reached: .*; start the server, or check"):
        probed(replace(REMOTE, url=gone))
    server.answers(FINE)
    probed(replace(REMOTE, url=server.url))


def test_missing_numbers_of_a_table_are_sent_as_null(server: RewardService) -> None:
    """NaN is not JSON: a strict server would reject the whole batch."""
    row = {"price": math.nan, "limits": [1.0, math.inf], "size": 2.5}

    async def run() -> Sequence[RewardOutcome]:
        remote = RewardServer(replace(REMOTE, url=server.url))
        found = await remote.scores([RewardRequest("p", "r", math.nan, row)])
        await remote.service.close()
        return found

    server.answers(Answer('{"scores": [1]}'))
    [outcome] = asyncio.run(run())
    assert outcome.score == 1.0
    [received] = server.received
    assert received.body["rows"] == [{"price": None, "limits": [1.0, None], "size": 2.5}]
    assert received.body["answers"] == [None]


def test_no_message_has_the_query_of_the_url(server: RewardService) -> None:
    with_key = f"{server.url}/score?token=hunter2"
    for failure in (Answer("no token hunter2", 401), Answer("oops", 500), Answer("<html>")):
        [(status, _, detail)] = scored_remotely(server, failure, "r", url=with_key)
        assert (status, "hunter2" in detail) == ("UNREACHABLE", False)
    gone = f"http://127.0.0.1:{free_port()}/score?token=hunter2"
    with pytest.raises(ResourceError) as error:
        probed(replace(REMOTE, url=gone))
    assert "hunter2" not in str(error.value)

"""Clients of the endpoint of sessions, for tests."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path

import aiohttp
import openai

from rljob_testing.sessions import HERMES, Endpoint, endpoint
from rljob_trainer.environments.session import LiveSession
from rljob_trainer.environments.transcript import SampledTurn, Transcript

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
Messages = list[dict[str, object]]


def run(
    folder: Path,
    write: Callable[[str], Awaitable[str]],
    test: Callable[[Endpoint], Awaitable[None]],
    template: str = HERMES,
) -> None:
    """Runs a test with an endpoint whose policy is `write`."""

    async def all_of_it() -> None:
        async with endpoint(folder, write, template) as made:
            await test(made)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


def numbered() -> Callable[[str], Coroutine[None, None, str]]:
    """A policy that writes `answer 0`, `answer 1`, ..."""
    numbers = itertools.count()

    async def write(_: str) -> str:
        return f"answer {next(numbers)}"

    return write


def client_of(made: Endpoint, session: LiveSession, timeout: float = 60.0) -> openai.AsyncOpenAI:
    """A client of a session that repeats nothing."""
    return openai.AsyncOpenAI(base_url=made.server.base_url, api_key=session.key, max_retries=0, timeout=timeout)


async def ask(client: openai.AsyncOpenAI, messages: Messages, **options: object) -> openai.types.chat.ChatCompletion:
    """Also checks the form of the answer."""
    create: Callable[..., Awaitable[object]] = client.chat.completions.create
    answer = await create(model="policy", messages=messages, **options)
    assert isinstance(answer, openai.types.chat.ChatCompletion)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return answer


async def post(
    made: Endpoint, key: str, body: object, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, object]]:
    """Sends any body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{made.server.base_url}/chat/completions",
            data=data,
            headers={"Authorization": f"Bearer {key}", **(headers or {})},
        ) as response,
    ):
        return response.status, await response.json()


def user(content: object) -> dict[str, object]:
    """A message of the user."""
    return {"role": "user", "content": content}


def transcript_of(session: LiveSession) -> Transcript:
    """The transcript of a session with at least one turn."""
    found = session.record.transcript()
    assert found is not None
    return found


def check_rows(made: Endpoint, transcript: Transcript) -> None:
    """Each sampled token is trained in exactly one row, after the tokens that the engine saw."""
    trained = []
    for row in transcript.rows:
        for request, turn in zip(made.policy.requests, made.policy.turns, strict=True):
            start = len(request.prompt_token_ids)
            seen = (*request.prompt_token_ids, *turn.token_ids)
            if (
                SampledTurn(start, turn.logprobs, turn.policy_versions) in row.turns
                and row.token_ids[: len(seen)] == seen
            ):
                trained.append(turn.request_id)
    assert sorted(trained) == sorted(turn.request_id for turn in made.policy.turns)
    assert sum(len(row.turns) for row in transcript.rows) == len(made.policy.turns)

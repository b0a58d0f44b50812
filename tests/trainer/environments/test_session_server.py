"""The endpoint of sessions: what clients get, what is recorded, and what happens with requests that nobody expects."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import openai
import pytest

from rljob_testing.sessions import LIMITS, Endpoint, endpoint
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.environments.session import LiveSession
from rljob_trainer.environments.transcript import Transcript

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


def run(folder: Path, write: Callable[[str], Awaitable[str]], test: Callable[[Endpoint], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with endpoint(folder, write) as made:
            await test(made)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


def numbered() -> Callable[[str], Coroutine[None, None, str]]:
    """A policy that writes `answer 0`, `answer 1`, ..."""
    numbers = itertools.count()

    async def write(_: str) -> str:
        return f"answer {next(numbers)}"

    return write


def client_of(made: Endpoint, session: LiveSession, **options: float) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=made.server.base_url, api_key=session.key, max_retries=0, **options)


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
    return {"role": "user", "content": content}


def transcript_of(session: LiveSession) -> Transcript:
    found = session.record.transcript(may_be_rewritten=True)
    assert found is not None
    return found


def check_rows(made: Endpoint, transcript: Transcript) -> None:
    """Each sampled token is trained in exactly one row, after the tokens that the engine saw."""
    trained = []
    for row in transcript.rows:
        response = row.token_ids[row.num_prompt_tokens :]
        assert len(response) == len(row.mask) == len(row.logprobs) == len(row.policy_versions)
        for place, is_trained in enumerate(row.mask):
            assert (row.logprobs[place] < 0) == (row.policy_versions[place] == 7) == is_trained
        for request, turn in zip(made.policy.requests, made.policy.turns, strict=True):
            start = len(request.prompt_token_ids) - row.num_prompt_tokens
            places = range(start, start + len(turn.token_ids))
            is_here = tuple(row.token_ids[: len(request.prompt_token_ids)]) == request.prompt_token_ids
            is_here = is_here and tuple(response[start : places.stop]) == turn.token_ids
            if is_here and all(row.mask[place] for place in places):
                trained.append(turn.request_id)
    assert sorted(trained) == sorted(turn.request_id for turn in made.policy.turns)
    assert sum(sum(row.mask) for row in transcript.rows) == sum(len(turn.token_ids) for turn in made.policy.turns)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_is_one_row(tmp_path: Path, is_streamed: bool) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session()
        client = client_of(made, session)
        messages: Messages = [user("one")]
        for number in range(3):
            if is_streamed:
                text, reasons = "", []
                async for chunk in await client.chat.completions.create(
                    model="x",
                    messages=messages,
                    stream=True,
                    stream_options={"include_usage": True},  # type: ignore[arg-type]
                ):
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        reasons += [choice.finish_reason] if choice.finish_reason else []
                    assert chunk.choices or (chunk.usage and chunk.usage.completion_tokens > 0)
                assert reasons == ["stop"]
                messages.append({"role": "assistant", "content": text, "tool_calls": None})
            else:
                answer = await ask(client, messages, temperature=0.1, tool_choice="required")
                assert answer.choices[0].finish_reason == "stop"
                messages.append(answer.choices[0].message)  # type: ignore[arg-type]
            messages.append(user([{"type": "text", "text": "and "}, {"type": "text", "text": str(number)}]))
        transcript = transcript_of(session)
        assert len(transcript.rows) == 1
        assert (transcript.num_turns, transcript.is_rewritten) == (3, False)
        assert [message["content"] for message in transcript.messages][:3] == ["one", "answer 0", "and 0"]
        assert transcript.last_turn == "answer 2"
        check_rows(made, transcript)
        # The tokens of the later prompts begin with what was sampled.
        assert made.policy.requests[1].sampling.temperature == 1.0
        assert len({request.seed for request in made.policy.requests}) == 3
        assert {model.id async for model in client.models.list()} == {"policy"}

    run(tmp_path, numbered(), test)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tool_calls(tmp_path: Path, is_streamed: bool) -> None:
    async def write(prompt: str) -> str:
        return "It is 3." if "<tool_response>" in prompt else CALL

    async def test(made: Endpoint) -> None:
        session = made.session()
        client = client_of(made, session)
        messages: Messages = [user("1 + 2?")]
        for _ in range(2):
            if is_streamed:
                async with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:  # type: ignore[arg-type, list-item]
                    answer = await stream.get_final_completion()
                message = answer.choices[0].message
            else:
                message = (await ask(client, messages, tools=[ADD])).choices[0].message
            messages.append(message.model_dump())
            for call in message.tool_calls or ():
                assert call.type == "function"
                assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        assert message.content == "It is 3."
        assert session.counts.num_tool_calls == 1
        transcript = transcript_of(session)
        assert len(transcript.rows) == 1
        check_rows(made, transcript)
        assert '"name": "add"' in transcript.prompt_text

    run(tmp_path, write, test)


def test_branches_and_new_conversations_are_rows(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session()
        client = client_of(made, session)
        first: Messages = [user("one")]
        first.append((await ask(client, first)).choices[0].message.model_dump())
        # Three branches at once, one of which goes on, and a turn that nobody sampled.
        answers = await asyncio.gather(*(ask(client, [*first, user(f"branch {n}")]) for n in range(3)))
        longest = [*first, user("branch 1"), answers[1].choices[0].message.model_dump(), user("more")]
        await ask(client, longest)
        await ask(client, [user("one"), {"role": "assistant", "content": "never sampled"}, user("two")])
        # The same request twice is sampled twice.
        twice = await asyncio.gather(ask(client, [user("twice")]), ask(client, [user("twice")]))
        assert twice[0].choices[0].message.content != twice[1].choices[0].message.content
        transcript = transcript_of(session)
        assert transcript.num_turns == len(made.policy.turns) == 8
        assert [sum(row.mask) > 0 for row in transcript.rows] == [True] * 6
        assert [message["content"] for message in transcript.messages][-2] == "more"
        # The last row has the most turns: the first one, the branch and what follows.
        assert sum(transcript.rows[-1].mask) == sum(len(made.policy.turns[n].token_ids) for n in (0, 2, 4))
        check_rows(made, transcript)

    run(tmp_path, numbered(), test)


@pytest.mark.parametrize("change", ["strip", "same"])
def test_white_space_around_an_answer_does_not_count(tmp_path: Path, change: str) -> None:
    async def write(_: str) -> str:
        return "  an answer \n"

    async def test(made: Endpoint) -> None:
        session = made.session()
        client = client_of(made, session)
        content = (await ask(client, [user("one")])).choices[0].message.content or ""
        sent = content.strip() if change == "strip" else content
        await ask(client, [user("one"), {"role": "assistant", "content": sent}, user("two")])
        transcript = transcript_of(session)
        assert len(transcript.rows) == 1
        check_rows(made, transcript)

    run(tmp_path, write, test)


@pytest.mark.parametrize("header", ["retry count", "idempotency key", "none"])
def test_a_repeated_request_is_answered_from_the_record(tmp_path: Path, header: str) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session()
        body = {"model": "policy", "messages": [user("one")]}
        first = {"idempotency-key": "a"} if header == "idempotency key" else {}
        again = {"x-stainless-retry-count": "1"} if header == "retry count" else first
        _, one = await post(made, session.key, body, first)
        status, two = await post(made, session.key, body, again)
        assert status == 200
        assert (one == two) == (header != "none")
        # A retry whose first request never arrived is a new request.
        status, _ = await post(made, session.key, {"messages": [user("two")]}, {"x-stainless-retry-count": "2"})
        assert (status, len(made.policy.turns)) == (200, 2 + (header == "none"))
        check_rows(made, transcript_of(session))

    run(tmp_path, numbered(), test)


def test_a_client_that_disconnects_and_asks_again(tmp_path: Path) -> None:
    may_answer = asyncio.Event()
    begun = asyncio.Event()

    async def write(_: str) -> str:
        begun.set()
        await may_answer.wait()
        return "late"

    async def test(made: Endpoint) -> None:
        session = made.session()
        request = asyncio.create_task(ask(client_of(made, session), [user("one")]))
        await begun.wait()
        request.cancel()
        while not session.is_given_up:
            await asyncio.sleep(0)
        again = asyncio.create_task(ask(client_of(made, session), [user("one")]))
        while session.is_given_up:
            await asyncio.sleep(0)
        may_answer.set()
        assert (await again).choices[0].message.content == "late"
        assert len(made.policy.turns) == 1
        check_rows(made, transcript_of(session))

    run(tmp_path, write, test)


def test_a_turn_that_nobody_received_is_not_trained(tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def write(prompt: str) -> str:
        if "one" in prompt:
            await may_answer.wait()
        return "an answer"

    async def test(made: Endpoint) -> None:
        # Without a limit of a turn, the first one could need all tokens of the session, and the second would wait.
        session = made.session(replace(LIMITS, max_turn_tokens=30))
        with pytest.raises(openai.APITimeoutError):
            await ask(client_of(made, session, timeout=0.2), [user("one")])
        while not session.is_given_up:
            await asyncio.sleep(0)
        await ask(client_of(made, session), [user("two")])
        may_answer.set()
        while len(made.policy.turns) < 2:
            await asyncio.sleep(0)
        transcript = transcript_of(session)
        assert (transcript.num_turns, len(transcript.rows)) == (1, 1)
        assert "two" in transcript.prompt_text

    run(tmp_path, write, test)


def test_a_thousand_requests(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session(replace(LIMITS, max_turns=20, max_turn_tokens=30))
        url, headers = f"{made.server.base_url}/chat/completions", {"Authorization": f"Bearer {session.key}"}

        async def send(http: aiohttp.ClientSession, number: int) -> object:
            async with http.post(url, json={"messages": [user(str(number))]}, headers=headers) as response:
                error = (await response.json()).get("error", {})
                return response.status, error.get("code")

        async with aiohttp.ClientSession() as http:
            answers = await asyncio.gather(*(send(http, number) for number in range(1000)))
        assert Counter(answers) == {(200, None): 20, (400, "session_limit"): 980}
        assert len(made.policy.turns) == 20
        assert session.limit is Outcome.MAX_TURNS
        check_rows(made, transcript_of(session))

    run(tmp_path, numbered(), test)


def test_limits_of_tokens(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        num_tokens = len(made.policy.tokenizer.encode("answer 0<|im_end|>", add_special_tokens=False))
        session = made.session(max_new_tokens=2 * num_tokens + 2)
        client = client_of(made, session)
        # Both wait for each other's tokens, so they never sample more than the limit.
        await asyncio.gather(ask(client, [user("one")]), ask(client, [user("two")]))
        assert session.limit is None
        cut = await ask(client, [user("three")])
        assert (cut.choices[0].finish_reason, session.limit) == ("length", Outcome.MAX_TOKENS)
        with pytest.raises(openai.BadRequestError, match=r"limit spec\.training\.rollout\.maxNewTokens"):
            await ask(client, [user("four")])
        # A limit of the agent's own is none of the session.
        session = made.session()
        cut = await ask(client_of(made, session), [user("one")], max_completion_tokens=2, max_tokens=3)
        assert (cut.choices[0].finish_reason, session.limit) == ("length", None)
        assert len(made.policy.turns[-1].token_ids) == 2
        long = await ask(client_of(made, session), [user("one")], stop=["wer"])
        assert long.choices[0].message.content == "ans"

    run(tmp_path, numbered(), test)


def test_a_full_context(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session(replace(LIMITS, max_context_tokens=120))
        client = client_of(made, session)
        messages: Messages = [user("one")]
        messages.append((await ask(client, messages)).choices[0].message.model_dump())
        for too_long in ([*messages, user("x" * 120)], [user("x" * 120)]):
            with pytest.raises(openai.BadRequestError, match="no room for a turn") as error:
                await ask(client, too_long)
            assert (error.value.code, session.limit) == ("context_length_exceeded", Outcome.CONTEXT_FULL)
        # An agent may go on with less.
        await ask(client, [*messages, user("two")])
        assert session.limit is None
        check_rows(made, transcript_of(session))

    run(tmp_path, numbered(), test)


def test_the_limit_of_time(tmp_path: Path) -> None:
    async def write(_: str) -> str:
        await asyncio.sleep(600)
        return ""

    async def test(made: Endpoint) -> None:
        session = made.session(replace(LIMITS, max_seconds=0.3))
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="maxSeconds"):
                await ask(client_of(made, session), [user("one")])
        assert session.limit is Outcome.TIME_LIMIT
        assert (len(made.policy.requests), made.policy.num_cancelled) == (1, 1)
        transcript = transcript_of(session)
        assert (transcript.num_turns, sum(transcript.rows[0].mask)) == (0, 0)

    run(tmp_path, write, test)


def test_keys_belong_to_one_running_session(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def write(prompt: str) -> str:
        if "wait" in prompt:
            begun.set()
            await asyncio.sleep(600)
        return "an answer"

    async def test(made: Endpoint) -> None:
        one, two = made.session(), made.session()
        messages: Messages = [user("secret")]
        messages.append((await ask(client_of(made, one), messages)).choices[0].message.model_dump())
        # The same messages in another session are a new conversation.
        await ask(client_of(made, two), [*messages, user("and?")])
        assert [len(session.record.turns) for session in (one, two)] == [1, 1]
        waiting = asyncio.create_task(ask(client_of(made, one), [user("wait")]))
        await begun.wait()
        await made.end(one)
        with pytest.raises(openai.AuthenticationError, match="session has ended"):
            await waiting
        assert made.policy.num_cancelled == 1
        with pytest.raises(openai.AuthenticationError, match="belongs to no running session"):
            await ask(client_of(made, one), [user("again")])
        for key in ("", "wrong", two.key[:-1], two.key.lower()):
            status, _ = await post(made, key, {"messages": [user("x")]})
            assert status == 401
        assert made.server.base_url.startswith("http://127.0.0.1:")

    run(tmp_path, write, test)


BAD: list[tuple[object, str | None, str]] = [
    (b"{", None, "not valid JSON"),
    (b"[" * 100_000, None, "not valid JSON"),
    ([], None, "JSON object"),
    ({}, "messages", "at least one message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "messages[0] must be an object with a role"),
    ({"messages": [user(None)]}, "messages", "messages[0].content must be a text"),
    ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "messages", "images"),
    ({"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "messages", "end with a message of the user"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}, user("x")]}, "messages", "tool_calls[0] must"),
    ({"messages": [user("x")], "n": 2}, "n", "n must be 1 (seen: 2)"),
    ({"messages": [user("x")], "logprobs": True}, "logprobs", "not supported"),
    ({"messages": [user("x")], "max_tokens": 0}, "max_tokens", "whole number from 1 (seen: 0)"),
    ({"messages": [user("x")], "stream": "yes"}, "stream", "true or false"),
    ({"messages": [user("x")], "stop": [1]}, "stop", "list of up to 16 texts"),
    ({"messages": [user("x")], "tools": [{"type": "web"}]}, "tools", "tools[0] must be a function"),
    ({"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format", "must be text"),
]


def test_bad_requests_get_errors_in_openais_form(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session()
        for body, field, message in BAD:
            status, answer = await post(made, session.key, body)
            error = answer["error"]
            assert isinstance(error, dict)
            assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error"), body
            assert message in error["message"]
        # Unpaired surrogates are no error.
        status, _ = await post(made, session.key, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
        assert (status, len(session.record.turns)) == (200, 1)
        with pytest.raises(openai.NotFoundError, match="use POST /v1/chat/completions"):
            await client_of(made, session).embeddings.create(model="policy", input="x")

    run(tmp_path, numbered(), test)

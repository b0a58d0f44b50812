"""The endpoint of sessions: what clients get, and what is recorded."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import openai
import pytest

from rljob_testing.models import chat_models
from rljob_testing.session_clients import (
    ADD,
    CALL,
    Messages,
    ask,
    check_rows,
    client_of,
    numbered,
    post,
    run,
    transcript_of,
    user,
)
from rljob_testing.sessions import LIMITS, Endpoint
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.environments.chat_requests import ChatRequest


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
        assert [row.num_trained_tokens > 0 for row in transcript.rows] == [True] * 6
        assert [message["content"] for message in transcript.messages][-2] == "more"
        # The last row has the most turns: the first one, the branch and what follows.
        assert transcript.rows[-1].num_trained_tokens == sum(len(made.policy.turns[n].token_ids) for n in (0, 2, 4))
        check_rows(made, transcript)

    run(tmp_path, numbered(), test)


def test_a_conversation_that_the_template_rewrites_goes_on_in_a_new_row(tmp_path: Path) -> None:
    """There is room for it without the thinking that the template removes."""
    answers = iter(["no", f"<think>\n{'x' * 200}\n</think>\n\nyes", "no"])

    async def write(_: str) -> str:
        return next(answers)

    async def test(made: Endpoint) -> None:
        session = made.session(replace(LIMITS, max_context_tokens=275), starts_new_rows=True)
        messages: Messages = []
        for text in ("one", "two", "three"):
            messages.append(user(text))
            messages.append((await ask(client_of(made, session), messages)).choices[0].message.model_dump())
        assert len(made.policy.requests[2].prompt_token_ids) < len(made.policy.turns[1].token_ids)
        transcript = transcript_of(session)
        assert (transcript.num_turns, len(transcript.rows), transcript.is_rewritten) == (3, 2, True)
        # The row with one turn goes on with the other one, so it has all messages.
        assert [len(row.turns) for row in transcript.rows] == [2, 1]
        assert len(transcript.messages) == len(messages)
        check_rows(made, transcript)

    run(tmp_path, write, test, chat_models.TEMPLATES["Qwen3"])


def test_a_rewritten_conversation_beside_a_longer_one_is_counted(tmp_path: Path) -> None:
    async def write(prompt: str) -> str:
        return "<think>\nadd\n</think>\n\n5" if "2 + 3?" in prompt else "no"

    async def test(made: Endpoint) -> None:
        for questions, is_rewritten in ((("one",) * 3, False), (("2 + 3?", "next"), True)):
            session = made.session()
            for each in (("one",) * 3, questions):
                messages: Messages = []
                for question in each:
                    messages.append(user(question))
                    messages.append((await ask(client_of(made, session), messages)).choices[0].message.model_dump())
            transcript = transcript_of(session)
            assert (transcript.messages[0]["content"], transcript.is_rewritten) == ("one", is_rewritten)

    run(tmp_path, write, test, chat_models.TEMPLATES["Qwen3"])


def test_requests_are_not_kept(tmp_path: Path) -> None:
    """Each one repeats the whole conversation."""

    async def test(made: Endpoint) -> None:
        session = made.session()
        messages: Messages = [user("only here")]
        for number in range(4):
            messages.append((await ask(client_of(made, session), messages)).choices[0].message.model_dump())
            messages.append(user(str(number)))
        # Frames of the last request may still exist.
        await ask(client_of(made, made.session()), [user("another session")])
        gc.collect()
        kept = [each for each in gc.get_objects() if isinstance(each, ChatRequest)]
        assert [each for each in kept if each.messages[0]["content"] == "only here"] == []
        assert len(session.record.turns) == 4

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

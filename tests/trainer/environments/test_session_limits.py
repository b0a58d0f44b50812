"""Limits of sessions, and requests that nobody expects."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from rljob_testing.session_clients import Messages, ask, check_rows, client_of, numbered, post, run, transcript_of, user
from rljob_testing.sessions import HERMES, LIMITS, Endpoint
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.environments.chat_requests import ChatRequestError


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


def test_requests_that_are_far_too_long(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        def tokenized(*_: object, **__: object) -> list[int]:
            raise AssertionError("such a request must not be tokenized")

        made.policy.tokenizer.encode = tokenized  # type: ignore[method-assign]
        # The longest token has 19 characters, and the context 4000 tokens.
        for body, seen in (
            ({"messages": [user("x" * 76_001)]}, "has 76001 characters"),
            ({"messages": [user("\u00e9" * 300_000)]}, "has more than 1504576 bytes"),
        ):
            session = made.session()
            status, answer = await post(made, session.key, body)
            error = answer["error"]
            assert isinstance(error, dict)
            assert (status, error["code"], session.limit) == (400, "context_length_exceeded", Outcome.CONTEXT_FULL)
            assert seen in error["message"]

    run(tmp_path, numbered(), test)


def test_a_limit_holds_although_turns_that_began_before_are_completed(tmp_path: Path) -> None:
    may_answer, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def write(_: str) -> str:
        begun.release()
        await may_answer.wait()
        return "an answer"

    async def test(made: Endpoint) -> None:
        session = made.session(replace(LIMITS, max_turns=2, max_turn_tokens=30))
        client = client_of(made, session)
        turns = [asyncio.create_task(ask(client, [user(f"branch {number}")])) for number in range(2)]
        for _ in turns:
            await begun.acquire()
        with pytest.raises(openai.BadRequestError, match="maxTurns"):
            await ask(client, [user("branch 2")])
        may_answer.set()
        await asyncio.gather(*turns)
        assert session.limit is Outcome.MAX_TURNS

        # A request that was too long, beside a turn that had begun; and then one that fits.
        session = made.session(replace(LIMITS, max_context_tokens=100, max_turn_tokens=30))
        client = client_of(made, session)
        may_answer.clear()
        turn = asyncio.create_task(ask(client, [user("one")]))
        await begun.acquire()
        with pytest.raises(openai.BadRequestError, match="no room for a turn"):
            await ask(client, [user("x" * 100)])
        may_answer.set()
        await turn
        assert session.limit is Outcome.CONTEXT_FULL
        await ask(client, [user("two")])
        assert session.limit is None

    run(tmp_path, write, test)


def test_the_limit_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(_: str) -> str:
        # The clock jumps behind the limit as soon as the request has arrived.
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 30)
        await asyncio.sleep(600)
        return ""

    async def test(made: Endpoint) -> None:
        session = made.session(replace(LIMITS, max_seconds=20))
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="maxSeconds"):
                await ask(client_of(made, session), [user("one")])
        assert session.limit is Outcome.TIME_LIMIT
        assert (len(made.policy.requests), made.policy.num_cancelled) == (1, 1)
        assert session.record.transcript() is None

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


def test_a_session_that_ends_while_a_request_arrives(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session()
        request = await session.read(b'{"messages": [{"role": "user", "content": "late"}]}')
        await made.end(session)
        with pytest.raises(ChatRequestError, match="session has ended") as error:
            await session.turn(request, is_retry=False, listens=lambda: True)
        assert (error.value.status, made.policy.requests) == (401, [])

    run(tmp_path, numbered(), test)


def test_messages_without_tokens(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session()
        status, answer = await post(made, session.key, {"messages": [user("")]})
        assert status == 400
        assert "give no tokens" in str(answer)
        status, _ = await post(made, session.key, {"messages": [user("one")]})
        assert (status, session.failure.done()) == (200, False)

    run(tmp_path, numbered(), test, "{% for message in messages %}{{ message.content }}{% endfor %}")


def test_messages_that_the_template_leaves_out(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        client = client_of(made, made.session())
        messages: Messages = [user("one")]
        messages.append((await ask(client, messages)).choices[0].message.model_dump())
        hint = {"role": "system", "content": "hint"}
        for before in ([], messages):
            with pytest.raises(
                openai.BadRequestError, match=rf"ignores message {len(before) + 1} \(role 'system': 'hi"
            ):
                await ask(client, [*before, hint, user("two")])
        await ask(client, [*messages, user("two")])

    run(tmp_path, numbered(), test, HERMES.replace("messages %}", "messages if message.role != 'system' %}"))


BAD: list[tuple[object, str | None, str]] = [
    (b"{", None, "not valid JSON"),
    (b"[" * 100_000, None, "not valid JSON"),
    ([], None, "JSON object"),
    ({}, "messages", "at least one message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "messages[0] must be an object with a role"),
    ({"messages": [user(None)]}, "messages", "messages[0].content must be a string"),
    ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "messages", "images"),
    ({"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "messages", "end with a message of the user"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}, user("x")]}, "messages", "tool_calls[0] must"),
    ({"messages": [user("x")], "n": 2}, "n", "n must be 1 (seen: 2)"),
    ({"messages": [user("x")], "logprobs": True}, "logprobs", "not supported"),
    ({"messages": [user("x")], "parallel_tool_calls": False}, "parallel_tool_calls", "(seen: False)"),
    ({"messages": [user("x")], "guided_json": {"type": "object"}}, "guided_json", "are not constrained"),
    ({"messages": [user("x")], "structured_outputs": {"regex": "a"}}, "structured_outputs", "are not constrained"),
    ({"messages": [user("x")], "chat_template_kwargs": {"a": 0}}, "chat_template_kwargs", "chat template"),
    ({"messages": [user("x")], "continue_final_message": True}, "continue_final_message", "whole turns"),
    ({"messages": [user("x")], "min_tokens": 1}, "min_tokens", "a turn ends where"),
    ({"messages": [user("x")], "ignore_eos": True}, "ignore_eos", "a turn ends where"),
    ({"messages": [user("x")], "stop_token_ids": [5]}, "stop_token_ids", "or at `stop`"),
    ({"messages": [user("x")], "bad_words": ["a"]}, "bad_words", "how turns are sampled"),
    ({"messages": [user("x")], "prediction": {"type": "content"}}, "prediction", "not supported"),
    ({"messages": [user("x")], "max_tokens": 0}, "max_tokens", "whole number of at least 1 (seen: 0)"),
    ({"messages": [user("x")], "stream": "yes"}, "stream", "true or false"),
    ({"messages": [user("x")], "stop": [1]}, "stop", "list of up to 16 strings"),
    ({"messages": [user("x")], "tools": [{"type": "web"}]}, "tools", "tools[0] must be a function"),
    ({"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format", "must be text"),
]


def test_bad_requests_get_errors_as_openai_writes_them(tmp_path: Path) -> None:
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


def test_fields_without_effect_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Values that ask for nothing.
    neutral = {"n": 1, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "chat_template_kwargs": {}}
    neutral |= {"parallel_tool_calls": True, "add_generation_prompt": True, "response_format": {"type": "text"}}
    neutral |= {"tool_choice": "auto", "logprobs": False, "guided_json": None, "user": "me"}
    ignored = {"temperature": 0.5, "reasoning_effort": "low", "tool_choice": "required"}

    async def test(made: Endpoint) -> None:
        session = made.session()
        for fields in (neutral, {**neutral, **ignored}, ignored):
            status, answer = await post(made, session.key, {"model": "policy", "messages": [user("x")], **fields})
            assert status == 200, answer

    run(tmp_path, numbered(), test)
    messages = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert len(messages) == 1
    assert "(reasoning_effort, temperature, tool_choice)" in messages[0]

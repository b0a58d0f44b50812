"""Requests and clients that must not disturb other sessions, nor the log."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rljob_testing.session_clients import Messages, ask, check_rows, client_of, numbered, post, run, transcript_of, user
from rljob_testing.sessions import LIMITS, Endpoint
from rljob_trainer.environments.chat_requests import ChatAnswer, ChatRequestError, num_characters
from rljob_trainer.environments.session import LiveSession
from rljob_trainer.environments.session_record import SessionTurn
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer, ToolSchema

LONG = "long " * 4000


class SlowTokenizer:
    """Makes `encode` wait before it encodes a long text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.may_encode = threading.Event()
        self.begun = threading.Event()
        self.num_running = 0
        self.most_running = 0
        self._encode: Callable[..., list[list[int]]] = tokenizer.encode_all
        tokenizer.encode_all = self._encode_all  # type: ignore[method-assign]

    def _encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        if any(LONG in text for text in texts):
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            self.begun.set()
            assert self.may_encode.wait(30)
            self.num_running -= 1
        return self._encode(texts, add_special_tokens=add_special_tokens)


def test_a_long_request_does_not_stop_other_requests(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        slow = SlowTokenizer(made.policy.tokenizer)
        limits = replace(LIMITS, max_context_tokens=100_000, max_turn_tokens=30)
        session, other = made.session(limits), made.session(limits)
        client = client_of(made, session)
        first: Messages = [user("one")]
        first.append((await ask(client, first)).choices[0].message.model_dump())
        # One request goes on with a turn, the others begin conversations.
        long_ones: list[Messages] = [[*first, user(LONG)], [user(LONG)], [user(LONG + "!")]]
        waiting = [asyncio.create_task(ask(client, long_ones[0]))]
        await asyncio.to_thread(slow.begun.wait)
        waiting += [asyncio.create_task(ask(client, messages)) for messages in long_ones[1:]]
        await ask(client_of(made, other), [user("two")])
        # The same turn goes on in another way meanwhile.
        second = [*first, user("short")]
        second.append((await ask(client, second)).choices[0].message.model_dump())
        await ask(client, [*second, user("more")])
        assert not any(task.done() for task in waiting)
        slow.may_encode.set()
        answers = await asyncio.gather(*waiting)
        await ask(client, [*long_ones[0], answers[0].choices[0].message.model_dump(), user("more")])
        assert slow.most_running == 1
        check_rows_of(made, session, other)
        prompts = [made.policy.tokenizer.decode(request.prompt_token_ids) for request in made.policy.requests]
        assert not any("short" in prompt and LONG in prompt for prompt in prompts)
        assert len(transcript_of(session).rows) == 4

    run(tmp_path, numbered(), test)


def test_long_conversations_are_rendered_in_another_thread(tmp_path: Path) -> None:
    """With NewRow, whether a conversation is rewritten needs the whole text for each turn."""

    async def test(made: Endpoint) -> None:
        tokenizer, rendered = made.policy.tokenizer, list[tuple[int, bool]]()
        render = tokenizer.render_chat

        def noted(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> str:
            rendered.append((num_characters(messages), threading.current_thread() is threading.main_thread()))
            return render(messages, tools)

        tokenizer.render_chat = noted  # type: ignore[method-assign]
        session = made.session(replace(LIMITS, max_context_tokens=100_000), starts_new_rows=True)
        messages: Messages = [user(LONG)]
        for _ in range(3):
            messages.append((await ask(client_of(made, session), messages)).choices[0].message.model_dump())
            messages.append(user("more"))
        assert [in_loop for length, in_loop in rendered if length >= len(LONG)] == [False] * 3
        transcript = transcript_of(session)
        assert len(transcript.rows) == 1
        check_rows(made, transcript)

    run(tmp_path, numbered(), test)


def check_rows_of(made: Endpoint, session: LiveSession, other: LiveSession) -> None:
    """Both sessions together have all turns."""
    one, two = transcript_of(session), transcript_of(other)
    check_rows(made, replace(one, rows=(*one.rows, *two.rows)))


def test_a_request_that_is_repeated_or_too_late_while_it_is_tokenized(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        slow = SlowTokenizer(made.policy.tokenizer)
        session = made.session(replace(LIMITS, max_context_tokens=100_000))
        other = asyncio.create_task(post(made, session.key, {"messages": [user(LONG + "!")]}))
        await asyncio.to_thread(slow.begun.wait)
        # Both wait until the endpoint has time to read them.
        retry = {"x-stainless-retry-count": "1"}
        same = [asyncio.create_task(post(made, session.key, {"messages": [user(LONG)]}, retry)) for _ in range(2)]
        while len(made.templates.texts._is_free._waiters or ()) < 2:
            await asyncio.sleep(0)
        slow.may_encode.set()
        first, again = await asyncio.gather(*same)
        assert (await other)[0] == first[0] == 200
        assert first == again
        assert len(made.policy.turns) == 2
        # The session ends meanwhile.
        slow.may_encode.clear()
        slow.begun.clear()
        late = asyncio.create_task(post(made, session.key, {"messages": [user(LONG + "late")]}))
        await asyncio.to_thread(slow.begun.wait)
        await made.end(session)
        slow.may_encode.set()
        assert (await late)[0] == 401
        assert len(made.policy.requests) == 2

    run(tmp_path, numbered(), test)


@asynccontextmanager
async def connection(made: Endpoint, text: bytes) -> AsyncIterator[socket.socket]:
    """A connection that reads slowly, over which a text was sent. At the end it is reset."""
    loop = asyncio.get_running_loop()
    address = urlsplit(made.server.base_url)
    with socket.socket() as made_socket:
        made_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made_socket.setblocking(False)
        await loop.sock_connect(made_socket, (address.hostname, address.port))
        await loop.sock_sendall(made_socket, text)
        yield made_socket


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, without connections that clients of other tests have left open."""
    messages = (record.getMessage() for record in caplog.records)
    return [message for message in messages if "AsyncClient.aclose" not in message]


def head_of(session: LiveSession, length: int) -> bytes:
    """The head of a request."""
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {session.key}"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_disconnects_within_an_answer(
    tmp_path: Path, is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # More than the buffers of the connection hold.
    text = "x" * 10_000_000

    async def test(made: Endpoint) -> None:
        session = made.session()
        sampled = session._sampled

        async def long(turn: SessionTurn) -> ChatAnswer:
            answer = await sampled(turn)
            return replace(answer, message={**answer.message, "content": text})

        session._sampled = long  # type: ignore[method-assign]
        body = json.dumps({"messages": [user("one")], "stream": is_streamed}).encode()
        async with connection(made, head_of(session, len(body)) + body) as client:
            assert await asyncio.get_running_loop().sock_recv(client, 100)
            assert session.record.has_delivered
        while session.record.has_delivered:
            await asyncio.sleep(0)
        assert session.is_given_up
        # It can ask again; otherwise nothing is trained.
        assert session.record.transcript() is None
        status, answer = await post(made, session.key, {"messages": [user("one")]})
        assert (status, text in str(answer), len(made.policy.turns)) == (200, True, 1)

    run(tmp_path, numbered(), test)
    assert not logged(caplog)


def test_what_clients_send_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def test(made: Endpoint) -> None:
        session = made.session()
        loop = asyncio.get_running_loop()
        chunked = head_of(session, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        packed = head_of(session, 3).replace(b"Host: x", b"Host: x\r\nContent-Encoding: gzip")
        for text in (
            b"\x16\x03\x01\x02\x00 not HTTP\r\n\r\n",
            b"GET / HTTP/9\r\n\r\n",
            chunked + b"zz\r\n",
            packed + b"abc",
        ):
            async with connection(made, text) as client:
                assert b" 400 " in await loop.sock_recv(client, 1000), text
        # Connections that end before the whole request has arrived.
        for text in (b"", b"POST", head_of(session, 50), head_of(session, 50) + b"{"):
            async with connection(made, text):
                pass
        status, _ = await post(made, session.key, {"messages": [user("one")]})
        assert status == 200

    run(tmp_path, numbered(), test)
    assert not logged(caplog)


def test_an_error_of_the_endpoint_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session()

        async def read(_: bytes) -> None:
            raise KeyError("a mistake of ours")

        session.read = read  # type: ignore[assignment, method-assign]
        status, _ = await post(made, session.key, {"messages": [user("one")]})
        assert status == 500

    run(tmp_path, numbered(), test)
    assert "a mistake of ours" in caplog.text


def test_texts_that_are_no_unicode(tmp_path: Path) -> None:
    async def test(made: Endpoint) -> None:
        session = made.session()
        tool = {"type": "function", "function": {"name": "f", "description": "\ud800"}}
        for change in ({"stop": ["\ud800"]}, {"tools": [tool]}, {"messages": [{**user("x"), "name": "\ud800"}]}):
            status, answer = await post(made, session.key, {"messages": [user("one")], **change})
            assert status == 200, answer
        body = b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}'
        assert (await session.read(body)).messages[0]["content"] == "\ufffd"
        with pytest.raises(ChatRequestError, match="not valid JSON"):
            await session.read(b'{"a":' * 100_000)

    run(tmp_path, numbered(), test)

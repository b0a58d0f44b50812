"""An OpenAI-compatible endpoint (chat completions) for the agents of one worker process, on the loopback interface.

Each session has a key of its own, so one server answers all of them. A streamed answer is sent when the turn is
finished, as a few chunks.
"""

from __future__ import annotations

import json
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from rljob_trainer.environments.chat_requests import MODEL_NAME, ChatRequest, ChatRequestError
from rljob_trainer.environments.session import LiveSession
from rljob_trainer.environments.session_record import SessionTurn

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_NEW_CONNECTIONS = 4096
"""Connections that may wait for the server to accept them. Others would have to try again after a second."""
RETRY_HEADER = "x-stainless-retry-count"
"""OpenAI's clients say in it how often they have repeated a request."""
IDEMPOTENCY_HEADER = "idempotency-key"
NO_RETRY = {"x-should-retry": "false"}
"""A header that tells OpenAI's clients not to repeat a request."""


class SessionServer:
    """Answers the requests of open sessions. All methods are for the thread of the asyncio loop."""

    def __init__(self, max_body_bytes: int) -> None:
        """`max_body_bytes`: the largest size of a request."""
        self._max_body_bytes = max_body_bytes
        self.base_url = ""
        """What agents connect to, once the server has started."""
        self._sessions: dict[str, LiveSession] = {}
        """The open sessions by key."""
        self._reported: set[str] = set()
        """Ignored fields that the log has."""
        self._idempotency_keys: dict[LiveSession, set[str]] = {}
        application = web.Application(client_max_size=max_body_bytes, middlewares=[_errors])
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/chat/completions", self._chat_completions)
        # Clients may send what is not HTTP; they get an answer, and aiohttp would log a stack trace for each.
        silent = logging.Logger("aiohttp", logging.CRITICAL + 1)
        self._runner = web.AppRunner(application, access_log=None, logger=silent, shutdown_timeout=0)

    async def start(self) -> None:
        """Listens on a free port. Raises OSError if this is not possible."""
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, backlog=MAX_NEW_CONNECTIONS).start()
        self.base_url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Closes all connections."""
        await self._runner.cleanup()

    def open(self, session: LiveSession) -> None:
        """See `agent_rollouts.Server`."""
        self._sessions[session.key] = session
        self._idempotency_keys[session] = set()

    def close(self, session: LiveSession) -> None:
        """See `agent_rollouts.Server`."""
        self._sessions.pop(session.key, None)
        self._idempotency_keys.pop(session, None)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "rljob"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise session.context_full(f"the request has more than {self._max_body_bytes} bytes") from None
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise ChatRequestError(f"the body of the request cannot be read: {error}; send a JSON object") from error
        wanted = await session.read(body)
        self._report_ignored(wanted)

        def listens() -> bool:
            return request.transport is not None and not request.transport.is_closing()

        turn = await session.turn(wanted, is_retry=self._is_retry(request, session), listens=listens)
        is_first = not turn.is_delivered
        if listens():
            session.record.deliver(turn)
        try:
            return await (_streamed if wanted.is_streamed else _whole)(request, wanted, turn)
        except ConnectionError:
            # The client has gone; the turn stays in the record for a retry.
            if is_first and turn.is_delivered:
                session.record.take_back(turn)
            return web.Response()

    def _session(self, request: web.Request) -> LiveSession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise ChatRequestError(
                "the API key belongs to no running session; use session.api_key, and only until your function returns",
                code="invalid_api_key",
                status=401,
            )
        return session

    def _is_retry(self, request: web.Request, session: LiveSession) -> bool:
        count = request.headers.get(RETRY_HEADER, "0")
        key = request.headers.get(IDEMPOTENCY_HEADER)
        keys = self._idempotency_keys.get(session, set())
        is_known = key in keys
        if key is not None:
            keys.add(key)
        return is_known or (count.isdigit() and int(count) > 0)

    def _report_ignored(self, request: ChatRequest) -> None:
        if new := [field for field in request.ignored if field not in self._reported]:
            self._reported.update(new)
            log.warning(
                "the agent's requests have fields without effect (%s); spec.training.rollout and evaluations decide "
                "how turns are sampled",
                ", ".join(new),
            )


async def _whole(request: web.Request, _: ChatRequest, turn: SessionTurn) -> web.StreamResponse:
    """Sends the answer as one object."""
    response = web.json_response(turn.answer.result().whole())
    await response.prepare(request)
    await response.write_eof()
    return response


async def _streamed(request: web.Request, wanted: ChatRequest, turn: SessionTurn) -> web.StreamResponse:
    """Sends the answer as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in turn.answer.result().chunks(has_usage=wanted.has_usage):
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Converts errors to answers as OpenAI's API writes them."""
    try:
        return await handler(request)
    except ConnectionError:
        # The client has gone, so nobody reads the answer.
        return web.Response()
    except ChatRequestError as error:
        answer = error
    except RecursionError:
        answer = ChatRequestError("the request is nested too deeply; send JSON with fewer levels")
    except web.HTTPException as error:
        advice = "use POST /v1/chat/completions or GET /v1/models"
        answer = ChatRequestError(f"{request.method} {request.path}: {error.reason}; {advice}", status=error.status)
    except Exception:
        log.exception("a request of an agent failed")
        answer = ChatRequestError("the request failed; see the log of the worker", status=500)
    return web.json_response(answer.to_json(), status=answer.status, headers=NO_RETRY)

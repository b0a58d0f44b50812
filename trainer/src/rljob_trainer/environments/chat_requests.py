"""The part of OpenAI's chat completions that the endpoint supports: requests as messages of a conversation, and turns
as answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rljob_trainer.errors import TrainerError
from rljob_trainer.models.tokenizer import ChatMessage, ToolCall, ToolSchema

MODEL_NAME = "policy"
"""The name of the model for agents. Requests for another name get the same model."""
MAX_STOP_TEXTS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")
_LOGPROBS = "log-probabilities are recorded for the training and are not part of answers; remove it"
_FREE = "the policy's turns are not constrained; describe the format in a message"
_SAMPLED = "the job decides how turns are sampled; remove it"
_END = "a turn ends where the policy ends it, or at `stop` or `max_tokens`; remove it"
_TEMPLATE = "the model's chat template writes the messages, and the policy writes whole turns; remove it"
REFUSED_FIELDS = {
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "parallel_tool_calls": "the policy may write several calls; remove it, and make only the first call",
    "audio": "only text is supported",
    "web_search_options": "the policy has no web search; remove it",
    "prediction": "the policy writes the whole turn; remove it",
    "guided_json": _FREE,
    "guided_regex": _FREE,
    "guided_choice": _FREE,
    "guided_grammar": _FREE,
    "structured_outputs": _FREE,
    "allowed_token_ids": _SAMPLED,
    "bad_words": _SAMPLED,
    "min_tokens": _END,
    "ignore_eos": _END,
    "stop_token_ids": _END,
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "continue_final_message": _TEMPLATE,
    "add_generation_prompt": _TEMPLATE,
}
"""Fields of OpenAI and vLLM that would change what the answer must be, and what to do instead. Values that ask for
nothing, such as 0, are accepted."""
TRUE_BY_DEFAULT = frozenset({"parallel_tool_calls", "add_generation_prompt"})
"""Those of them that ask for something if they are false."""
KNOWN_FIELDS = frozenset(
    (
        *("messages", "tools", "tool_choice", "response_format", "n", "max_tokens", "max_completion_tokens", "stop"),
        *("stream", "stream_options"),
        # They do not ask for another answer.
        *("model", "user", "metadata", "store"),
    )
)
"""All others have no effect, such as `temperature`, because the job decides how turns are sampled."""


class ChatRequestError(TrainerError):
    """A request cannot be answered."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        """`param`: the field of the request; `code`: a name for programs; `status`: of HTTP."""
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status

    def to_json(self) -> dict[str, object]:
        """The error as OpenAI's API writes it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request for one turn of the assistant."""

    messages: tuple[ChatMessage, ...]
    """At least one. Empty fields are left out."""
    tools: tuple[ToolSchema, ...]
    max_tokens: int | None
    stop: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    """Whether a streamed answer ends with the numbers of tokens."""
    digest: str
    """Equal for requests with the same content."""
    message_digests: tuple[str, ...]
    """For each message the digest of the tools and of all messages up to it."""
    num_characters: int
    """Of the contents of all messages and of the tools."""
    ignored: tuple[str, ...]
    """Names of fields with values that have no effect."""


@dataclass(frozen=True)
class ChatAnswer:
    """A turn as an answer."""

    number: int
    """Of the turn in its session."""
    message: ChatMessage
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    num_prompt_tokens: int
    num_new_tokens: int
    created: int
    """Unix time."""

    def whole(self) -> dict[str, object]:
        """The answer as one object."""
        choice = {"index": 0, "message": _written(self.message), "finish_reason": self.finish_reason, "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def chunks(self, *, has_usage: bool) -> Iterator[dict[str, object]]:
        """The answer as the chunks of a stream: the whole turn, the finish reason, and the numbers of tokens."""
        delta = _written(self.message)
        if isinstance(calls := delta.get("tool_calls"), list):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        head = self._head("chat.completion.chunk")
        for part, reason in ((delta, None), ({}, self.finish_reason)):
            yield {**head, "choices": [{"index": 0, "delta": part, "finish_reason": reason, "logprobs": None}]}
        if has_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": self.created, "model": MODEL_NAME}

    def _usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_new_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_new_tokens,
        }


def chat_request(body: bytes) -> ChatRequest:
    """Reads a request. Raises ChatRequestError, whose message names the field, if it cannot be answered."""
    try:
        value = _loaded(body)
    except (ValueError, RecursionError) as error:
        raise ChatRequestError(f"the request is not valid JSON: {error}; send a JSON object") from error
    if not isinstance(value, dict):
        raise ChatRequestError(f"the request must be a JSON object (seen: {value!r:.80})")
    given = {key: each for key, each in value.items() if each is not None}
    _refuse_unsupported(given)
    limits = [
        _whole_number(given, field) for field in ("max_completion_tokens", "max_tokens") if given.get(field) is not None
    ]
    options = given.get("stream_options")
    messages, tools = tuple(_messages(given.get("messages"))), tuple(_tools(given.get("tools", [])))
    return ChatRequest(
        messages=messages,
        tools=tools,
        max_tokens=min(limits, default=None),
        stop=_stop(given.get("stop", [])),
        is_streamed=_flag(given, "stream"),
        has_usage=isinstance(options, dict) and options.get("include_usage") is True,
        digest=digest_of("", {**given, "stream": None, "stream_options": None}),
        message_digests=tuple(_digests(tools, messages)),
        num_characters=num_characters(messages) + (len(json.dumps(tools, ensure_ascii=False)) if tools else 0),
        ignored=tuple(sorted(_ignored(given))),
    )


def digest_of(before: str, value: object) -> str:
    """Returns a digest of a digest and a JSON value; the order of keys does not matter."""
    return hashlib.sha256(f"{before}{json.dumps(value, sort_keys=True)}".encode()).hexdigest()


def identity(message: ChatMessage) -> object:
    """Returns what must be equal for two messages to be the same. White space around a turn of the assistant does not
    count, because agents strip it; nor does its thinking, which agents drop."""
    content = message["content"]
    return [
        message["role"],
        content.strip() if message["role"] == "assistant" else content,
        message.get("tool_calls", []),
        message.get("tool_call_id", ""),
    ]


def num_characters(messages: Iterable[ChatMessage]) -> int:
    """Returns the number of characters of the messages' contents."""
    return sum(len(message["content"]) for message in messages)


def _loaded(body: bytes) -> object:
    """Reads JSON, with U+FFFD instead of unpaired surrogates, which no tokenizer accepts."""
    value = json.loads(body)
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value


def _digests(tools: Sequence[ToolSchema], messages: Iterable[ChatMessage]) -> Iterator[str]:
    digest = digest_of("", tools)
    for message in messages:
        digest = digest_of(digest, identity(message))
        yield digest


def _refuse_unsupported(given: Mapping[str, object]) -> None:
    for field, advice in REFUSED_FIELDS.items():
        if field in given and bool(given[field]) is not (field in TRUE_BY_DEFAULT):
            raise ChatRequestError(f"{field} is not supported (seen: {given[field]!r:.80}); {advice}", param=field)
    if (number := given.get("n", 1)) != 1:
        raise ChatRequestError(f"n must be 1 (seen: {number!r:.80}); send several requests", param="n")
    kind = given.get("response_format", {"type": "text"})
    if not isinstance(kind, dict) or kind.get("type") != "text":
        raise ChatRequestError(
            f"response_format must be text (seen: {kind!r:.80}), because the policy's turns are not constrained; "
            "describe the format in a message",
            param="response_format",
        )


def _ignored(given: Mapping[str, object]) -> Iterator[str]:
    yield from given.keys() - KNOWN_FIELDS - REFUSED_FIELDS.keys()
    if given.get("tool_choice", "auto") != "auto":
        yield "tool_choice"


def _flag(given: Mapping[str, object], field: str) -> bool:
    value = given.get(field, False)
    if not isinstance(value, bool):
        raise ChatRequestError(f"{field} must be true or false (seen: {value!r:.80})", param=field)
    return value


def _whole_number(given: Mapping[str, object], field: str) -> int:
    value = given[field]
    if type(value) is not int or value < 1:
        raise ChatRequestError(f"{field} must be a whole number of at least 1 (seen: {value!r:.80})", param=field)
    return value


def _stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) <= MAX_STOP_TEXTS:
        found = tuple(each for each in texts if isinstance(each, str) and each)
        if len(found) == len(texts):
            return found
    raise ChatRequestError(
        f"stop must be a string, or a list of up to {MAX_STOP_TEXTS} strings (seen: {value!r:.80})", param="stop"
    )


def _tools(value: object) -> Iterator[ToolSchema]:
    if not isinstance(value, list):
        raise ChatRequestError(f"tools must be a list (seen: {value!r:.80})", param="tools")
    for index, tool in enumerate(value):
        match tool:
            case {"type": "function", "function": {"name": str()} as function} if _is_schema(function):
                # `strict` asks for constrained sampling, and templates would show it to the model.
                shown = {key: each for key, each in function.items() if key != "strict" and each is not None}
                yield {"type": "function", "function": shown}
            case _:
                raise ChatRequestError(
                    f"tools[{index}] must be a function with a name and a JSON schema of its parameters "
                    f"(seen: {tool!r:.80})",
                    param="tools",
                )


def _is_schema(function: Mapping[object, object]) -> bool:
    return isinstance(function.get("parameters", {}), dict) and isinstance(function.get("description") or "", str)


def _messages(value: object) -> Iterator[ChatMessage]:
    if not isinstance(value, list) or not value:
        raise ChatRequestError(
            f"messages must be a list of at least one message (seen: {value!r:.80})", param="messages"
        )
    names: dict[str, str] = {}
    for index, each in enumerate(value):
        message = _message(each, f"messages[{index}]")
        for call in message.get("tool_calls", []):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id", "") in names:
            # Some chat templates write the name, which clients of OpenAI do not send.
            message["name"] = names[message["tool_call_id"]]
        yield message
    if message["role"] == "assistant":
        raise ChatRequestError(
            f"messages[{len(value) - 1}] is a turn of the assistant, but the policy writes the next turn; end with a "
            "message of the user or a tool",
            param="messages",
        )


def _message(value: object, where: str) -> ChatMessage:
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(role, str) or role not in ROLES:
        raise ChatRequestError(
            f"{where} must be an object with a role, which is one of {', '.join(ROLES)} (seen: {value!r:.80})",
            param="messages",
        )
    calls = list(_tool_calls(value.get("tool_calls") or [], where))
    content = _content(value.get("content"), role == "assistant", where)
    message: ChatMessage = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        if isinstance(call_id := value.get("tool_call_id"), str):
            message["tool_call_id"] = call_id
        if isinstance(name := value.get("name"), str):
            message["name"] = name
    return message


def _content(value: object, may_be_empty: bool, where: str) -> str:
    """The content as text, which may be given as a list of text parts."""
    if isinstance(value, str):
        return value
    if value is None and may_be_empty:
        return ""
    if isinstance(value, list):
        texts = [each["text"] for each in value if isinstance(each, dict) and isinstance(each.get("text"), str)]
        if len(texts) == len(value):
            return "".join(texts)
    raise ChatRequestError(
        f"{where}.content must be a string or a list of text parts (seen: {value!r:.80}); images and audio are not "
        "supported",
        param="messages",
    )


def _tool_calls(value: object, where: str) -> Iterator[ToolCall]:
    for index, call in enumerate(value if isinstance(value, list) else [value]):
        match call:
            case {"id": str() as call_id, "function": {"name": str() as name, "arguments": str() as text}}:
                try:
                    arguments = json.loads(text or "{}")
                except (ValueError, RecursionError):
                    arguments = None
                if isinstance(arguments, dict):
                    yield {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                    continue
        raise ChatRequestError(
            f"{where}.tool_calls[{index}] must have an id and a function with a name and its arguments as a string of "
            f"JSON (seen: {call!r:.80})",
            param="messages",
        )


def _written(message: ChatMessage) -> dict[str, object]:
    """The message of a turn as clients expect it."""
    calls: Sequence[ToolCall] = message.get("tool_calls", [])
    written: dict[str, object] = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if thinking := message.get("reasoning_content"):
        written["reasoning_content"] = thinking
    if calls:
        written["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    return written

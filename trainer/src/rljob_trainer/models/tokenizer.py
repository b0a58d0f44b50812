"""A typed interface to the model's tokenizer. Importing this module loads transformers' tokenizers, not its models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict, cast

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from rljob_trainer.errors import ChatTemplateError, ConfigurationError, described
from rljob_trainer.models.model_files import WHERE, read_json_object, reading_model
from rljob_trainer.models.token_bounds import TokenBound, token_bound

END_TOKEN_FILES = ("generation_config.json", "config.json")
"""Files with the end tokens. Only the first one that exists is used."""
TEST_CONTENT = "Kq{}message{}qK"
"""Content of a test message with a number, which no template contains itself."""
CHANGES = ("{} 1", "1 {}")
"""Changes of a message's content, to test whether the rendered text changes. There are two, because some templates only
use the beginning or the end of a message."""


ToolSchema = dict[str, object]
"""A tool as chat templates expect it: `{"type": "function", "function": {"name": ..., "description": ...,
"parameters": <JSON schema>}}`."""


class FunctionCall(TypedDict):
    """The function of a tool call."""

    name: str
    arguments: dict[str, object]


class ToolCall(TypedDict):
    """A call of a tool, as chat templates expect it in a message of the assistant."""

    id: str
    type: str
    """Always `function`."""
    function: FunctionCall


class ChatMessage(TypedDict):
    """One message of a conversation."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    """The thinking of an assistant's turn, if the tokenizer's response template separates it from the content."""
    thinking: NotRequired[str]
    """The same text, for chat templates that use this name."""
    tool_calls: NotRequired[list[ToolCall]]
    name: NotRequired[str]
    """In a message with the role `tool`: the tool's name."""
    tool_call_id: NotRequired[str]
    """In a message with the role `tool`: the id of the call that it answers."""


class _AddedToken(Protocol):
    special: bool


class _Backend(Protocol):
    """The part of transformers' tokenizers that is used here."""

    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: str | dict[str, str] | None
    response_template: object
    all_special_tokens: list[str]
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, _AddedToken]
    backend_tokenizer: RustTokenizer

    def get_vocab(self) -> dict[str, int]: ...

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[ChatMessage],
        *,
        tools: list[ToolSchema] | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str: ...

    def parse_response(self, response: str, *, prefix: str, tools: list[ToolSchema] | None) -> dict[str, object]: ...


class Tokenizer:
    """Converts text to token ids and back, and renders chats."""

    def __init__(self, folder: Path) -> None:
        """Reads the tokenizer of a model's folder. Raises ConfigurationError if it is missing or unreadable, or if the
        file with the end tokens is damaged."""
        self._folder = folder
        with reading_model(folder, f"no tokenizer can be read from {folder}", "use a model that has one"):
            self._backend = cast(_Backend, AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
        # Without tokenizer files, transformers creates a tokenizer that has only special tokens.
        if set(self._backend.get_vocab()) <= set(self._backend.all_special_tokens):
            raise ConfigurationError(
                f"spec.training.model.source: {folder} has no tokenizer vocabulary; copy the model's tokenizer files "
                "into it"
            )
        self._declared_end_tokens = _declared_end_tokens(folder)

    def vocabulary(self) -> dict[str, int]:
        """Returns all tokens, including special ones, with their ids."""
        return self._backend.get_vocab()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a response, in order: those of generation_config.json, or of config.json if the
        former does not exist (as in transformers and vLLM), then the tokenizer's own."""
        tokens = (*self._declared_end_tokens, self._backend.eos_token_id)
        return tuple(dict.fromkeys(token for token in tokens if token is not None))

    @property
    def end_token_id(self) -> int | None:
        """The tokenizer's own end token."""
        return self._backend.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token."""
        return self._backend.pad_token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that `decode` leaves out by default."""
        added = (token for token, each in self._backend.added_tokens_decoder.items() if each.special)
        return frozenset((*added, *self._backend.all_special_ids))

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template. `render_chat` needs one."""
        return self._backend.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids; by default with the tokens that the model expects around a text, such as BOS."""
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes many texts in one call, which is much faster than one by one."""
        if not texts:
            return []
        return self._backend(list(texts), add_special_tokens=add_special_tokens)["input_ids"]

    def token_bound(self) -> TokenBound | None:
        """Returns an upper bound of the number of tokens of texts; None if none is certain for this tokenizer."""
        # A tokenizer in Python has no backend.
        backend: RustTokenizer | None = getattr(self._backend, "backend_tokenizer", None)
        return None if backend is None else token_bound(backend)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens, by default without special tokens. Spaces are not cleaned up."""
        return self._backend.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns for each token the text that it adds; joined they are the text of all tokens, with special tokens.

        A character that consists of several tokens is the text of the last one. If the tokenizer cannot decode token by
        token, the first token has the whole text."""
        whole = self.decode(token_ids, skip_special_tokens=False)
        texts, stream = list[str](), DecodeStream(skip_special_tokens=False)
        try:
            backend = self._backend.backend_tokenizer
            texts += [stream.step(backend, token) or "" for token in token_ids]
        except Exception:
            # A tokenizer in Python has no backend, and some decoders need more than the last few tokens.
            texts = []
        joined = "".join(texts)
        if texts and whole.startswith(joined):
            # The last character may be incomplete.
            texts[-1] += whole[len(joined) :]
            return texts
        return [whole, *[""] * (len(token_ids) - 1)] if token_ids else []

    def render_conversation(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> str:
        """Renders a whole conversation with the chat template. As with `render_chat`, encode the text with
        `add_special_tokens=False`. Raises ChatTemplateError as `render_chat` does."""
        return self._render(messages, tools, with_generation_prompt=False)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The source of the chat template; several templates by their names; None without a template."""
        return self._backend.chat_template

    @property
    def folder(self) -> Path:
        """The folder with the tokenizer's files."""
        return self._folder

    @property
    def has_response_template(self) -> bool:
        """Whether the tokenizer has a response template. `parse_response` needs one."""
        return getattr(self._backend, "response_template", None) is not None

    def parse_response(self, text: str, *, prompt: str, tools: Sequence[ToolSchema] = ()) -> dict[str, object]:
        """Splits an assistant's turn into the fields of a message, by the tokenizer's response template.

        Args:
            text: The turn with its special tokens, as the model wrote it.
            prompt: The end of the prompt, at least from the header of the assistant's turn. It may contain the
                beginning of the turn.
            tools: Arguments of calls are converted to the types of these tools' schemas.

        Any type of exception is possible, because the template can fail at any text.
        """
        return self._backend.parse_response(text, prefix=prompt, tools=list(tools) or None)

    def render_chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> str:
        """Renders a conversation with the chat template, followed by the beginning of the assistant's turn.

        The text already contains the special tokens: encode it with `add_special_tokens=False`. Raises
        ChatTemplateError if the template rejects the conversation, is invalid, or is one of several without a default.
        """
        return self._render(messages, tools, with_generation_prompt=True)

    def ignored_messages(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Returns the indices of the messages that the chat template leaves out of the text of `render_chat`, as some
        templates do with unknown roles. The result depends on the roles, and on which messages have tool calls, but
        seldom on the contents. Raises ChatTemplateError if the template rejects the conversation."""
        tests = [TEST_CONTENT.format(index, index) for index in range(len(messages))]
        try:
            text = self.render_chat(list(map(_with_content, messages, tests)), tools)
        except ChatTemplateError:
            text = ""
        if not (missing := [index for index, test in enumerate(tests) if test not in text]):
            return ()
        # A template may cut a content, or need a certain one.
        text = self.render_chat(messages, tools)
        return tuple(index for index in missing if not self._is_written(messages, index, text, tools))

    def _is_written(self, messages: Sequence[ChatMessage], index: int, text: str, tools: Sequence[ToolSchema]) -> bool:
        """Whether the rendered text depends on the content or the tool calls of one message."""
        for change in CHANGES:
            other = _with_content(messages[index], change.format(messages[index]["content"]))
            try:
                if self.render_chat([*messages[:index], other, *messages[index + 1 :]], tools) != text:
                    return True
            except ChatTemplateError:
                return True
        return False

    def _render(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], *, with_generation_prompt: bool
    ) -> str:
        template = self._backend.chat_template
        names = {"default", "tool_use"} if tools else {"default"}
        if isinstance(template, dict) and names.isdisjoint(template):
            raise ChatTemplateError(
                f"{self._folder} has several chat templates ({', '.join(template)}) and none is named 'default'"
            )
        try:
            return self._backend.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=with_generation_prompt,
            )
        except MemoryError:
            raise
        except Exception as error:
            # A template is a program written by the model's author, so it can raise any error.
            raise ChatTemplateError(
                f"the chat template of {self._folder} failed: {_template_message(error)}"
            ) from error


def _with_content(message: ChatMessage, content: str) -> ChatMessage:
    """Returns the message with another content. If it has tool calls, only their arguments are replaced, because some
    templates ignore or reject a content beside calls."""
    if "tool_calls" not in message:
        return {**message, "content": content}
    calls: list[ToolCall] = [
        {**call, "function": {"name": call["function"]["name"], "arguments": {"value": content}}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _declared_end_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the end tokens in the first file of END_TOKEN_FILES that exists; none if it declares none. Raises
    ConfigurationError if the file is damaged."""
    file = next((folder / name for name in END_TOKEN_FILES if (folder / name).exists()), None)
    declared = read_json_object(file).get("eos_token_id") if file else None
    tokens = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if any(type(token) is not int for token in tokens):
        raise ConfigurationError(
            f"{WHERE}: eos_token_id in {file} must be a token id or a list of token ids (seen: {declared!r:.80}); fix "
            "the file"
        )
    return tuple(tokens)


def _template_message(error: Exception) -> str:
    """Returns the template's own message if it has called `raise_exception`, else a description of the error."""
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno} is not valid Jinja: {error.message}"
    return " ".join(str(error).split()) if type(error) is TemplateError else described(error)

"""The model's tokenizer behind types. Importing this module loads transformers' tokenizers, not its models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypedDict, cast

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer

from rljob_trainer.errors import ChatTemplateError, ConfigurationError, described
from rljob_trainer.models.model_files import WHERE, read_json_object, reading_model

END_TOKEN_FILES = ("generation_config.json", "config.json")
"""The first one that exists names the end tokens."""


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class _AddedToken(Protocol):
    special: bool


class _Backend(Protocol):
    """What is used of transformers' tokenizers."""

    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: str | dict[str, str] | None
    all_special_tokens: list[str]
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, _AddedToken]

    def get_vocab(self) -> dict[str, int]: ...

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    def apply_chat_template(
        self, conversation: list[ChatMessage], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, folder: Path) -> None:
        """Reads it from a model's folder. Raises ConfigurationError if there is none that can be read, or where the
        file that names the end tokens is damaged."""
        self._folder = folder
        with reading_model(folder, f"no tokenizer can be read from {folder}", "use a model that has one"):
            self._backend = cast(_Backend, AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
        # Where the folder has no files of one, transformers makes up one that knows special tokens only.
        if set(self._backend.get_vocab()) <= set(self._backend.all_special_tokens):
            raise ConfigurationError(
                f"spec.training.model.source: {folder} has no tokenizer's vocabulary; copy the model's tokenizer files "
                "there"
            )
        self._declared_end_tokens = _declared_end_tokens(folder)

    def vocabulary(self) -> dict[str, int]:
        """All tokens, special ones too, with their ids."""
        return self._backend.get_vocab()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: those of the model's generation settings, or of its configuration where there are
        none (as in transformers and vLLM), and the tokenizer's own, in order."""
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
        """Tokens that `decode` leaves out unless it is asked for special tokens."""
        added = (token for token, each in self._backend.added_tokens_decoder.items() if each.special)
        return frozenset((*added, *self._backend.all_special_ids))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return self._backend.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; by default with what the model expects at the beginning of a text, such as a BOS token."""
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Many texts at once, which is much faster than one by one."""
        if not texts:
            return []
        return self._backend(list(texts), add_special_tokens=add_special_tokens)["input_ids"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some tokens, with the spaces that they have."""
        return self._backend.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def render_conversation(self, messages: Sequence[ChatMessage]) -> str:
        """The whole conversation in the model's chat template; encode it as what `render_chat` gives. Raises as it."""
        return self._rendered(messages, begins_answer=False)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The template's own text; several by their names."""
        return self._backend.chat_template

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation in the model's chat template, up to where the assistant begins to answer.

        The text holds the special tokens already: encode it without adding any. Raises ChatTemplateError for a
        conversation that the template refuses, and for a template that is wrong itself.
        """
        return self._rendered(messages, begins_answer=True)

    def _rendered(self, messages: Sequence[ChatMessage], *, begins_answer: bool) -> str:
        template = self._backend.chat_template
        if isinstance(template, dict) and "default" not in template:
            raise ChatTemplateError(
                f"{self._folder} has several chat templates ({', '.join(template)}) and none is named 'default'"
            )
        try:
            return self._backend.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=begins_answer
            )
        except MemoryError:
            raise
        except Exception as error:
            # A template is a program of the model's author: it can raise anything.
            raise ChatTemplateError(f"the chat template of {self._folder} says: {_template_words(error)}") from error


def _declared_end_tokens(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of the file that counts. Raises ConfigurationError where that is damaged."""
    file = next((folder / name for name in END_TOKEN_FILES if (folder / name).exists()), None)
    declared = read_json_object(file).get("eos_token_id") if file else None
    tokens = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if any(type(token) is not int for token in tokens):
        raise ConfigurationError(
            f"{WHERE}: eos_token_id in {file} is {declared!r:.80}; it must be a token's number or a list of them"
        )
    return tuple(tokens)


def _template_words(error: Exception) -> str:
    """What the template itself says, where it has called `raise_exception`."""
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno} is not valid Jinja: {error.message}"
    return " ".join(str(error).split()) if type(error) is TemplateError else described(error)

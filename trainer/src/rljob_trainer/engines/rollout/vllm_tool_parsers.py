"""vLLM's tool parsers, for models whose tokenizer has no response template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.tool_parsers import ToolParserManager

from rljob_trainer.engines.rollout.tool_parser import FoundCall, FoundCalls
from rljob_trainer.errors import ConfigurationError, described
from rljob_trainer.models.tokenizer import ToolSchema

FIELD = "spec.training.environment.toolParser"
NOISY_LOGGERS = ("vllm.tool_parsers", "vllm.parser")
"""They log a traceback for every broken tool call. A policy in training writes many of them."""


class VllmToolParser:
    """One of vLLM's tool parsers."""

    def __init__(self, name: str, folder: Path, tools: Sequence[ToolSchema]) -> None:
        """`name`: as in vLLM's `--tool-call-parser`. `folder`: the model's folder. Raises ConfigurationError if vLLM
        has no such parser, or if the parser does not work with the model's tokenizer."""
        known = ToolParserManager.list_registered()
        if name not in known:
            raise ConfigurationError(f"{FIELD}: vLLM has no tool parser {name!r}; use one of {', '.join(known)}")
        self._tokenizer = _tokenizer(folder)
        self._tools = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]
        self._request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=list(tools))
        try:
            self._parser_class = ToolParserManager.get_tool_parser(name)
            self._parser_class(self._tokenizer, self._tools)
        except Exception as error:  # each parser has its own requirements
            raise ConfigurationError(
                f"{FIELD}: vLLM's tool parser {name!r} does not work with the tokenizer in {folder} "
                f"({described(error)}); use the parser that vLLM's documentation names for this model"
            ) from error
        for logger in NOISY_LOGGERS:
            logging.getLogger(logger).setLevel(logging.CRITICAL)

    def find_calls(self, text: str) -> FoundCalls:
        """See ToolParser.find_calls."""
        # Parsers keep state, so each turn gets a new one, as in vLLM's server.
        found = self._parser_class(self._tokenizer, self._tools).extract_tool_calls(text, self._request)
        calls = found.tool_calls if found.tools_called else []
        return FoundCalls(
            found.content or "", tuple(FoundCall(call.function.name, call.function.arguments) for call in calls)
        )


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> TokenizerLike:
    """vLLM's tokenizer, which takes time to load. Agents may send many lists of tools, each of which gets a parser."""
    return get_tokenizer(str(folder))

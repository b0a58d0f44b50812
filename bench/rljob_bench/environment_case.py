"""The conversations that RLJob and TRL hold in `bench/environments.py`, and their floor.

All have the same turns: calls of the tool, then a short last turn. So both programs do the same work.

Legend: P parameters. For the operations of a token see `step_floor`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from rljob_bench.counting_game import CountingGame
from rljob_bench.scripted_model import LAST_TOKENS, Script, write_scripted_model
from rljob_bench.step_case import GROUP_SIZE, NUM_PROMPTS, NUM_ROWS
from rljob_bench.step_floor import StepFloor

NUM_DATASET_ROWS = 512
MARGIN_TOKENS = 16
"""Tokens of a conversation beyond the longest one, so that no program ends one because it is full."""


@dataclass(frozen=True)
class Conversations:
    """What is measured: B = NUM_ROWS conversations per step, all at the same time."""

    num_calls: int
    call_tokens: int
    """Tokens of a turn that calls the tool."""
    tool_seconds: float
    """Duration of a call, in which the tool sleeps."""
    num_layers: int

    @property
    def num_turns(self) -> int:
        """The number of turns of a conversation."""
        return self.num_calls + 1

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens of a conversation."""
        return self.num_calls * self.call_tokens + len(LAST_TOKENS)

    @property
    def game(self) -> dict[str, object]:
        """The arguments of CountingGame."""
        return {"num_calls": self.num_calls, "tool_seconds": self.tool_seconds}


class ConversationFolder:
    """A model and a dataset for these conversations, written into a folder."""

    def __init__(self, conversations: Conversations, folder: Path) -> None:
        self.conversations = conversations
        self.model = folder / "model"
        self.prompts = folder / "prompts.jsonl"
        script = Script(conversations.call_tokens, 0, conversations.num_layers)
        write_scripted_model(script, self.model)
        # Now that there is a tokenizer, the length of a conversation is known.
        finished_at = self.prompt_tokens + conversations.num_calls * (conversations.call_tokens + self.message_tokens)
        write_scripted_model(Script(conversations.call_tokens, finished_at, conversations.num_layers), self.model)
        rows = ({"prompt": [message]} for message in map(_task, range(NUM_DATASET_ROWS)))
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @cached_property
    def num_parameters(self) -> int:
        """P."""
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model))
        return sum(parameter.numel() for parameter in made.parameters())

    @cached_property
    def prompt_tokens(self) -> int:
        """The number of tokens of a prompt."""
        game = CountingGame()
        message = _task(0)
        message["content"] += game.reset()
        return self._length([message], [get_json_schema(game.count)])

    @cached_property
    def message_tokens(self) -> int:
        """The number of tokens between two turns."""
        turn = {"role": "assistant", "content": "x"}
        result = {"role": "tool", "name": "count", "content": CountingGame().count("n00 ")}
        # Without the two tokens of the turn, x and its end.
        return self._length([_task(0), turn, result], []) - self._length([_task(0)], []) - 2

    @property
    def response_tokens(self) -> int:
        """The number of tokens after the prompt, sampled or not."""
        return self.conversations.sampled_tokens + self.conversations.num_calls * self.message_tokens

    @property
    def max_tokens(self) -> int:
        """A limit of the tokens of a conversation that none reaches."""
        return self.prompt_tokens + self.response_tokens + MARGIN_TOKENS

    def _length(self, messages: list[dict[str, str]], tools: list[dict[str, object]]) -> int:
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(self.model)


class ConversationFloor:
    """The floor of rollouts and of a step; a contender like the others."""

    def __init__(self, folder: ConversationFolder, num_threads: int) -> None:
        self._folder = folder
        self._speeds = StepFloor(torch.float32, folder.num_parameters, num_threads)

    def turn(self) -> list[float]:
        """Seconds of one step at the highest speeds that were measured in this turn."""
        self._speeds.turn()
        return [self.rollout_seconds() + self._operations(6 * NUM_ROWS * self._row_tokens)]

    def rollout_seconds(self) -> float:
        """Seconds of reading each prompt and message once, of decoding, and of the sleeps of one rollout: the rollouts
        need not wait for each other. Decoding is the slower of operations and of reading all weights once per
        position."""
        conversations = self._folder.conversations
        messages = NUM_ROWS * conversations.num_calls * self._folder.message_tokens
        read = self._operations(2 * (NUM_PROMPTS * self._folder.prompt_tokens + messages))
        arithmetic = self._operations(2 * NUM_ROWS * conversations.sampled_tokens)
        num_bytes = self._speeds.bytes_per_parameter * self._folder.num_parameters * conversations.sampled_tokens
        decoding = max(arithmetic, num_bytes / self._speeds.bytes_per_second[-1])
        return read + decoding + conversations.num_calls * conversations.tool_seconds

    def described(self) -> str:
        """The speeds as text."""
        return self._speeds.described()

    @property
    def _row_tokens(self) -> int:
        return self._folder.prompt_tokens + self._folder.response_tokens

    def _operations(self, per_parameter: int) -> float:
        return per_parameter * self._folder.num_parameters / self._speeds.operations_per_second[-1]


def our_training(folder: ConversationFolder) -> Mapping[str, object]:
    """The fields of `spec.training` for these conversations."""
    conversations = folder.conversations
    return {
        "environment": {
            "type": "Class",
            "classes": [{"path": "rljob_bench.counting_game:CountingGame", "arguments": conversations.game}],
            "maxTurns": conversations.num_turns,
            "maxContextTokens": folder.max_tokens,
            # A row of the evaluation waits in `reset` for the next turn.
            "maxSeconds": 86_400,
            "timeoutSeconds": 86_400,
        },
        "rewards": [],
    }


def trl_details(folder: ConversationFolder) -> Mapping[str, object]:
    """The details of `peers/trl_peer.py` for these conversations."""
    conversations = folder.conversations
    return {
        "num_rows": NUM_ROWS,
        "group_size": GROUP_SIZE,
        # For TRL, the messages of the environment are part of the response.
        "new_tokens": folder.response_tokens + MARGIN_TOKENS,
        "sampled_tokens": conversations.sampled_tokens,
        "max_tokens": folder.max_tokens,
        "environment": conversations.game,
    }


def _task(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"Task {number:03d}."}

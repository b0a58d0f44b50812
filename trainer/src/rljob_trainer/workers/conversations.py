"""Columns of rollouts with environments: the requests, and the conversations as rows of tokens.

Legend: B rollouts of this worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.environments.conversation import Conversation
from rljob_trainer.environments.episode import EpisodeRequest, FinishedEpisode
from rljob_trainer.models.tokenizer import ChatMessage
from rljob_trainer.workers.columns import (
    DATASET_ROWS,
    ENVIRONMENT_RESULTS,
    ENVIRONMENT_SECONDS,
    ENVIRONMENT_SEEDS,
    GENERATION_SECONDS,
    IS_GREEDY,
    IS_REWRITTEN,
    MESSAGES,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    NUM_TURNS,
    PLAIN_RESPONSE_TEXTS,
    PLAIN_TURN_BEGINNINGS,
    POLICY_VERSIONS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_SEEDS,
    TOKENS,
    TURN_BEGINNINGS,
    outcome_columns,
)


def episode_requests(batch: DataProto, sampling: SamplingSettings, numbers: Iterator[int]) -> list[EpisodeRequest]:
    """Returns one request per row. Needs PROMPT_MESSAGES, DATASET_ROWS, SAMPLE_SEEDS and ENVIRONMENT_SEEDS; IS_GREEDY
    is optional."""
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    are_greedy: list[bool] = batch[IS_GREEDY].tolist() if IS_GREEDY in batch.tensors else [False] * len(batch)
    columns = (
        batch.object_column(PROMPT_MESSAGES),
        batch.object_column(DATASET_ROWS),
        batch[SAMPLE_SEEDS].tolist(),
        batch[ENVIRONMENT_SEEDS].tolist(),
        are_greedy,
    )
    return [
        EpisodeRequest(
            next(numbers), _messages(messages), _mapping(row), greedy if is_greedy else sampling, seed, environment_seed
        )
        for messages, row, seed, environment_seed, is_greedy in zip(*columns, strict=True)
    ]


def conversation_columns(episodes: Sequence[FinishedEpisode]) -> DataProto:
    """Returns the columns of finished rollouts: those of `rollout_columns`, the prompts, and what happened in the
    conversations. A rollout that was lost has a row of one token that was not sampled."""
    rows = [_Row(episode.conversation) for episode in episodes]
    lengths_B = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)

    def column(name: str, dtype: torch.dtype) -> RaggedColumn:
        values = chain.from_iterable(getattr(row, name) for row in rows)
        return RaggedColumn(torch.tensor(list(values), dtype=dtype), lengths_B)

    return DataProto(
        tensors={
            RESPONSE_LENGTHS: torch.tensor([sum(row.mask) for row in rows], dtype=torch.int64),
            **outcome_columns([episode.outcome for episode in episodes]),
            NUM_TURNS: torch.tensor([row.num_turns for row in rows], dtype=torch.int64),
            NUM_TOOL_CALLS: torch.tensor([each.counts.num_tool_calls for each in episodes], dtype=torch.int64),
            NUM_TOOL_ERRORS: torch.tensor([each.counts.num_tool_errors for each in episodes], dtype=torch.int64),
            IS_REWRITTEN: torch.tensor([each.is_rewritten for each in episodes], dtype=torch.bool),
            ENVIRONMENT_SECONDS: torch.tensor([each.counts.environment_seconds for each in episodes]),
            GENERATION_SECONDS: torch.tensor([each.counts.generation_seconds for each in episodes]),
        },
        ragged={
            TOKENS: column("tokens", torch.int64),
            RESPONSE_MASK: column("mask", torch.bool),
            ROLLOUT_LOGPROBS: column("logprobs", torch.float32),
            POLICY_VERSIONS: column("policy_versions", torch.int32),
        },
        objects={
            PROMPT_TEXTS: tuple(row.prompt_text for row in rows),
            TURN_BEGINNINGS: ("",) * len(rows),
            RESPONSE_TEXTS: tuple(row.response_text for row in rows),
            PROMPT_MESSAGES: tuple(row.messages[:-1] for row in rows),
            PLAIN_TURN_BEGINNINGS: ("",) * len(rows),
            PLAIN_RESPONSE_TEXTS: tuple(row.last_turn for row in rows),
            MESSAGES: tuple(row.messages for row in rows),
            ENVIRONMENT_RESULTS: tuple(
                (each.reward.status.value, each.reward.value, each.reward.detail) for each in episodes
            ),
        },
    )


class _Row:
    """The contents of a conversation as columns; those of a lost one are a single token that was not sampled."""

    def __init__(self, conversation: Conversation | None) -> None:
        before = 1 if conversation is None else conversation.num_prompt_tokens
        found = conversation
        self.tokens = found.token_ids if found else [0]
        self.mask = [False] * before + (found.mask if found else [])
        self.logprobs = [0.0] * before + (found.logprobs if found else [])
        self.policy_versions = [-1] * before + (found.policy_versions if found else [])
        self.num_turns = found.num_turns if found else 0
        self.prompt_text = found.prompt_text if found else ""
        self.response_text = found.response_text if found else ""
        self.last_turn = found.last_turn_plain_text if found else ""
        self.messages: tuple[Mapping[str, object], ...] = tuple(found.messages) if found else ()


def _messages(value: object) -> tuple[ChatMessage, ...] | None:
    """The messages of a row's prompt."""
    if value is None:
        return None
    assert isinstance(value, Sequence), "a row of PROMPT_MESSAGES"
    return tuple(value)


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping), "a row of DATASET_ROWS"
    return value

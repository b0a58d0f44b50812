"""Columns of rollouts with environments: the requests, and the conversations as rows of tokens.

Legend: B rollouts of this worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.environments.episode import EpisodeRequest, FinishedEpisode
from rljob_trainer.environments.transcript import TokenRow, Transcript
from rljob_trainer.errors import ConfigurationError
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

LOST = Transcript((TokenRow((0,), 1, (), (), ()),), (), "", "", "", 0)
"""Stands for a rollout that was lost: a row with a token that was not sampled."""


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
    conversations. A rollout that was lost has a row of one token that was not sampled. Raises ConfigurationError if a
    rollout has several rows."""
    found = [episode.transcript or LOST for episode in episodes]
    for transcript in found:
        if len(transcript.rows) > 1:
            raise ConfigurationError(
                f"spec.training.environment: a rollout has {len(transcript.rows)} rows of tokens, but only one can be "
                "trained yet; the agent must send back all messages of its conversation, unchanged and in one branch"
            )
    rows = [transcript.rows[0] for transcript in found]
    lengths_B = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64)

    def column(of_row: Callable[[TokenRow], Sequence[int | float]], before: int, dtype: torch.dtype) -> RaggedColumn:
        """`of_row`: values of the tokens after the prompt; `before`: the value of the prompt's tokens."""
        values = chain.from_iterable(chain([before] * row.num_prompt_tokens, of_row(row)) for row in rows)
        return RaggedColumn(torch.tensor(list(values), dtype=dtype), lengths_B)

    return DataProto(
        tensors={
            RESPONSE_LENGTHS: torch.tensor([sum(row.mask) for row in rows], dtype=torch.int64),
            **outcome_columns([episode.outcome for episode in episodes]),
            NUM_TURNS: torch.tensor([each.num_turns for each in found], dtype=torch.int64),
            NUM_TOOL_CALLS: torch.tensor([each.counts.num_tool_calls for each in episodes], dtype=torch.int64),
            NUM_TOOL_ERRORS: torch.tensor([each.counts.num_tool_errors for each in episodes], dtype=torch.int64),
            IS_REWRITTEN: torch.tensor([each.is_rewritten for each in found], dtype=torch.bool),
            ENVIRONMENT_SECONDS: torch.tensor([each.counts.environment_seconds for each in episodes]),
            GENERATION_SECONDS: torch.tensor([each.counts.generation_seconds for each in episodes]),
        },
        ragged={
            TOKENS: RaggedColumn.from_rows([row.token_ids for row in rows], torch.int64),
            RESPONSE_MASK: column(lambda row: row.mask, False, torch.bool),
            ROLLOUT_LOGPROBS: column(lambda row: row.logprobs, 0, torch.float32),
            POLICY_VERSIONS: column(lambda row: row.policy_versions, -1, torch.int32),
        },
        objects={
            PROMPT_TEXTS: tuple(each.prompt_text for each in found),
            TURN_BEGINNINGS: ("",) * len(rows),
            RESPONSE_TEXTS: tuple(each.response_text for each in found),
            PROMPT_MESSAGES: tuple(each.messages[:-1] for each in found),
            PLAIN_TURN_BEGINNINGS: ("",) * len(rows),
            PLAIN_RESPONSE_TEXTS: tuple(each.last_turn for each in found),
            MESSAGES: tuple(each.messages for each in found),
            ENVIRONMENT_RESULTS: tuple(
                (each.reward.status.value, each.reward.value, each.reward.detail) for each in episodes
            ),
        },
    )


def _messages(value: object) -> tuple[ChatMessage, ...] | None:
    """The messages of a row's prompt."""
    if value is None:
        return None
    assert isinstance(value, Sequence), "a row of PROMPT_MESSAGES"
    return tuple(value)


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping), "a row of DATASET_ROWS"
    return value

"""Columns of rollouts with environments: the requests, and the conversations as rows of tokens.

Legend: B rollouts of this worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.environments.episode import EpisodeRequest, FinishedEpisode
from rljob_trainer.environments.transcript import TokenRow, Transcript
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
    NUM_TOKENS,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    NUM_TURNS,
    PLAIN_RESPONSE_TEXTS,
    PLAIN_TURN_BEGINNINGS,
    POLICY_VERSIONS,
    PROMPT_LENGTHS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    TOKENS,
    TURN_BEGINNINGS,
    outcome_columns,
)

LOST = Transcript((TokenRow((0,), 1, ()),), (), "", "", "", 0)
"""Stands for a rollout that was lost: a row with a token that was not sampled."""
LOST_CHAT: tuple[ChatMessage, ...] = ({"role": "user", "content": "lost"},)
"""What a reward model reads for it, because its batches have all rows."""


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


def conversation_columns(episodes: Sequence[FinishedEpisode], ids: Sequence[int]) -> DataProto:
    """Returns the columns of finished rollouts: SAMPLE_IDS (`ids`, one per rollout), those of `rollout_columns`, the
    prompts, and what happened in the conversations. Legend: R rows.

    The rows of a rollout follow each other, and values per rollout are the same in all of them. A rollout that was lost
    has one row, of a token that was not sampled."""
    found = [episode.transcript or LOST for episode in episodes]
    rows = [row for transcript in found for row in transcript.rows]
    owners = [number for number, transcript in enumerate(found) for _ in transcript.rows]
    lengths_R = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64)

    def numbers(values: Sequence[int | float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[owners]

    def objects(values: Sequence[object]) -> tuple[object, ...]:
        return tuple(values[owner] for owner in owners)

    outcomes = outcome_columns([episode.outcome for episode in episodes])
    return DataProto(
        tensors={
            SAMPLE_IDS: numbers(ids),
            RESPONSE_LENGTHS: numbers([sum(row.num_trained_tokens for row in each.rows) for each in found]),
            PROMPT_LENGTHS: numbers([min(row.num_prompt_tokens for row in each.rows) for each in found]),
            NUM_TOKENS: lengths_R,
            **{name: column[owners] for name, column in outcomes.items()},
            NUM_TURNS: numbers([each.num_turns for each in found]),
            NUM_TOOL_CALLS: numbers([each.counts.num_tool_calls for each in episodes]),
            NUM_TOOL_ERRORS: numbers([each.counts.num_tool_errors for each in episodes]),
            IS_REWRITTEN: numbers([each.is_rewritten for each in found], torch.bool),
            ENVIRONMENT_SECONDS: numbers([each.counts.environment_seconds for each in episodes], torch.float32),
            GENERATION_SECONDS: numbers([each.counts.generation_seconds for each in episodes], torch.float32),
        },
        ragged={
            TOKENS: RaggedColumn.from_rows([row.token_ids for row in rows], torch.int64),
            **_columns_of_turns(rows, lengths_R),
        },
        objects={
            PROMPT_TEXTS: objects([each.prompt_text for each in found]),
            TURN_BEGINNINGS: ("",) * len(rows),
            RESPONSE_TEXTS: objects([each.response_text for each in found]),
            PROMPT_MESSAGES: objects([_before_last_turn(each) for each in found]),
            PLAIN_TURN_BEGINNINGS: ("",) * len(rows),
            PLAIN_RESPONSE_TEXTS: objects([each.last_turn for each in found]),
            MESSAGES: objects([each.messages for each in found]),
            ENVIRONMENT_RESULTS: objects(
                [(each.reward.status.value, each.reward.value, each.reward.detail) for each in episodes]
            ),
        },
    )


def _columns_of_turns(rows: Sequence[TokenRow], lengths_R: torch.Tensor) -> dict[str, RaggedColumn]:
    """The columns that have values of their own only for the tokens of turns."""
    num_tokens = int(lengths_R.sum())
    columns = {
        RESPONSE_MASK: torch.zeros(num_tokens, dtype=torch.bool),
        ROLLOUT_LOGPROBS: torch.zeros(num_tokens, dtype=torch.float32),
        POLICY_VERSIONS: torch.full((num_tokens,), -1, dtype=torch.int32),
    }
    for first, row in zip(accumulate(lengths_R.tolist(), initial=0), rows, strict=False):
        for turn in row.turns:
            place = slice(first + turn.start, first + turn.start + len(turn.logprobs))
            columns[RESPONSE_MASK][place] = True
            columns[ROLLOUT_LOGPROBS][place] = torch.tensor(turn.logprobs, dtype=torch.float32)
            columns[POLICY_VERSIONS][place] = torch.tensor(turn.policy_versions, dtype=torch.int32)
    return {name: RaggedColumn(values, lengths_R) for name, values in columns.items()}


def _before_last_turn(transcript: Transcript) -> tuple[Mapping[str, object], ...]:
    """The messages before the policy's last turn: what a reward model reads as the prompt. If the rollout ended before
    the policy answered, messages of the environment follow the last turn, and are left out."""
    turns = [place for place, message in enumerate(transcript.messages) if message["role"] == "assistant"]
    if transcript.num_turns:
        return transcript.messages[: turns[-1]]
    return transcript.messages or LOST_CHAT


def _messages(value: object) -> tuple[ChatMessage, ...] | None:
    """The messages of a row's prompt."""
    if value is None:
        return None
    assert isinstance(value, Sequence), "a row of PROMPT_MESSAGES"
    return tuple(value)


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping), "a row of DATASET_ROWS"
    return value

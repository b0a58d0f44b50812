"""Records the tokens of a few conversations of a step, for the files of `observability/token_files`.

The controller chooses the conversations and marks their rows in the batch of the update (RECORDED_INDEX). While the
actor makes the updates, it keeps what only it knows of these rows (`UpdateRecord`). Then one worker reads their tokens,
adds what the actor has kept, and writes the file.

Legend: N response tokens, U rows of the update that are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.observability.token_files import Conversation, TokenValues, kept_tokens, max_tokens_per_conversation
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    GROUPS,
    OLD_LOGPROBS,
    OUTCOME_LIST,
    OUTCOMES,
    POLICY_VERSIONS,
    PROMPT_TEXTS,
    RECORDED_INDEX,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SCORES,
    TOKENS,
    per_token,
    trained_mask,
)

IS_TRAINED_TOKEN = "is_trained_token"
"""Ragged bool: whether the update has trained on the token."""
TRAINER_LOGPROBS = "trainer_logprobs"
"""Ragged float32: log-probability by the training engine before the step's updates; NaN if it was not computed, or
cannot be compared with the rollout engine's."""
KINDS = "kinds"
"""Object column: the value of SampleKind of each conversation."""
EVALUATIONS = "evaluations"
"""Object column: name of the evaluation; empty for training."""
NUM_DECIMALS = 5
"""Decimal places of numbers in the file."""


class TokenTexts(Protocol):
    """The part of a tokenizer that is used here."""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """See Tokenizer.token_texts."""
        ...


class UpdateRecord:
    """What an actor's update knows of the rows that are recorded. An error here never fails the update: `result` raises
    it."""

    def __init__(self, batch: DataProto) -> None:
        """`batch`: this worker's rows of the update. Without a column RECORDED_INDEX nothing is recorded."""
        self._columns = DataProto()
        self._error: Exception | None = None
        self._rows: list[int] = []
        self._chosen = DataProto()
        self._logprobs: dict[int, Tensor] = {}
        """By row: [N of the row]."""
        with self._guarded():
            if RECORDED_INDEX in batch.tensors:
                self._rows = (batch[RECORDED_INDEX] >= 0).nonzero().flatten().tolist()
                self._chosen = batch.rows(self._rows)

    def add_old_logprobs(self) -> None:
        """Takes the trainer's log-probabilities from a pass before the updates, OLD_LOGPROBS."""
        with self._guarded():
            if self._rows:
                old = self._chosen.ragged_column(OLD_LOGPROBS).row_tensors()
                masks = trained_mask(self._chosen).row_tensors()
                self._logprobs |= {row: each[mask] for row, each, mask in zip(self._rows, old, masks, strict=True)}

    def add(self, first_row: int, micro_batch: MicroBatch, logprobs_N: Tensor) -> None:
        """Stores the trainer's log-probabilities of a micro-batch. `first_row`: the first row of its mini-batch in the
        batch of the step. Copies on the device, without waiting for it."""
        with self._guarded():
            lengths = micro_batch.response_lengths
            for row, length, end in zip(micro_batch.batch_rows, lengths, accumulate(lengths), strict=False):
                if first_row + row in self._rows:
                    self._logprobs[first_row + row] = logprobs_N[end - length : end].clone()

    def end(self, batch: DataProto, *, is_comparable: bool) -> None:
        """Makes the columns. `batch`: the rows of the update without rejected tokens. `is_comparable`: whether the
        trainer's log-probabilities can be compared with the rollout engine's."""
        with self._guarded():
            if RECORDED_INDEX not in self._chosen:
                return
            logprobs = []
            for row, mask in zip(self._rows, trained_mask(self._chosen).row_tensors(), strict=True):
                values = torch.full(mask.shape, math.nan)
                if is_comparable and row in self._logprobs:
                    values[mask] = self._logprobs[row].float().cpu()
                logprobs.append(values)
            lengths_U = self._chosen.ragged_column(TOKENS).lengths
            self._columns = DataProto(
                {RECORDED_INDEX: self._chosen[RECORDED_INDEX]},
                ragged={
                    TRAINER_LOGPROBS: RaggedColumn.from_rows(logprobs, torch.float32),
                    IS_TRAINED_TOKEN: trained_mask(batch.rows(self._rows)),
                    ADVANTAGES: per_token(self._chosen, ADVANTAGES, lengths_U),
                },
            )

    def result(self) -> DataProto:
        """Returns [U]: RECORDED_INDEX, TRAINER_LOGPROBS, IS_TRAINED_TOKEN, and ADVANTAGES per token, after `end`.
        Raises what went wrong during the update."""
        if self._error is not None:
            raise self._error
        return self._columns

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._rows, self._chosen, self._error = [], DataProto(), error


def conversations_of(rows: DataProto, updated: DataProto, version: int, tokenizer: TokenTexts) -> list[Conversation]:
    """Returns the conversations of a file.

    Args:
        rows: One row per conversation, with the columns of `Rollout.rows`, GROUPS, SCORES, OUTCOMES, PROMPT_TEXTS and
            KINDS and EVALUATIONS.
        updated: The rows of `UpdateRecord.result` of all workers; RECORDED_INDEX are row numbers of `rows`.
        version: The version of the newest weights when the responses were generated.
    """
    numbers_U: list[int] = updated[RECORDED_INDEX].tolist() if len(updated) else []
    columns = {name: rows.ragged_column(name).row_tensors() for name in _ROW_COLUMNS}
    of_update = {name: updated.ragged_column(name).row_tensors() for name in _UPDATE_COLUMNS if numbers_U}
    max_tokens = max_tokens_per_conversation([len(each) for each in columns[TOKENS]])
    found = []
    for number, mask in enumerate(columns[RESPONSE_MASK]):
        num_prompt_tokens = int(mask.nonzero()[0]) if mask.any() else len(mask)
        first, stop = kept_tokens(num_prompt_tokens, len(mask), max_tokens)
        known = {name: values[number][first:stop] for name, values in columns.items()}
        if number in numbers_U:
            place = numbers_U.index(number)
            known |= {name: values[place][first:stop] for name, values in of_update.items()}
        score = float(rows[SCORES][number])
        found.append(
            Conversation(
                kind=str(rows.object_column(KINDS)[number]),
                evaluation=str(rows.object_column(EVALUATIONS)[number]),
                group=int(rows[GROUPS][number]),
                prompt=str(rows.object_column(PROMPT_TEXTS)[number]),
                score=None if math.isnan(score) else score,
                outcome=OUTCOME_LIST[int(rows[OUTCOMES][number])],
                num_prompt_tokens=num_prompt_tokens,
                num_tokens=len(mask),
                first_token=first,
                tokens=_token_values(known, version, tokenizer),
            )
        )
    return found


def _token_values(known: Mapping[str, Tensor], version: int, tokenizer: TokenTexts) -> TokenValues:
    """The values of some tokens of a conversation. `known`: the columns of these tokens."""
    mask = known[RESPONSE_MASK]
    nothing = torch.full(mask.shape, math.nan)
    is_trained = known.get(IS_TRAINED_TOKEN, torch.zeros_like(mask))
    ages = (version - known[POLICY_VERSIONS]).tolist()
    return TokenValues(
        text=tokenizer.token_texts(known[TOKENS].tolist()),
        is_sampled=mask.tolist(),
        is_trained=is_trained.tolist(),
        rollout_logprob=_numbers(known[ROLLOUT_LOGPROBS].where(mask, nothing)),
        trainer_logprob=_numbers(known.get(TRAINER_LOGPROBS, nothing)),
        age=[age if is_sampled else None for age, is_sampled in zip(ages, mask.tolist(), strict=True)],
        advantage=_numbers(known.get(ADVANTAGES, nothing).where(is_trained, nothing)),
    )


_ROW_COLUMNS = (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS)
_UPDATE_COLUMNS = (TRAINER_LOGPROBS, IS_TRAINED_TOKEN, ADVANTAGES)


def _numbers(values: Tensor) -> list[float | None]:
    """The values, rounded to NUM_DECIMALS, which takes less space; None for NaN and infinity."""
    rounded = values.double().masked_fill(values.isinf(), math.nan).round(decimals=NUM_DECIMALS)
    return [None if each != each else each for each in rounded.tolist()]  # NaN differs from itself.

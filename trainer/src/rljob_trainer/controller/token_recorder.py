"""Chooses a few conversations of each step and of each evaluation, and has the workers write their tokens into the run
folder (see `workers/recorded_tokens`). The tokens do not pass through the controller.

Legend: B responses, R rows of these responses, P rows of a batch for the workers, S conversations that are recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.rollout import TOKEN_COLUMNS, Rollout
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.errors import described
from rljob_trainer.observability.samples import (
    MAX_TRAINING_SAMPLE_TOKENS,
    MAX_TRAINING_SAMPLES,
    MIN_TRAINING_SAMPLES,
    SampleKind,
)
from rljob_trainer.observability.token_files import (
    EVALUATION_TOKENS,
    MAX_CONVERSATIONS,
    MAX_PROMPT_CHARACTERS,
    TRAINING_TOKENS,
    token_file,
)
from rljob_trainer.workers.columns import (
    GROUPS,
    NUM_ROWS,
    NUM_TOKENS,
    OUTCOMES,
    PROMPT_TEXTS,
    RECORDED_INDEX,
    SAMPLE_IDS,
    SCORES,
)
from rljob_trainer.workers.protocols import ActorGroup, HybridGroup
from rljob_trainer.workers.recorded_tokens import EVALUATIONS, KINDS

log = logging.getLogger(__name__)


def recorded_responses(rollout: Rollout) -> torch.Tensor:
    """Returns int64: the responses of a step that `samples.jsonl` has."""
    responses = rollout.first_groups(MIN_TRAINING_SAMPLES, MAX_TRAINING_SAMPLES)
    tokens_R = rollout.rows[NUM_TOKENS]
    num_tokens = tokens_R[longest_rows(rollout.batch[NUM_ROWS], tokens_R)[responses]]
    num_small = int((num_tokens.cumsum(0) <= MAX_TRAINING_SAMPLE_TOKENS).sum())
    return responses[: max(MIN_TRAINING_SAMPLES, num_small)]


class TokenRecorder:
    """Records tokens. It never fails a run: its first error is logged, and after that it records nothing."""

    def __init__(self, run_folder: Path, actor: ActorGroup, hybrid: HybridGroup) -> None:
        self.run_folder = run_folder
        self.actor = actor
        self.hybrid = hybrid
        self._is_recorded = False
        """Whether the current step is recorded."""
        self._marked: list[int] | None = None
        """SAMPLE_IDS of the conversations of this step that are recorded; None before `with_recorded_rows`."""
        self._has_failed = False

    def begin_step(self, *, is_recorded: bool) -> None:
        """Begins a step. If it is not recorded, `with_recorded_rows` and `step_done` do nothing."""
        self._is_recorded = is_recorded
        self._marked = None

    def with_recorded_rows(self, batch: DataProto, rows: StepRows) -> DataProto:
        """Returns the batch of a step's update with the column RECORDED_INDEX. Call it just before the update."""
        found = [batch]

        def mark() -> None:
            ids = chosen_ids(rows)
            found[0] = batch.with_columns({RECORDED_INDEX: recorded_index(ids, rows, len(batch))})
            self._marked = ids

        if self._is_recorded:
            self._attempt(mark)
        return found[0]

    def step_done(self, step: int, rollout: Rollout) -> None:
        """Records conversations of a step (from 1). Call it when the responses have their scores. `rollout`: everything
        that was generated."""
        ids = self._marked

        def record() -> None:
            ids_B: list[int] = rollout.batch[SAMPLE_IDS].tolist()
            if ids is None:
                updated, responses = DataProto(), recorded_responses(rollout)[:MAX_CONVERSATIONS]
            else:
                updated = self.actor.recorded_tokens()
                responses = torch.tensor([ids_B.index(each) for each in ids], dtype=torch.int64)
            rows = conversation_rows(rollout, responses, SampleKind.TRAIN)
            self._write(TRAINING_TOKENS, step, step - 1, rows, updated)

        if self._is_recorded:
            self._attempt(record)

    def evaluated(self, step: int, evaluation: str, rollouts: Mapping[SampleKind, Rollout]) -> None:
        """Records conversations of an evaluation after `step` steps: all responses to the first prompts."""

        def record() -> None:
            num_responses = sum(len(each.prompts) for each in rollouts.values())
            num_prompts = len(next(iter(rollouts.values())).prompts)
            num_chosen = max(1, MAX_CONVERSATIONS * num_prompts // num_responses)
            parts, num_left = [], MAX_CONVERSATIONS
            for kind, rollout in rollouts.items():
                responses = (rollout.groups_B < num_chosen).nonzero().flatten()[:num_left]
                num_left -= len(responses)
                parts.append(conversation_rows(rollout, responses, kind, evaluation))
            self._write(EVALUATION_TOKENS, step, step, DataProto.concat(parts), DataProto())

        self._attempt(record)

    def _write(self, name: str, step: int, version: int, rows: DataProto, updated: DataProto) -> None:
        path = token_file(self.run_folder, name)
        fault = self.hybrid.record_tokens(path, step, version, rows, updated)
        if fault is not None:
            self._fail(fault)

    def _attempt(self, record: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            record()
        except Exception as error:
            # If a worker has died, the next call to the workers reports it.
            self._fail(described(error))

    def _fail(self, reason: str) -> None:
        self._has_failed = True
        log.warning("tokens of conversations cannot be recorded (%s); the training continues without them", reason)


def chosen_ids(rows: StepRows) -> list[int]:
    """Returns SAMPLE_IDS of the conversations of a step: the first that `samples.jsonl` has. If the update uses none of
    them, at most half of them are kept, and the first groups that it uses are added (at least MIN_TRAINING_SAMPLES
    responses). In these groups, the responses that it uses come first."""
    generated = rows.everything or rows.rollout
    ids: list[int] = generated.batch[SAMPLE_IDS][recorded_responses(generated)[:MAX_CONVERSATIONS]].tolist()
    of_batch = rows.rollout.batch[SAMPLE_IDS][rows.drawn_B]
    used: list[int] = of_batch[rows.is_trained_B].tolist()
    if used and not set(ids) & set(used):
        is_used = torch.isin(rows.rollout.groups_B, rows.rollout.groups_B[rows.drawn_B][rows.is_trained_B])
        others = rows.rollout.selected(is_used.nonzero().flatten())
        whole_groups = others.first_groups(MIN_TRAINING_SAMPLES, len(others.groups_B))
        ids = ids[: MAX_CONVERSATIONS // 2]
        new = [each for each in others.batch[SAMPLE_IDS][whole_groups].tolist() if each not in ids]
        ids += sorted(new, key=lambda each: each not in used)
    return ids[:MAX_CONVERSATIONS]


def recorded_index(ids: list[int], rows: StepRows, num_rows: int) -> torch.Tensor:
    """Returns RECORDED_INDEX of the batch of an update with `num_rows` rows, [P]. Of a response with several rows, the
    longest is recorded."""
    numbers_P = torch.full((num_rows,), -1, dtype=torch.int16)
    positions_R = rows.own_rows(torch.arange(num_rows))
    of_batch: list[int] = rows.rollout.batch[SAMPLE_IDS][rows.drawn_B].tolist()
    longest_B = longest_rows(rows.num_rows_B, rows.tokens_R)
    for number, sample_id in enumerate(ids):
        if sample_id in of_batch:
            numbers_P[positions_R[longest_B[of_batch.index(sample_id)]]] = number
    return numbers_P


def conversation_rows(rollout: Rollout, responses: torch.Tensor, kind: SampleKind, evaluation: str = "") -> DataProto:
    """Returns the rows for `recorded_tokens.conversations_of`, [S]. `responses`: int64, of a rollout with scores."""
    rows = longest_rows(rollout.batch[NUM_ROWS], rollout.rows[NUM_TOKENS])[responses]
    batch = rollout.batch.rows(responses)
    found = (
        rollout.rows.only(TOKEN_COLUMNS)
        .rows(rows)
        .with_columns(
            {GROUPS: rollout.groups_B[responses], SCORES: batch[SCORES], OUTCOMES: batch[OUTCOMES]},
            {KINDS: [str(kind)] * len(responses), EVALUATIONS: [evaluation] * len(responses)},
        )
    )
    if PROMPT_TEXTS in batch:
        # The workers make the prompts of conversations with an environment.
        return found.union(batch.only([PROMPT_TEXTS]))
    prompts = [rollout.prompts[number].text_for_rewards[:MAX_PROMPT_CHARACTERS] for number in responses.tolist()]
    return found.with_columns(objects={PROMPT_TEXTS: prompts})


def longest_rows(num_rows_B: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """Returns [B] int64: the number of each response's longest row; the first of several."""
    firsts_B = num_rows_B.cumsum(0) - num_rows_B
    if len(tokens_R) == len(num_rows_B):
        return firsts_B
    parts = torch.split_with_sizes(tokens_R, num_rows_B.tolist())
    return firsts_B + torch.tensor([int(part.argmax()) for part in parts])

"""The finished groups of a step that a stop interrupts: saved for the next attempt, which then does not generate them
again (`checkpoint.keepFinishedGroups`).

Only responses are saved. Their scores are computed again, because the signal that stops the trainer may also have
reached processes that a reward has started.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic import JsonValue

from rljob_api.base import WireModel
from rljob_api.constants import CONTRACT_VERSION
from rljob_api.contract_documents import TrainerJob
from rljob_api.scalars import Count, Flag, PositiveCount
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.layout import read_sealed, seal
from rljob_trainer.checkpoints.storage import durable_file, make_folder, storage_errors, write_all
from rljob_trainer.controller.sampler import Ticket
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import TrainerError
from rljob_trainer.workers.columns import (
    HAS_ENGINE_ERROR,
    IS_TRUNCATED,
    NUM_TOKENS,
    PLAIN_RESPONSE_TEXTS,
    POLICY_VERSIONS,
    PROMPT_LENGTHS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    TOKENS,
)

log = logging.getLogger(__name__)

FILE_NAME = "finished-groups.json"
"""File name in the folder of the checkpoints."""
COLUMNS = (
    *(TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS),
    *(SAMPLE_IDS, IS_TRUNCATED, PROMPT_LENGTHS, RESPONSE_LENGTHS, RESPONSE_TEXTS, PLAIN_RESPONSE_TEXTS),
)
"""The columns from which the rows can be made again."""


class SavedRow(WireModel):
    """A row of a response. Numbers per token are base64 of little-endian int32 or float32, or of bytes 0 and 1."""

    response: Count
    """The number of the response in its group. The rows of a response follow each other."""
    token_ids: str
    mask: str
    logprobs: str
    """Of the tokens that the mask marks."""
    policy_versions: str
    """Of the tokens that the mask marks."""
    prompt_length: Count
    response_length: Count
    text: str
    plain_text: str
    is_truncated: Flag


class SavedGroup(WireModel):
    """The responses to one prompt."""

    ordinal: Count
    number: Count
    prompt: str
    """Token ids of the prompt, as in SavedRow: another dataset may have another prompt at the same place."""
    rows: tuple[SavedRow, ...]


class SavedGroups(WireModel):
    """Content of the file."""

    contract_version: PositiveCount
    job_name: str
    checkpoint: str
    """Folder name of the newest checkpoint at the stop; empty if there was none. Only an attempt that resumes from this
    checkpoint uses the groups."""
    step: Count
    """The step that issued the groups, from 0."""
    settings: dict[str, JsonValue]
    """The settings that the responses depend on: the sampling settings, `group_size` and `seed`."""
    groups: tuple[SavedGroup, ...]


@dataclass(frozen=True)
class _Rows:
    """The rows of the responses of a group."""

    ticket: Ticket
    prompt: PromptRow
    batch: DataProto


class FinishedGroups:
    """The finished groups of the current step, and those that an earlier attempt has saved."""

    def __init__(
        self,
        folder: Path,
        job_name: str,
        model: Mapping[str, JsonValue],
        sampling: SamplingSettings,
        group_size: int,
        seed: int,
    ) -> None:
        """`folder` has the checkpoints. `model`: the job's block, because before the first checkpoint a changed job has
        other weights."""
        self.path = folder / FILE_NAME
        self.job_name = job_name
        self.settings: dict[str, JsonValue] = {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(sampling).items()},
            "group_size": group_size,
            "seed": seed,
            "model": dict(model),
        }
        self._step: list[_Rows] = []
        self._saved: dict[Ticket, SavedGroup] = {}

    @staticmethod
    def of(job: TrainerJob, folder: Path, plan: StepPlan) -> FinishedGroups | None:
        """Returns None if the job does not keep finished groups."""
        if not job.spec.checkpoint.keep_finished_groups:
            return None
        model = job.spec.training.model.model_dump(mode="json")
        return FinishedGroups(folder, job.name, model, plan.sampling, plan.group_size, plan.seed)

    def begin_step(self) -> None:
        """Drops the groups of the previous step."""
        self._step.clear()

    def add(self, ticket: Ticket, prompt: PromptRow, batch: DataProto) -> None:
        """Adds a finished group of this step; `batch`: the rows of its responses."""
        self._step.append(_Rows(ticket, prompt, batch.only(COLUMNS)))

    def take(self, ticket: Ticket, prompt: PromptRow) -> DataProto | None:
        """Returns the columns of a rollout of the group, if an earlier attempt has saved it for the same prompt.
        SAMPLE_IDS are the numbers of the responses in the group. Each group can be taken once."""
        group = self._saved.pop(ticket, None)
        return _columns(group.rows) if group is not None and group.prompt == _encoded_prompt(prompt) else None

    def save(self, checkpoint: str, step: int) -> None:
        """Saves the finished groups of step `step`; `checkpoint` is the folder name of the newest checkpoint. If this
        fails, only logs a warning, because the next attempt can generate the responses again."""
        if not self._step:
            return
        try:
            saved = SavedGroups(
                contract_version=CONTRACT_VERSION,
                job_name=self.job_name,
                checkpoint=checkpoint,
                step=step,
                settings=self.settings,
                groups=tuple(map(_saved_group, self._step)),
            )
            with storage_errors(self.path.parent, "saving finished groups"):
                make_folder(self.path.parent)
                with durable_file(self.path) as descriptor:
                    write_all(descriptor, seal(saved)[0])
        except TrainerError as error:
            log.warning("could not save the %d finished groups of step %d: %s", len(self._step), step + 1, error)
        else:
            log.info("saved the %d finished groups of step %d", len(self._step), step + 1)

    def load(self, checkpoint: str, step: int) -> None:
        """Reads the groups that an earlier attempt has saved. Ignores them if the job's name, the checkpoint, the step
        or the settings differ. `checkpoint`: folder name of the checkpoint from which this attempt has resumed, at step
        `step`; empty if there is none."""
        if not self.path.exists():
            return
        try:
            saved, _ = read_sealed(self.path, SavedGroups)
        except DamagedError as error:
            log.warning("%s: finished groups are not used: %s", self.path, error)
            return
        for name, found, expected in (
            ("job", saved.job_name, self.job_name),
            ("checkpoint", saved.checkpoint, checkpoint),
            ("step", saved.step, step),
            ("settings", saved.settings, self.settings),
        ):
            if found != expected:
                log.info(
                    "%s: finished groups are not used, because they are of another %s (in the file: %s, now: %s)",
                    *(self.path, name, found, expected),
                )
                return
        self._saved = {Ticket(each.ordinal, step, each.number): each for each in saved.groups}
        log.info("step %d: using %d finished groups of the last attempt", step + 1, len(self._saved))

    def end_step(self) -> None:
        """Forgets the groups after their step is done, and removes the file. If this fails, only logs a warning,
        because no later step uses the file."""
        self._saved.clear()
        self._step.clear()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: finished groups cannot be removed: %s", self.path, error.strerror)


def _saved_group(group: _Rows) -> SavedGroup:
    """The rows of a group; reads them from the workers. Raises TrainerError."""
    rows = group.batch.fetched()
    _, numbers = torch.unique_consecutive(rows[SAMPLE_IDS], return_inverse=True)
    tokens, masks, logprobs, versions = (
        rows.ragged_column(name).row_tensors() for name in (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS)
    )
    texts, plain_texts = map(rows.object_column, (RESPONSE_TEXTS, PLAIN_RESPONSE_TEXTS))
    saved = tuple(
        SavedRow(
            response=number,
            token_ids=_encoded(tokens[row].numpy(), "<i4"),
            mask=_encoded(masks[row].numpy(), "|b1"),
            logprobs=_encoded(logprobs[row][masks[row]].numpy(), "<f4"),
            policy_versions=_encoded(versions[row][masks[row]].numpy(), "<i4"),
            prompt_length=int(rows[PROMPT_LENGTHS][row]),
            response_length=int(rows[RESPONSE_LENGTHS][row]),
            text=str(texts[row]),
            plain_text=str(plain_texts[row]),
            is_truncated=bool(rows[IS_TRUNCATED][row]),
        )
        for row, number in enumerate(numbers.tolist())
    )
    ticket = group.ticket
    return SavedGroup(ordinal=ticket.ordinal, number=ticket.number, prompt=_encoded_prompt(group.prompt), rows=saved)


def _columns(rows: Sequence[SavedRow]) -> DataProto:
    masks = [torch.from_numpy(_decoded(row.mask, "|b1").copy()) for row in rows]
    lengths = torch.tensor([len(mask) for mask in masks])
    mask = RaggedColumn(torch.cat(masks), lengths)

    def at_marked(texts: list[str], dtype: str, other: float) -> RaggedColumn:
        """A column with the decoded values at marked tokens, and `other` elsewhere."""
        found = torch.from_numpy(np.concatenate([_decoded(text, dtype) for text in texts]))
        values = torch.full((len(mask.values),), other, dtype=found.dtype)
        values[mask.values] = found
        return RaggedColumn(values, lengths)

    return DataProto(
        {
            SAMPLE_IDS: torch.tensor([row.response for row in rows]),
            RESPONSE_LENGTHS: torch.tensor([row.response_length for row in rows]),
            PROMPT_LENGTHS: torch.tensor([row.prompt_length for row in rows]),
            NUM_TOKENS: lengths,
            IS_TRUNCATED: torch.tensor([row.is_truncated for row in rows]),
            HAS_ENGINE_ERROR: torch.zeros(len(rows), dtype=torch.bool),
        },
        {
            RESPONSE_TEXTS: tuple(row.text for row in rows),
            PLAIN_RESPONSE_TEXTS: tuple(row.plain_text for row in rows),
        },
        ragged={
            TOKENS: RaggedColumn.from_rows([_decoded(row.token_ids, "<i4") for row in rows], torch.int64),
            RESPONSE_MASK: mask,
            ROLLOUT_LOGPROBS: at_marked([row.logprobs for row in rows], "<f4", 0.0),
            POLICY_VERSIONS: at_marked([row.policy_versions for row in rows], "<i4", -1),
        },
    )


def _encoded_prompt(prompt: PromptRow) -> str:
    return _encoded(np.array(prompt.token_ids), "<i4")


def _encoded(values: npt.NDArray[np.generic], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def _decoded(text: str, dtype: str) -> npt.NDArray[np.generic]:
    return np.frombuffer(base64.b64decode(text), dtype)

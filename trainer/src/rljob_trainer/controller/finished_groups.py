"""The finished groups of a step that a stop interrupts: saved for the next attempt, which then does not generate them
again (`checkpoint.keepFinishedGroups`).

Only responses are saved. Their scores are computed again, because the signal that stops the trainer may also have
reached processes that a reward has started.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from rljob_api.base import WireModel
from rljob_api.constants import CONTRACT_VERSION
from rljob_api.contract_documents import TrainerJob
from rljob_api.scalars import Count, Flag, PositiveCount
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.layout import read_sealed, seal
from rljob_trainer.checkpoints.storage import durable_file, make_folder, storage_errors, write_all
from rljob_trainer.controller.sampler import Ticket
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, SamplingSettings
from rljob_trainer.errors import TrainerError
from rljob_trainer.workers.columns import (
    IS_TRUNCATED,
    PLAIN_RESPONSE_TEXTS,
    POLICY_VERSIONS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    TOKENS,
)
from rljob_trainer.workers.rollout import rollout_columns

log = logging.getLogger(__name__)

FILE_NAME = "finished-groups.json"
"""File name in the folder of the checkpoints."""
COLUMNS = (
    *(TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS),
    *(IS_TRUNCATED, RESPONSE_TEXTS, PLAIN_RESPONSE_TEXTS),
)
"""The columns from which the responses can be made again."""


class SavedResponse(WireModel):
    """A response. Numbers per token are base64 of little-endian int32 or float32."""

    token_ids: str
    logprobs: str
    policy_versions: str
    text: str
    plain_text: str
    is_truncated: Flag


class SavedGroup(WireModel):
    """The responses to one prompt."""

    ordinal: Count
    number: Count
    prompt: str
    """Token ids of the prompt, as in SavedResponse: another dataset may have another prompt at the same place."""
    responses: tuple[SavedResponse, ...]


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
    """The responses of a group."""

    ticket: Ticket
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

    def add(self, ticket: Ticket, batch: DataProto) -> None:
        """Adds a finished group of this step; `batch`: its responses."""
        self._step.append(_Rows(ticket, batch.only(COLUMNS)))

    def take(self, ticket: Ticket, prompt: PromptRow) -> DataProto | None:
        """Returns the columns of a rollout of the group, if an earlier attempt has saved it for the same prompt. Each
        group can be taken once."""
        group = self._saved.pop(ticket, None)
        if group is None or group.prompt != _encoded(np.array(prompt.token_ids), "<i4"):
            return None
        responses = [_response(each) for each in group.responses]
        return rollout_columns([tuple(prompt.token_ids)] * len(responses), responses)

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
                groups=tuple(_saved_group(each.ticket, each.batch) for each in self._step),
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


def _saved_group(ticket: Ticket, batch: DataProto) -> SavedGroup:
    """The responses of a group; reads them from the workers. Raises TrainerError."""
    rows = batch.fetched()
    columns = [rows.ragged_column(name).row_tensors() for name in (TOKENS, ROLLOUT_LOGPROBS, POLICY_VERSIONS)]
    masks = rows.ragged_column(RESPONSE_MASK).row_tensors()
    texts = zip(*map(rows.object_column, (RESPONSE_TEXTS, PLAIN_RESPONSE_TEXTS)), strict=True)
    prompt = columns[0][0][~masks[0]].numpy()
    responses = tuple(
        SavedResponse(
            token_ids=_encoded(tokens[mask].numpy(), "<i4"),
            logprobs=_encoded(logprobs[mask].numpy(), "<f4"),
            policy_versions=_encoded(versions[mask].numpy(), "<i4"),
            text=str(text),
            plain_text=str(plain),
            is_truncated=is_truncated,
        )
        for tokens, logprobs, versions, mask, (text, plain), is_truncated in zip(
            *columns, masks, texts, rows[IS_TRUNCATED].tolist(), strict=True
        )
    )
    return SavedGroup(ordinal=ticket.ordinal, number=ticket.number, prompt=_encoded(prompt, "<i4"), responses=responses)


def _response(saved: SavedResponse) -> FinishedSequence:
    return FinishedSequence(
        request_id="",
        token_ids=tuple(_decoded(saved.token_ids, "<i4").tolist()),
        logprobs=tuple(_decoded(saved.logprobs, "<f4").tolist()),
        policy_versions=tuple(_decoded(saved.policy_versions, "<i4").tolist()),
        text=saved.text,
        plain_text=saved.plain_text,
        finish_reason=FinishReason.LENGTH if saved.is_truncated else FinishReason.STOP,
    )


def _encoded(values: npt.NDArray[np.generic], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def _decoded(text: str, dtype: str) -> npt.NDArray[np.generic]:
    return np.frombuffer(base64.b64decode(text), dtype)

"""The finished groups of a step that a stop interrupts: saved for the next attempt, which then does not generate them
again (`checkpoint.keepFinishedGroups`).

Only responses are saved. Their scores are computed again, because the signal that stops the trainer may also have
reached processes that a reward has started.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from pydantic import JsonValue

from rljob_api.base import WireModel
from rljob_api.constants import CONTRACT_VERSION
from rljob_api.contract_documents import TrainerJob
from rljob_api.scalars import Count, PositiveCount
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.checkpoints.errors import DamagedError, StorageUnavailableError
from rljob_trainer.checkpoints.layout import read_sealed, seal
from rljob_trainer.checkpoints.storage import Location, exists, storage_errors, stored, write_file
from rljob_trainer.controller.sampler import Ticket
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import TrainerError
from rljob_trainer.workers.columns import SAMPLE_IDS

log = logging.getLogger(__name__)

FILE_NAME = "finished-groups.json"
"""File name in the folder of the checkpoints."""
DTYPES = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float32: "<f4",
}
"""Tensors in the file, in NumPy's notation."""


class SavedColumn(WireModel):
    """A column of the rows of a group: `data` and `dtype`, or `objects`."""

    data: str = ""
    """Base64 of the numbers of all rows."""
    dtype: str = ""
    """One of DTYPES."""
    lengths: tuple[Count, ...] = ()
    """For a column with a value per token: the lengths of the rows."""
    objects: tuple[JsonValue, ...] = ()


class SavedGroup(WireModel):
    """The responses to one prompt."""

    ordinal: Count
    number: Count
    prompt: str
    """Digest of the prompt: another dataset may have another prompt at the same place."""
    columns: dict[str, SavedColumn]
    """Everything that the worker returned; SAMPLE_IDS are the numbers of the responses in the group."""


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
        folder: Location,
        job_name: str,
        blocks: Mapping[str, JsonValue],
        sampling: SamplingSettings,
        group_size: int,
        seed: int,
    ) -> None:
        """`folder` has the checkpoints. `blocks`: blocks of the job that the responses depend on, by name: the model,
        because before the first checkpoint a changed job has other weights, and the environment."""
        self.path = folder / FILE_NAME
        self.job_name = job_name
        self.settings: dict[str, JsonValue] = {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(sampling).items()},
            "group_size": group_size,
            "seed": seed,
            **blocks,
        }
        self._step: list[_Rows] = []
        self._saved: dict[Ticket, SavedGroup] = {}
        self._may_have_file = True
        """False if there is certainly no file: a request to a bucket in each step would be too slow."""

    @staticmethod
    def of(job: TrainerJob, folder: Location, plan: StepPlan) -> FinishedGroups | None:
        """Returns None if the job does not keep finished groups."""
        if not job.spec.checkpoint.keep_finished_groups:
            return None
        training = job.spec.training
        blocks: dict[str, JsonValue] = {"model": training.model.model_dump(mode="json")}
        if training.environment is not None:
            blocks["environment"] = training.environment.model_dump(mode="json")
        return FinishedGroups(folder, job.name, blocks, plan.sampling, plan.group_size, plan.seed)

    def begin_step(self) -> None:
        """Drops the groups of the previous step."""
        self._step.clear()

    def add(self, ticket: Ticket, prompt: PromptRow, batch: DataProto) -> None:
        """Adds a finished group of this step; `batch`: the rows of its responses."""
        self._step.append(_Rows(ticket, prompt, batch))

    def take(self, ticket: Ticket, prompt: PromptRow) -> DataProto | None:
        """Returns the columns of a rollout of the group, if an earlier attempt has saved it for the same prompt.
        SAMPLE_IDS are the numbers of the responses in the group. Each group can be taken once."""
        group = self._saved.pop(ticket, None)
        return _columns(group.columns) if group is not None and group.prompt == _digest(prompt) else None

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
                stored(self.path.parent).make_folder()
                write_file(self.path, seal(saved)[0])
                self._may_have_file = True
        except TrainerError as error:
            log.warning("could not save the %d finished groups of step %d: %s", len(self._step), step + 1, error)
        else:
            log.info("saved the %d finished groups of step %d", len(self._step), step + 1)

    def load(self, checkpoint: str, step: int) -> None:
        """Reads the groups that an earlier attempt has saved. Ignores them if the job's name, the checkpoint, the step
        or the settings differ. `checkpoint`: folder name of the checkpoint from which this attempt has resumed, at step
        `step`; empty if there is none."""
        try:
            if not exists(self.path):
                return
            saved, _ = read_sealed(self.path, SavedGroups)
        except (DamagedError, StorageUnavailableError) as error:
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
        if not self._may_have_file:
            return
        try:
            stored(self.path).remove()
            self._may_have_file = False
        except (OSError, StorageUnavailableError) as error:
            log.warning("%s: finished groups cannot be removed: %s", self.path, error)


def _saved_group(group: _Rows) -> SavedGroup:
    """The rows of a group; reads them from the workers. Raises TrainerError."""
    rows = group.batch.fetched()
    _, numbers = torch.unique_consecutive(rows[SAMPLE_IDS], return_inverse=True)
    rows = rows.with_columns({SAMPLE_IDS: numbers})
    columns = {
        **{name: _saved_tensor(tensor) for name, tensor in rows.tensors.items()},
        **{name: _saved_tensor(column.values, column.lengths) for name, column in rows.ragged.items()},
        **{name: SavedColumn(objects=_as_json(column)) for name, column in rows.objects.items()},
    }
    ticket = group.ticket
    return SavedGroup(ordinal=ticket.ordinal, number=ticket.number, prompt=_digest(group.prompt), columns=columns)


def _saved_tensor(values: torch.Tensor, lengths: torch.Tensor | None = None) -> SavedColumn:
    dtype = DTYPES[values.dtype]
    data = base64.b64encode(values.numpy().astype(dtype).tobytes()).decode()
    return SavedColumn(data=data, dtype=dtype, lengths=() if lengths is None else tuple(lengths.tolist()))


def _as_json(column: Sequence[object]) -> tuple[JsonValue, ...]:
    """The objects as JSON has them, where tuples are lists."""
    values: list[JsonValue] = json.loads(json.dumps(list(column)))
    return tuple(values)


def _columns(columns: Mapping[str, SavedColumn]) -> DataProto:
    tensors: dict[str, torch.Tensor] = {}
    ragged: dict[str, RaggedColumn] = {}
    objects: dict[str, tuple[object, ...]] = {}
    for name, column in columns.items():
        if not column.dtype:
            objects[name] = column.objects
            continue
        values = torch.from_numpy(np.frombuffer(base64.b64decode(column.data), column.dtype).copy())
        if column.lengths:
            ragged[name] = RaggedColumn(values, torch.tensor(column.lengths))
        else:
            tensors[name] = values
    return DataProto(tensors, objects, ragged=ragged)


def _digest(prompt: PromptRow) -> str:
    """SHA-256 of the prompt's tokens and text; with an environment of all columns."""
    digest = hashlib.sha256(array("q", prompt.token_ids).tobytes())
    digest.update((prompt.content or prompt.source_prompt).encode(errors="surrogatepass"))
    return digest.hexdigest()

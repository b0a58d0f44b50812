"""What the controller itself must remember between attempts; everything else is in the tensors of a checkpoint."""

from __future__ import annotations

from pydantic import JsonValue, ValidationError

from rljob_api.base import WireModel
from rljob_api.scalars import Count, Flag, NonNegativeNumber
from rljob_api.tolerant_reading import CHECKPOINT, read_document
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.layout import Manifest, tell_unknown
from rljob_trainer.controller.auto_settings import AutoSettings
from rljob_trainer.datasets.cursor import CursorState


class ControllerState(WireModel):
    """After `step` training steps."""

    job_name: str
    step: Count
    """Also the policy version."""
    cursor: CursorState
    random_states: tuple[JsonValue, ...]
    """One per worker; used where the number of workers is the same. All sampling is seeded by step anyway."""
    is_evaluated: Flag = True
    """Whether the evaluation that may be due after this step is done; a stop can come before it."""
    kl_coefficient: NonNegativeNumber | None = None
    """Of the next step, where a controller changes it; else the job's is."""
    choices: AutoSettings | None = None
    """What the job's `Auto` stood for."""


def state_of(manifest: Manifest) -> ControllerState:
    """The controller's part of a checkpoint, which another version may have written. Raises CheckpointError when it is
    not there or not readable."""
    try:
        reading = read_document(ControllerState, manifest.extra, CHECKPOINT)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise CheckpointError(
            f"checkpoint of step {manifest.step}: its state cannot be read ({problem['loc']}: {problem['msg']}); "
            "it was written by another program or version"
        ) from error
    tell_unknown("the checkpoint's state", reading.unknown_fields)
    return reading.value

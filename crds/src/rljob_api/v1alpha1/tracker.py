"""Trackers: services such as W&B and MLflow that keep and show the metrics of many runs."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import Path, rule
from rljob_api.scalars import ShortText, UrlWithoutUser


class TrackerType(StrEnum):
    """Kind of tracker."""

    WANDB = "WandB"
    MLFLOW = "MLflow"


class WandbMode(StrEnum):
    """Online: sends to the server. Offline: files for `wandb sync`."""

    ONLINE = "Online"
    OFFLINE = "Offline"


class WandbTracker(WireModel):
    """Settings of W&B."""

    project: ShortText = "rljob"
    entity: ShortText | None = None
    """Team or user; when unset, WANDB_API_KEY's owner.

    For a server of your own, set the variable WANDB_BASE_URL."""
    mode: WandbMode = WandbMode.ONLINE


class MlflowTracker(WireModel):
    """Settings of MLflow."""

    tracking_uri: UrlWithoutUser | None = None
    """When unset: MLFLOW_TRACKING_URI, or `mlruns/` of the run folder.

    For a user and a password, set the variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    experiment: ShortText = "rljob"


class Tracker(WireModel):
    """A tracker.

    Its settings are in the block of its type; without the block they have their defaults."""

    type: TrackerType
    wandb: WandbTracker | None = None
    mlflow: MlflowTracker | None = None


def _other_blocks(tracker: Tracker) -> list[Path]:
    """Paths of the blocks that do not belong to the tracker's type."""
    blocks = {TrackerType.WANDB: tracker.wandb, TrackerType.MLFLOW: tracker.mlflow}
    return [(kind.lower(),) for kind, block in blocks.items() if block is not None and kind is not tracker.type]


TRACKER_RULES = (
    rule(
        Tracker,
        "Tracker.blocks",
        field="",
        cel="!has(self.wandb) && self.type == 'MLflow' || !has(self.mlflow) && self.type == 'WandB'",
        wrong="a block of another type would be ignored",
        advice="remove it, or change type",
        holds=lambda tracker: not _other_blocks(tracker),
        fault_paths=_other_blocks,
    ),
)

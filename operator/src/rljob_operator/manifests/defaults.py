"""What the installer decides for all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Defaults:
    """Used where a job says nothing, and for what no job may say."""

    trainer_image: str | None
    ray_version: str
    image_pull_policy: str
    operator_namespace: str
    operator_pod_labels: Mapping[str, str]
    """By these the network policy of a job lets the operator in."""

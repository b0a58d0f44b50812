"""Defaults that the operator's settings give for all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_api.constants import MIN_RAY_VERSION
from rljob_api.job_checks import is_ray_new_enough
from rljob_operator.errors import SettingsError
from rljob_operator.settings import JobNetworkPolicy


@dataclass(frozen=True)
class Defaults:
    """Values for fields that a job leaves unset or cannot set. Raises SettingsError if the Ray version is too old."""

    trainer_image: str | None
    ray_version: str
    image_pull_policy: str
    operator_namespace: str
    operator_pod_labels: Mapping[str, str]
    """Labels of the operator's pods; each job's network policy admits pods with these labels."""
    allowed_label_prefixes: tuple[str, ...] = ()
    """Beginnings of the label keys that a job may set in `spec.scheduling.labels`; each contains a slash."""
    service_account_names: tuple[str, ...] = ()
    """Names that a job may use as `spec.serviceAccountName`."""
    run_as_user: int | None = 1000
    """User of all containers of jobs, and group of the files on their volumes (`fsGroup`); None to leave both to the
    cluster."""
    network_policy: JobNetworkPolicy = field(default_factory=JobNetworkPolicy)
    """The installer's part of each job's network policy."""

    def __post_init__(self) -> None:
        if not is_ray_new_enough(self.ray_version):
            raise SettingsError(
                f"the default Ray version (RLJOB_OPERATOR_RAY_VERSION): must be at least {MIN_RAY_VERSION}, such as"
                f" 2.60.0 (seen: {self.ray_version!r}); set the chart's trainer.image to an image with a newer Ray, and"
                " trainer.rayVersion to the version of that Ray"
            )

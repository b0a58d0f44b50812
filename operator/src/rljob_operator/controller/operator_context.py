"""The objects that all reconcile passes of one operator process share, such as clients, cache, settings and clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rljob_operator.kube.allowed_calls import KubeObjects
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.errors import UnavailableError
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.metrics import Metrics
from rljob_operator.settings import Settings
from rljob_operator.workqueue import Slots


@dataclass(frozen=True)
class OperatorContext:
    """The objects that all reconcile passes of one operator process share."""

    objects: KubeObjects
    """Client for the API server."""
    cache: ObjectCache
    settings: Settings
    defaults: Defaults
    """Defaults for the manifests of jobs, such as the trainer's image."""
    slots: Slots
    """Limit of passes at the same time. A pass frees its slot during slow requests."""
    metrics: Metrics
    clock: ServerClock
    may_act: Callable[[], bool]
    """Returns whether this replica is certainly still the leader."""

    def require_leadership(self) -> None:
        """Raises UnavailableError if another replica may be the leader now. Must be called right before each write of
        an object that belongs to a job."""
        if not self.may_act():
            raise UnavailableError("this replica has not renewed its lease in time; another replica may be the leader")

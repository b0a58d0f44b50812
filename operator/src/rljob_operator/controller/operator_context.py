"""What all reconcile passes of one operator process share: clients, cache, settings, metrics and clock."""

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
    """Clients, cache, settings, metrics and clock of one operator process."""

    objects: KubeObjects
    cache: ObjectCache
    settings: Settings
    defaults: Defaults
    slots: Slots
    metrics: Metrics
    clock: ServerClock
    may_act: Callable[[], bool]
    """Whether this replica is certainly still the leader."""

    def require_leadership(self) -> None:
        """Must be called right before each write. Raises UnavailableError if another replica may be the leader now."""
        if not self.may_act():
            raise UnavailableError("this replica has not renewed its lease in time; another replica may be the leader")

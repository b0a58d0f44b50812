"""What all passes of one process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.errors import UnavailableError
from rljob_operator.kube.objects import KubeObjects
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.metrics import Metrics
from rljob_operator.settings import Settings
from rljob_operator.workqueue import Slots


@dataclass(frozen=True)
class Surroundings:
    """The outside, what is known of it, and what the installer decided."""

    objects: KubeObjects
    cache: ObjectCache
    settings: Settings
    defaults: Defaults
    slots: Slots
    metrics: Metrics
    clock: ServerClock
    may_act: Callable[[], bool]
    """Whether this replica still leads for sure."""

    def require_leadership(self) -> None:
        """Asked right before each write. Raises UnavailableError where another replica may lead by now."""
        if not self.may_act():
            raise UnavailableError("this replica has not renewed its lease in time; another one may lead")

"""Models of the Kubernetes objects that the client reads; unknown fields are ignored."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from rljob_api.constants import HEAD_GROUP, LABEL_ATTEMPT, LABEL_POOL

Json = dict[str, object]


class _Part(BaseModel):
    """Base model: reads the declared fields of an object and ignores others."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)


class OwnerReference(_Part):
    """The object to which another one belongs."""

    uid: str = ""


class ObjectMeta(_Part):
    """Metadata of any object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: datetime
    deletion_timestamp: datetime | None = None
    owner_references: tuple[OwnerReference, ...] = ()


class Waiting(_Part):
    """Why a container is not running yet."""

    reason: str = "Waiting"
    message: str = ""


class Terminated(_Part):
    """How a container terminated."""

    reason: str = "Terminated"
    message: str = ""
    exit_code: int = 0


class ContainerState(_Part):
    """The state of a container; at most one of the three fields is set."""

    waiting: Waiting | None = None
    running: dict[str, object] | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Part):
    """The status of one container of a pod."""

    name: str
    ready: bool = False
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()

    @property
    def has_started(self) -> bool:
        """Whether the container has a log: it is running or has terminated, now or before a restart."""
        states = (self.state, self.last_state)
        return any(state.running is not None or state.terminated is not None for state in states)


class PodCondition(_Part):
    """A condition of a pod."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class PodStatus(_Part):
    """The status of a pod."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    conditions: tuple[PodCondition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(_Part):
    """A pod of a job."""

    metadata: ObjectMeta
    status: PodStatus = PodStatus()

    @property
    def group(self) -> str:
        """The name of the pod's pool, or `constants.HEAD_GROUP` for the head pod; `?` without the label."""
        if self.metadata.labels.get("ray.io/node-type") == "head":
            return HEAD_GROUP
        return self.metadata.labels.get(LABEL_POOL, "?")

    @property
    def cluster(self) -> str | None:
        """Name of the pod's RayCluster, from KubeRay's label; None without the label."""
        return self.metadata.labels.get("ray.io/cluster")

    @property
    def attempt(self) -> str:
        """Number of the attempt for which the pod's RayCluster was created; `?` without the label."""
        return self.metadata.labels.get(LABEL_ATTEMPT, "?")

    @property
    def is_ready(self) -> bool:
        """Whether the pod's condition Ready is True."""
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.status.conditions)

    def container(self, name: str) -> ContainerStatus | None:
        """The status of a container, except for init containers; None before the kubelet has reported it."""
        return next((status for status in self.status.container_statuses if status.name == name), None)


class _Series(_Part):
    count: int = 0
    last_observed_time: datetime | None = None


class InvolvedObject(_Part):
    """The object of an event."""

    kind: str = ""
    name: str = ""


class Event(_Part):
    """A Kubernetes event."""

    metadata: ObjectMeta
    involved_object: InvolvedObject = InvolvedObject()
    type: str = ""
    reason: str = ""
    message: str = ""
    count: int | None = None
    last_timestamp: datetime | None = None
    event_time: datetime | None = None
    series: _Series | None = None

    @property
    def seen(self) -> datetime:
        """When the event last happened. Event recorders of different API versions set different fields."""
        newest = self.series.last_observed_time if self.series else None
        return newest or self.last_timestamp or self.event_time or self.metadata.creation_timestamp

    @property
    def times(self) -> int:
        """How often the event happened."""
        return (self.series.count if self.series else None) or self.count or 1


class RefusalCause(_Part):
    """A field that the API server rejected, and why."""

    field: str = ""
    message: str = ""


class RefusalDetails(_Part):
    """The object that a rejected request was about."""

    kind: str = ""
    name: str = ""
    causes: tuple[RefusalCause, ...] = ()


class Refusal(_Part):
    """The API server's `Status` object: why it rejected a request."""

    reason: str = ""
    message: str = ""
    details: RefusalDetails = RefusalDetails()

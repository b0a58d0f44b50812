"""A controller and its API server in the memory of this process.

A test changes objects between two reconcile passes, or without telling the cache. The tests use a job called `job`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import cast

from rljob_operator.controller.effect_executor import EffectExecutor
from rljob_operator.controller.observe import Observer
from rljob_operator.controller.operator_context import OperatorContext
from rljob_operator.controller.reconcile_loop import JobKey, ReconcileLoop
from rljob_operator.handlers.relist import Relist
from rljob_operator.handlers.watch_events import WatchEventRouter
from rljob_operator.kube.allowed_calls import JOBS, NETWORK_POLICIES, PODS, KubeObjects, Listing, ResourceType
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError, RefusedError
from rljob_operator.kube.server_history import ServerHistory
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, object_at, text_at
from rljob_operator.ray.client import RayClient
from rljob_operator.settings import Settings, parse_settings
from rljob_operator.workqueue import Slots, WorkQueue
from rljob_testing.operator import manual_clock
from rljob_testing.operator.testbed import cluster_job

Json = dict[str, object]
NAMESPACE = "team"
KEY = JobKey("team", "job")
CREATED = ["create secrets", "create networkpolicies", "create rayclusters"]
LIVE_READS = ["get rljobs", "list rayclusters", "list pods"]
"""Requests that are made before an action that cannot be undone."""


class FakeApi:
    """Replaces `KubeObjects` without requests. `errors` has the error that a call raises, by method and kind: `list_all
    pods`."""

    def __init__(self) -> None:
        self.objects: dict[tuple[ResourceType, str], Json] = {}
        self.errors: dict[str, KubeError] = {}
        self.calls: list[str] = []
        self.stored: Callable[[JsonObject], JsonObject] = lambda raw: raw
        """Changes an object before it is stored, as a definition that drops unknown fields does."""
        self.interrupted = ""
        """A method and a kind, as in `delete rljobs`: before the next such call, `in_between` runs once, as a
        concurrent client."""
        self.in_between: Callable[[], object] = lambda: None
        self.version = 100
        """The newest resource version."""

    def put(self, kind: ResourceType, raw: JsonObject) -> Json:
        """Stores an object with a new resourceVersion."""
        self.version += 1
        made: Json = copy.deepcopy(dict(self.stored(raw)))
        metadata = made["metadata"]
        assert isinstance(metadata, dict)
        metadata.setdefault("namespace", NAMESPACE)
        metadata.setdefault("uid", f"uid-{self.version}")
        metadata["resourceVersion"] = str(self.version)
        self.objects[kind, metadata["name"]] = made
        return made

    async def get(self, kind: ResourceType, _: str, name: str) -> JsonObject:
        self._call("get", kind)
        if (kind, name) not in self.objects:
            raise NotFoundError(f"{kind.plural} {name}")
        return copy.deepcopy(self.objects[kind, name])

    async def list_all(
        self, kind: ResourceType, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> tuple[JsonObject, ...]:
        return (await self.listing(kind, namespace, labels=labels, fields=fields)).items

    async def listing(self, kind: ResourceType, _: str | None, *, labels: str = "", fields: str = "") -> Listing:
        assert not fields
        self._call("list", kind)
        found = [raw for (each, _), raw in self.objects.items() if each == kind and _has_labels(raw, labels)]
        return Listing(tuple(copy.deepcopy(found)), str(self.version))

    async def pages(
        self,
        kind: ResourceType,
        namespace: str | None,
        *,
        labels: str = "",
        fields: str = "",
        only_metadata: bool = False,
    ) -> AsyncIterator[Listing]:
        if fields:
            raise RefusedError(f"field label not supported: {fields}")
        assert only_metadata == (kind == NETWORK_POLICIES)
        yield await self.listing(kind, namespace, labels=labels)

    async def create(self, kind: ResourceType, namespace: str, manifest: JsonObject) -> bool:
        try:
            await self.create_strictly(kind, namespace, manifest)
        except AlreadyExistsError:
            return False
        return True

    async def create_strictly(self, kind: ResourceType, _: str, manifest: JsonObject) -> JsonObject:
        self._call("create", kind)
        name = text_at(manifest, "metadata", "name")
        if (kind, name) in self.objects:
            raise AlreadyExistsError(name)
        return copy.deepcopy(self.put(kind, manifest))

    async def apply(self, kind: ResourceType, _: str, name: str, manifest: JsonObject) -> None:
        self._call("apply", kind)
        assert text_at(manifest, "metadata", "name") == name
        self.put(kind, manifest)

    async def patch_job_status(
        self, _: str, name: str, patch: Mapping[str, object], resource_version: str
    ) -> JsonObject:
        self._call("patch", JOBS)
        job = self.objects[JOBS, name]
        if text_at(job, "metadata", "resourceVersion") != resource_version:
            raise ConflictError(name)
        status = job.get("status", {})
        assert isinstance(status, dict)
        return copy.deepcopy(self.put(JOBS, {**job, "status": _merged(status, patch)}))

    async def delete(self, kind: ResourceType, _: str, name: str, uid: str, version: str = "") -> bool:
        self._call("delete", kind)
        found = self.objects.get((kind, name), {})
        if text_at(found, "metadata", "uid") != uid:
            return False
        if version and text_at(found, "metadata", "resourceVersion") != version:
            raise ConflictError(name)
        del self.objects[kind, name]
        return True

    def _call(self, verb: str, kind: ResourceType) -> None:
        what = f"{verb} {kind.plural}"
        self.calls.append(what)
        if what in self.errors:
            raise self.errors[what]
        if what == self.interrupted:
            self.interrupted = ""
            self.in_between()


class RecordingQueue(WorkQueue[JobKey]):
    """A work queue that records the delay until each key is due."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.5, lambda key: key.namespace)
        self.planned: dict[JobKey, float] = {}

    def add_after(self, key: JobKey, seconds: float) -> None:
        """Adds the key and records the delay."""
        self.planned[key] = min(seconds, self.planned.get(key, seconds))
        super().add_after(key, seconds)


class ControllerOnFakeApi:
    """A controller with an API server in memory, and the controller's cache."""

    def __init__(self, settings: Settings) -> None:
        self.api = FakeApi()
        self.clock = manual_clock.synchronized_clock()
        self.cache = ObjectCache((None,))
        self.metrics = Metrics()
        self.queue = RecordingQueue()
        self.leads = True
        defaults = Defaults(
            *("example/trainer:1", "2.60.0", "IfNotPresent", "rljob-system", {"app": "rljob"}),
            network_policy=settings.job_network_policy,
        )
        shared = OperatorContext(
            cast(KubeObjects, self.api),
            self.cache,
            settings,
            defaults,
            Slots(1),
            self.metrics,
            self.clock.clock,
            lambda: self.leads,
        )
        self._ray = RayClient(self.metrics)
        self.observer = Observer(shared, self._ray, self.clock.ages)
        self.executor = EffectExecutor(shared)
        self.controller = ReconcileLoop(self.queue, self.observer, self.executor, shared)
        events = WatchEventRouter(self.cache, self.queue, self.clock.clock)
        self.history = ServerHistory(self.cache)
        ages, objects = self.clock.ages, shared.objects
        self._relist = Relist(objects, (None,), self.cache, ages, events, lambda: None, self.metrics, self.history)

    async def close(self) -> None:
        """Closes the queue and the Ray client."""
        self.queue.close()
        await self._ray.__aexit__(None, None, None)

    def submit(self, name: str, edits: Mapping[str, object] | None = None) -> JobKey:
        """Stores a job as the API server has it after its creation."""
        wire = cluster_job(name, edits)
        metadata = {"name": name, "uid": f"uid-of-{name}", "generation": 1, "creationTimestamp": "2026-01-31T12:00:00Z"}
        self.api.put(JOBS, {**wire, "metadata": metadata})
        return JobKey(NAMESPACE, name)

    async def relist(self) -> None:
        """Fills the cache with all objects."""
        await self._relist.once()
        self.api.calls.clear()

    async def reconcile(self, key: JobKey, number: int) -> list[str]:
        """Runs this number of reconcile passes and returns their requests to the API server."""
        self.api.calls.clear()
        for _ in range(number):
            self.queue.planned.clear()
            await self.controller.work(key)
        return list(self.api.calls)

    def status(self, name: str) -> Json:
        """The stored status of a job."""
        status = self.api.objects[JOBS, name].get("status", {})
        assert isinstance(status, dict)
        return status

    def condition(self, name: str, kind: str) -> str:
        """The reason of a condition; empty if the job does not have it."""
        conditions = self.status(name).get("conditions", [])
        assert isinstance(conditions, list)
        return next((str(each["reason"]) for each in conditions if each["type"] == kind), "")


def controller_settings(folder: Path) -> Settings:
    """Settings of an operator whose token key is in `folder`, where it is created."""
    (folder / "key").write_bytes(b"0123456789abcdef")
    return parse_settings(
        {
            "RLJOB_OPERATOR_RAY_VERSION": "2.60.0",
            "RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": str(folder),
            "RLJOB_OPERATOR_POD_NAME": "operator-0",
            "RLJOB_OPERATOR_POD_NAMESPACE": "rljob-system",
        }
    )


def run_controller(settings: Settings, test: Callable[[ControllerOnFakeApi], Coroutine[None, None, None]]) -> None:
    """Runs a test with a controller whose cache is empty."""

    async def made() -> None:
        world = ControllerOnFakeApi(settings)
        try:
            await test(world)
        finally:
            await world.close()

    asyncio.run(made())


async def start_first_attempt(world: ControllerOnFakeApi) -> None:
    """Creates a job and its first attempt."""
    world.submit("job")
    await world.relist()
    await world.reconcile(KEY, 1)


async def start_until_pods_pending(world: ControllerOnFakeApi) -> None:
    """Creates a job whose cluster exists and is in the cache."""
    await start_first_attempt(world)
    await world.reconcile(KEY, 1)
    await world.relist()
    await world.reconcile(KEY, 1)
    assert world.condition("job", "ClusterReady") == "PodsPending"


def condition_message(world: ControllerOnFakeApi, kind: str) -> str:
    """The message of a condition of the job."""
    conditions = world.status("job")["conditions"]
    assert isinstance(conditions, list)
    return next(str(each["message"]) for each in conditions if each["type"] == kind)


def writing_calls(calls: list[str]) -> list[str]:
    """The calls that change something, except the creation of events."""
    return [call for call in calls if call.split()[0] not in ("get", "list") and call != "create events"]


def _has_labels(raw: JsonObject, selector: str) -> bool:
    """Whether an object matches a selector of `name=value` and `name` terms, or of one `name in (values)` term."""
    labels = object_at(raw, "metadata", "labels")
    name, is_set, values = selector.partition(" in ")
    if is_set:
        return labels.get(name) in values.strip("()").split(",")
    wanted = (each.partition("=") for each in selector.split(",") if each)
    return all(name in labels and (not sign or labels[name] == value) for name, sign, value in wanted)


def _merged(old: Mapping[str, object], patch: Mapping[str, object]) -> Json:
    """Applies a JSON merge patch (RFC 7386)."""
    result = dict(old)
    for name, value in patch.items():
        before = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = _merged(before if isinstance(before, Mapping) else {}, value)
        else:
            result[name] = value
    return result


def ready_head(world: ControllerOnFakeApi, job: str, cluster_uid: str, *, is_node_silent: bool = False) -> None:
    """Adds the head pod of a job's first cluster; `is_node_silent`: its Kubernetes node is NotReady."""
    labels = {
        "ray.io/cluster": f"{job}-1",
        "ray.io/node-type": "head",
        "rljob.dev/job-uid": f"uid-of-{job}",
        "rljob.dev/job": job,
    }
    owners = [{"kind": "RayCluster", "uid": cluster_uid, "controller": True}]
    ready = {"type": "Ready", "status": str(not is_node_silent), "lastTransitionTime": "2026-01-31T11:00:00Z"}
    status = {"phase": "Running", "conditions": [ready, {"type": "ContainersReady", "status": "True"}]}
    metadata = {"name": f"{job}-head", "labels": labels, "ownerReferences": owners}
    world.api.put(PODS, {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status})

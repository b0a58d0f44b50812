"""Stands in for KubeRay, the scheduler, the kubelet and the garbage collector on an API server without controllers.

It creates the pods of RayClusters with KubeRay's labels, from the operator's own templates, so that the API server
validates them. It sets their status as a script says, and deletes objects whose owner was deleted.
"""

from __future__ import annotations

import copy
import datetime
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx

from rljob_testing.cluster.api_server import EVERYWHERE, ApiServer, ObjectChanges, install_definition
from rljob_testing.operator import scripts

Json = dict[str, object]
CLUSTERS = "/apis/ray.io/v1"
JOBS = "/apis/rljob.dev/v1alpha1"
PAUSE_SECONDS = 0.05
"""Minimum pause between two passes."""
LONGEST_SECONDS = 2.0
"""Maximum pause between two passes."""
OWNED_BY_JOBS = (
    (CLUSTERS, "rayclusters"),
    ("/api/v1", "secrets"),
    ("/apis/networking.k8s.io/v1", "networkpolicies"),
)


def node_name(group: str) -> str:
    """Name of the node of all pods of a group."""
    return f"node-of-{group}"


def install_ray_cluster_resource(http: httpx.Client) -> None:
    """Installs a RayCluster resource that accepts all fields, and waits until it is served."""
    manifest = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "rayclusters.ray.io"},
        "spec": {
            "group": "ray.io",
            "scope": "Namespaced",
            "names": {
                "plural": "rayclusters",
                "singular": "raycluster",
                "kind": "RayCluster",
                "listKind": "RayClusterList",
            },
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                }
            ],
        },
    }
    install_definition(http, manifest)


WATCHED = (
    "/api/v1/pods?labelSelector=ray.io/cluster",
    *(f"{group}/{plural}" for group, plural in OWNED_BY_JOBS),
    f"{JOBS}/rljobs",
)


class KubeRayStandIn:
    """Serves all namespaces from threads of this process."""

    def __init__(self, server: ApiServer) -> None:
        self._http = server.http
        self.changes = ObjectChanges(server.http, WATCHED)
        """Changes of all objects that belong to jobs."""
        self._scripts: dict[tuple[str, str], scripts.ClusterScript] = {}
        self._applied: dict[str, scripts.PodScript] = {}
        self._conditions: dict[str, Mapping[str, Mapping[str, str]]] = {}
        self._suspended: set[str] = set()
        self._noted: set[str] = set()
        self._stopped = threading.Event()
        self.failures: list[str] = []
        """Errors of the stand-in itself: look here first when a test fails in a way that makes no sense."""

    def script(self, namespace: str, cluster: str, script: scripts.ClusterScript) -> None:
        """Sets the script of a cluster from now on."""
        self._scripts[namespace, cluster] = script
        self.changes.notify(namespace)

    def run(self) -> None:
        """Works until `stop`."""
        self.changes.watch()
        while not self._stopped.wait(PAUSE_SECONDS):
            number = self.changes.count(EVERYWHERE)
            try:
                self._look()
            except (httpx.HTTPError, KeyError, AssertionError) as error:
                self.failures.append(repr(error))
            self.changes.wait(EVERYWHERE, number, LONGEST_SECONDS)

    def stop(self) -> None:
        """Ends `run`."""
        self._stopped.set()
        self.changes.stop()

    def _look(self) -> None:
        # Owned objects are listed before their owners. Otherwise an object created between the two lists would look
        # orphaned.
        pods = self._items("/api/v1/pods?labelSelector=ray.io/cluster")
        owned = [
            (f"{group}/namespaces/{_namespace(found)}/{plural}/{_name(found)}", found)
            for group, plural in OWNED_BY_JOBS[1:]
            for found in self._items(f"{group}/{plural}?labelSelector=rljob.dev/job")
        ]
        clusters = self._items(f"{CLUSTERS}/rayclusters")
        jobs = {_uid(job) for job in self._items(f"{JOBS}/rljobs")}
        clusters = [cluster for cluster in clusters if self._is_kept(cluster, jobs)]
        for path, found in owned:
            if not set(_owners(found)) & jobs:
                self._delete(path)
        uids = {_uid(cluster) for cluster in clusters}
        for pod in pods:
            if not set(_owners(pod)) & uids:
                self._delete(f"/api/v1/namespaces/{_namespace(pod)}/pods/{_name(pod)}")
        for cluster in clusters:
            self._tend(cluster, {_name(pod): pod for pod in pods if _uid(cluster) in _owners(pod)})

    def _is_kept(self, cluster: Json, jobs: set[str]) -> bool:
        owners = _owners(cluster)
        if owners and not set(owners) & jobs:
            self._delete(f"{CLUSTERS}/namespaces/{_namespace(cluster)}/rayclusters/{_name(cluster)}")
            return False
        return True

    def _tend(self, cluster: Json, pods: Mapping[str, Json]) -> None:
        script = self._scripts.get((_namespace(cluster), _name(cluster)), scripts.HEALTHY)
        if script.invalid is not None:
            self._post_event(cluster, "RayCluster", "InvalidRayClusterSpec", script.invalid)
            return
        if script.pod_creation_error is not None:
            failure = {"reason": "FailedCreateHeadPod", "message": f"FailedCreateHeadPod\n{script.pod_creation_error}"}
            self._set_conditions(cluster, {"ReplicaFailure": failure})
            return
        if self._is_suspended(cluster, pods):
            return
        for group, number, template in wanted_pods(cluster):
            name = f"{_name(cluster)}-{group}-{number}"
            wanted = script.pod(group, number)
            if f"{group}-{number}" in script.missing:
                if name in pods:
                    self._delete(f"/api/v1/namespaces/{_namespace(cluster)}/pods/{name}")
                continue
            if name not in pods:
                self._create_pod(cluster, name, group, template)
                pod = self._get(f"/api/v1/namespaces/{_namespace(cluster)}/pods/{name}")
            else:
                pod = pods[name]
            if self._applied.get(_uid(pod)) != wanted:
                self._set_state(pod, wanted)
                self._applied[_uid(pod)] = wanted

    def _create_pod(self, cluster: Json, name: str, group: str, template: Json) -> None:
        body = pod_manifest(cluster, name, group, template)
        answer = self._http.post(f"/api/v1/namespaces/{_namespace(cluster)}/pods", json=body)
        assert answer.status_code == 201, answer.text

    def _set_state(self, pod: Json, script: scripts.PodScript) -> None:
        if script.event is not None:
            self._post_event(pod, "Pod", *script.event)
        path = f"/api/v1/namespaces/{_namespace(pod)}/pods/{_name(pod)}/status"
        answer = self._http.patch(
            path,
            json={"status": pod_status(pod, script)},
        )
        assert answer.status_code == 200, answer.text

    def _is_suspended(self, cluster: Json, pods: Mapping[str, Json]) -> bool:
        """Whether the cluster is suspended, or a suspension has not ended yet: once begun, it deletes all pods."""
        spec = cluster["spec"]
        assert isinstance(spec, dict)
        uid, is_wanted = _uid(cluster), spec.get("suspend") is True
        if not is_wanted and uid not in self._suspended:
            return False
        self._suspended.add(uid)
        for name in pods:
            self._delete(f"/api/v1/namespaces/{_namespace(cluster)}/pods/{name}")
        if not is_wanted and not pods:
            self._suspended.discard(uid)
        states = {"RayClusterSuspending": bool(pods), "RayClusterSuspended": not pods and is_wanted}
        self._set_conditions(cluster, {kind: {"status": str(state)} for kind, state in states.items()})
        return True

    def _set_conditions(self, cluster: Json, wanted: Mapping[str, Mapping[str, str]]) -> None:
        """Sets conditions of a cluster, True unless they say otherwise. Does nothing if they were set last."""
        if self._conditions.get(_uid(cluster)) == wanted:
            return
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": _time(), **fields} for kind, fields in wanted.items()
        ]
        path = f"{CLUSTERS}/namespaces/{_namespace(cluster)}/rayclusters/{_name(cluster)}/status"
        answer = self._http.patch(path, json={"status": {"conditions": conditions}})
        assert answer.status_code == 200, answer.text
        self._conditions[_uid(cluster)] = wanted

    def _post_event(self, about: Json, kind: str, reason: str, message: str) -> None:
        name = f"{_name(about)}.{reason.lower()}"
        if f"{_uid(about)}/{name}" in self._noted:
            return
        event = {
            "metadata": {"name": name, "namespace": _namespace(about)},
            "involvedObject": {"kind": kind, "namespace": _namespace(about), "name": _name(about), "uid": _uid(about)},
            "reason": reason,
            "message": message,
            "type": "Warning",
            "firstTimestamp": _time(),
            "lastTimestamp": _time(),
        }
        assert self._http.post(f"/api/v1/namespaces/{_namespace(about)}/events", json=event).status_code == 201
        self._noted.add(f"{_uid(about)}/{name}")

    def _items(self, path: str) -> list[Json]:
        answer = self._http.get(path)
        if answer.status_code == 404:
            return []
        answer.raise_for_status()
        return list(answer.json()["items"])

    def _get(self, path: str) -> Json:
        found: Json = self._http.get(path).raise_for_status().json()
        return found

    def _delete(self, path: str) -> None:
        self._http.request("DELETE", path, json={"gracePeriodSeconds": 0})


@contextmanager
def kuberay_stand_in(server: ApiServer) -> Iterator[KubeRayStandIn]:
    """Runs a stand-in until the end of the context."""
    stand_in = KubeRayStandIn(server)
    thread = threading.Thread(target=stand_in.run, name="kuberay stand-in", daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.stop()
        thread.join(10)


def wanted_pods(cluster: Json) -> Iterator[tuple[str, int, Json]]:
    """Group, number and template of each pod of a RayCluster."""
    spec = cluster["spec"]
    assert isinstance(spec, dict)
    yield "head", 0, spec["headGroupSpec"]["template"]
    for group in spec["workerGroupSpecs"]:
        for number in range(group["replicas"]):
            yield group["groupName"], number, group["template"]


def pod_manifest(cluster: Json, name: str, group: str, template: Json) -> Json:
    """The pod that KubeRay makes of a template of a RayCluster, bound to a node."""
    body = copy.deepcopy(template)
    metadata = body.setdefault("metadata", {})
    assert isinstance(metadata, dict)
    metadata["name"] = name
    metadata["ownerReferences"] = [_owner(cluster)]
    spec = body["spec"]
    assert isinstance(spec, dict)
    spec["nodeName"] = node_name(group)
    metadata.setdefault("labels", {}).update(
        {
            "ray.io/cluster": _name(cluster),
            "ray.io/node-type": "head" if group == "head" else "worker",
            "ray.io/group": "headgroup" if group == "head" else group,
            "ray.io/is-ray-node": "yes",
        }
    )
    return body


def pod_status(pod: Json, script: scripts.PodScript) -> Json:
    """The status that the kubelet reports."""
    now = datetime.datetime.now(datetime.UTC)
    scheduled_at = (now - datetime.timedelta(seconds=script.scheduled_seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    scheduled: Json = {"type": "PodScheduled", "status": "True", "lastTransitionTime": scheduled_at}
    if script.scheduling_message is not None:
        scheduled |= {"status": "False", "reason": "Unschedulable", "message": script.scheduling_message}
    conditions: list[Json] = [
        scheduled,
        {
            "type": "Ready",
            "status": "True" if script.ready and not script.node_lost else "False",
            "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
        {"type": "ContainersReady", "status": "True" if script.ready else "False"},
    ]
    if script.disruption is not None:
        reason, message = script.disruption
        conditions.append({"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message})
    status: Json = {"phase": script.phase, "conditions": conditions}
    if script.scheduling_message is None:
        status["containerStatuses"] = [_container_status(name, script) for name in _container_names(pod)]
    return status


def _container_status(name: str, script: scripts.PodScript) -> Json:
    state: Mapping[str, object] = {"running": {"startedAt": _time()}}
    last: Mapping[str, object] = {}
    if name == "ray" and script.waiting is not None:
        state = {"waiting": {"reason": script.waiting[0], "message": script.waiting[1]}}
    elif script.phase == "Pending":
        state = {"waiting": {"reason": "ContainerCreating"}}
    if name == "ray" and script.ended is not None:
        ended: Json = {"terminated": {"reason": script.ended[0], "exitCode": script.ended[1], "finishedAt": _time()}}
        if script.waiting is not None or script.phase == "Running":
            last = ended
        else:
            state = ended
    return {
        "name": name,
        "image": "stand-in",
        "imageID": "",
        "ready": script.ready,
        "restartCount": script.restarts,
        "state": state,
        "lastState": last,
    }


def _container_names(pod: Json) -> list[str]:
    spec = pod["spec"]
    assert isinstance(spec, dict)
    return [container["name"] for container in spec["containers"]]


def _owner(cluster: Json) -> Json:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "name": _name(cluster),
        "uid": _uid(cluster),
        "controller": True,
    }


def _meta(raw: Json) -> Json:
    found = raw["metadata"]
    assert isinstance(found, dict)
    return found


def _name(raw: Json) -> str:
    return str(_meta(raw)["name"])


def _namespace(raw: Json) -> str:
    return str(_meta(raw)["namespace"])


def _uid(raw: Json) -> str:
    return str(_meta(raw)["uid"])


def _owners(raw: Json) -> list[str]:
    owners = _meta(raw).get("ownerReferences", [])
    assert isinstance(owners, list)
    return [owner["uid"] for owner in owners]


def _time() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Sends requests to a Kubernetes cluster with the `kubernetes` package, as only `kubeconfig` and `websockets` also do.

The package is imported only when a cluster is needed, because the import takes half a second.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rljob.error_responses import API_PATH, PLURAL, error_of_response
from rljob.errors import ClusterError, ClusterUnreachableError, ConflictError, JobChangedError
from rljob.kubeconfig import read_configuration
from rljob.kubernetes_models import Event, Json, ObjectMeta, Pod
from rljob.plain_text import one_line
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, LABEL_JOB, LABEL_JOB_UID, LABEL_POOL

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from kubernetes.client.rest import RESTResponse
    from websocket import WebSocket

    from rljob.stored_job import StoredJob

CONNECT_TIMEOUT_SECONDS = 5.0
RESPONSE_TIMEOUT_SECONDS = 30.0
_PIECE_BYTES = 64 * 1024
_MAX_PATCHES = 10
"""How often a change is tried at most, while the operator writes the status between reading and changing the job."""
_PAGE_SIZE, _MAX_PAGES = 500, 4
"""Objects in one response; and of worker pods at most so many responses are read per namespace."""
_JSON = "application/json, */*"
_ONLY_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Media type with which the API server leaves out spec and status: of a pod this is 90 %."""
_ON_NODES = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
_VALID_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,251}[a-z0-9])?")

Query = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ClusterOptions:
    """Options that select cluster and namespace. Values that are not set come from the kubeconfig or from this pod."""

    context: str | None = None
    namespace: str | None = None
    kubeconfig: Path | None = None

    def flags(self) -> str:
        """The given options as a string, to append to a suggested command."""
        given = (("--kubeconfig", self.kubeconfig), ("--context", self.context), ("--namespace", self.namespace))
        return "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in given if value is not None)


@dataclass(frozen=True)
class PlacedPods:
    """How many worker pods of each job of a namespace have a node, and thus hold its GPUs."""

    by_job: Mapping[str, int]
    """By the name of the job, the largest number first."""
    is_complete: bool
    """False if the namespace has more pods than are read."""


class Cluster:
    """Sends requests to one API server. All methods may raise ClusterError and RejectedError. Their docstrings name the
    subclasses that a caller may want to handle."""

    def __init__(self, api: ApiClient, namespace: str, name: str, flags: str = "") -> None:
        self._api = api
        self.namespace = namespace
        """Namespace of the jobs."""
        self.name = name
        """Name for messages, such as `context staging`; `in-cluster` for the service account of this pod."""
        self.flags = flags
        """Options that suggested commands need for this cluster and namespace."""

    def create_job(self, job: Mapping[str, object], *, dry_run: bool = False) -> StoredJob:
        """Creates a job; the API server rejects unknown fields. With `dry_run`, the API server only validates it and
        fills in the defaults. Raises JobExistsError."""
        return _stored(self._json("POST", self._job_path(), _writing(dry_run), job))

    def job(self, name: str) -> StoredJob:
        """One job. Raises JobNotFoundError."""
        return _stored(self._json("GET", self._job_path(name)))

    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> list[StoredJob]:
        """The jobs of the namespace, or of all namespaces, whose labels match the selector (such as `team=research`),
        by namespace and name."""
        path = f"{API_PATH}/{PLURAL}" if everywhere else self._job_path()
        query = [] if selector is None else [("labelSelector", selector)]
        return [_stored(item) for page in self._pages(path, query) for item in _items(page)]

    def job_names(self) -> list[str]:
        """The names of the first jobs of the namespace, from a small response."""
        found = self._json("GET", self._job_path(), [("limit", str(_PAGE_SIZE))], accept=_ONLY_METADATA)
        return [ObjectMeta.model_validate(item["metadata"]).name for item in _items(found)]

    def change_spec(
        self,
        job: StoredJob,
        changes: Mapping[str, object],
        labels: Mapping[str, str | None] | None = None,
        *,
        dry_run: bool = False,
    ) -> StoredJob:
        """Applies merge patches to `spec` and to the labels of the job as it was read; None removes a field or label.
        With `dry_run`, the API server only returns the job as it would be. Raises JobNotFoundError and JobChangedError.
        """
        metadata = {"labels": dict(labels)} if labels else {}
        return self._patch_job(job, metadata, {"spec": dict(changes)}, dry_run=dry_run)

    def annotate_job(self, job: StoredJob, annotation: str, value: str) -> StoredJob:
        """Sets an annotation of the job as it was read. Raises JobNotFoundError and JobChangedError."""
        return self._patch_job(job, {"annotations": {annotation: value}}, {})

    def delete_job(self, job: StoredJob) -> None:
        """Deletes a job; Kubernetes then deletes its RayCluster and pods. Raises JobNotFoundError, and JobChangedError
        if another job has its name now."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": job.metadata.uid}}
        try:
            self._json("DELETE", self._job_path(job.metadata.name), (), body)
        except ConflictError:
            raise JobChangedError(job.where) from None

    def pods(self, job: StoredJob) -> list[Pod]:
        """The job's pods, of all attempts, by name."""
        path = f"/api/v1/namespaces/{job.metadata.namespace}/pods"
        found = self._json("GET", path, [("labelSelector", f"{LABEL_JOB_UID}={job.metadata.uid}")])
        return sorted(map(Pod.model_validate, _items(found)), key=lambda pod: pod.metadata.name)

    def placed_worker_pods(self, namespace: str) -> PlacedPods:
        """The worker pods of all jobs of a namespace that have a node and have not ended, also those of jobs that wait
        and of kept clusters. Reads only their metadata, and at most `_MAX_PAGES` pages."""
        path, found, is_complete = f"/api/v1/namespaces/{namespace}/pods", Counter[str](), True
        query = [("labelSelector", f"{LABEL_JOB_UID},{LABEL_POOL}"), ("fieldSelector", _ON_NODES)]
        for page in islice(self._pages(path, query, _ONLY_METADATA), _MAX_PAGES):
            found.update(Pod.model_validate(item).metadata.labels.get(LABEL_JOB, "?") for item in _items(page))
            is_complete = not _continue_token(page)
        return PlacedPods(dict(found.most_common()), is_complete)

    def nodes(self) -> list[Json]:
        """The nodes of the cluster, as API objects."""
        return _items(self._json("GET", "/api/v1/nodes"))

    def warnings(self, namespace: str) -> list[Event]:
        """The Warning events of a namespace, oldest first."""
        found = self._json("GET", f"/api/v1/namespaces/{namespace}/events", [("fieldSelector", "type=Warning")])
        return sorted(map(Event.model_validate, _items(found)), key=lambda event: event.seen)

    def pod_log(
        self, pod: Pod, container: str, *, follow: bool, num_lines: int | None, since_seconds: int | None = None
    ) -> Iterator[bytes]:
        """Streams the last `num_lines` lines of a container's log, and only those of the last `since_seconds`, in
        pieces of bytes; None for all lines. With `follow`, waits for new lines until the container exits."""
        query = [("container", container), ("follow", str(follow).lower())]
        if num_lines is not None:
            query.append(("tailLines", str(num_lines)))
        if since_seconds is not None:
            query.append(("sinceSeconds", str(since_seconds)))
        path = f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}/log"
        response = self._send("GET", path, query, endless=follow)
        with _plain_errors(self.name):
            while piece := response.response.read1(_PIECE_BYTES):
                yield piece

    def request(self, method: str, path: str, query: Query = (), body: Mapping[str, object] | None = None) -> Json:
        """Sends a request for objects that have no method here, such as the pod of `rljob get-results`. Raises
        ObjectNotFoundError."""
        return self._json(method, path, query, body)

    def websocket(self, path: str, query: Query) -> WebSocket:
        """Opens a WebSocket for `exec` or `portforward`. Raises ObjectNotFoundError."""
        from rljob.websockets import open_websocket

        with _plain_errors(self.name):
            return open_websocket(self._api, path, query, self.name, self.flags)

    def _patch_job(
        self, job: StoredJob, metadata: Mapping[str, object], rest: Mapping[str, object], *, dry_run: bool = False
    ) -> StoredJob:
        """Applies a merge patch to the version of the job that was read. The operator writes the status all the time;
        if users have not changed spec, queue, stop or retry request meanwhile, the patch is repeated for the newer
        version."""
        seen, path = job, self._job_path(job.metadata.name)
        for _ in range(_MAX_PATCHES):
            patch = {"metadata": {**metadata, "resourceVersion": seen.metadata.resource_version}, **rest}
            try:
                return _stored(self._json("PATCH", path, _writing(dry_run), patch))
            except ConflictError:
                seen = self.job(job.metadata.name)
            if _requested_state(seen) != _requested_state(job):
                break
        raise JobChangedError(job.where)

    def _job_path(self, name: str | None = None) -> str:
        """The URL path of one job, or of all jobs of the namespace. The name is checked, because an empty name or `.`
        would give the path of all jobs."""
        path = f"{API_PATH}/namespaces/{checked_name('--namespace', self.namespace)}/{PLURAL}"
        return path if name is None else f"{path}/{checked_name('NAME', name)}"

    def _pages(self, path: str, query: Query, accept: str = _JSON) -> Iterator[Json]:
        """The responses to a request for a list, each with at most `_PAGE_SIZE` objects."""
        token = ""
        while True:
            page = self._json("GET", path, [*query, ("limit", str(_PAGE_SIZE)), ("continue", token)], accept=accept)
            yield page
            token = _continue_token(page)
            if not token:
                return

    def _json(
        self,
        method: str,
        path: str,
        query: Query = (),
        body: Mapping[str, object] | None = None,
        accept: str = _JSON,
    ) -> Json:
        response = self._send(method, path, query, body, accept=accept)
        with _plain_errors(self.name):
            content = response.response.data
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            host = self._api.configuration.host
            raise ClusterError(
                f"{self.name}: {host} is not a Kubernetes API server; correct `server` in the kubeconfig"
            )
        return found

    def _send(
        self,
        method: str,
        path: str,
        query: Query,
        body: Mapping[str, object] | None = None,
        *,
        endless: bool = False,
        accept: str = _JSON,
    ) -> RESTResponse:
        """Sends a request and returns the response, whose body is not read yet. `endless`: no timeout for
        reading the body, because a log that is followed may have no new lines for hours. Raises ClusterError or
        RejectedError for an error response."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": kind, "Accept": accept}
        with _plain_errors(self.name):
            request = self._api.param_serialize(
                method, path, query_params=list(query), header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            timeout = (CONNECT_TIMEOUT_SECONDS, None if endless else RESPONSE_TIMEOUT_SECONDS)
            response = self._api.call_api(*request, _request_timeout=timeout)
            if response.status >= 400:
                raise error_of_response(response.status, response.response.data, self.name, self.flags)
        return response


def _stored(wire: Mapping[str, object]) -> StoredJob:
    """Parses a job from a response."""
    # Imported here, because the schema takes 0.3 s, and the completion of names does not need it.
    from rljob.stored_job import stored_job

    return stored_job(wire)


def _writing(dry_run: bool) -> list[tuple[str, str]]:
    """The query of a request that creates or changes an object."""
    return [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]


def _requested_state(job: StoredJob) -> tuple[str, int, Sequence[str | None]]:
    """What users have requested of the job: its UID, the generation of its spec, its stop and its retry request, its
    queue and its priority."""
    from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL

    metadata = job.metadata
    annotations = [metadata.annotations.get(name) for name in (ANNOTATION_STOP, ANNOTATION_RETRY)]
    labels = [metadata.labels.get(name) for name in (QUEUE_LABEL, PRIORITY_CLASS_LABEL)]
    return metadata.uid, metadata.generation, [*annotations, *labels]


def connect(options: ClusterOptions) -> Cluster:
    """A client for the cluster that the options select. Sends no request yet.

    Raises:
        ClusterError: there is no kubeconfig, or it cannot be used.
    """
    from kubernetes.client import ApiClient

    found = read_configuration(options.kubeconfig, options.context)
    namespace = found.namespace if options.namespace is None else options.namespace
    return Cluster(ApiClient(found.configuration), namespace, found.name, options.flags())


def checked_name(what: str, name: str) -> str:
    """Returns the name if it is a valid Kubernetes name, else raises ClusterError. `what`: where the name is from, such
    as `--namespace`."""
    if not _VALID_NAME.fullmatch(name):
        raise ClusterError(
            f"{what}: {name!r} is not a valid Kubernetes name; use letters a-z, digits, and '-' between them"
        )
    return name


@contextmanager
def _plain_errors(cluster: str) -> Iterator[None]:
    """Turns errors of the connection into ClusterError, mostly ClusterUnreachableError, with a message for users."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (ApiException, HTTPError, OSError) as error:
        reason = one_line(error.reason if isinstance(error, ApiException) else error)
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            raise ClusterError(
                f"{cluster}: the API server's certificate is not trusted ({reason}); correct certificate-authority or "
                "server in the kubeconfig"
            ) from error
        raise ClusterUnreachableError(cluster, reason) from error


def _continue_token(page: Json) -> str:
    """The token for the next page of a list; empty after the last one."""
    metadata = page.get("metadata")
    return str(metadata.get("continue") or "") if isinstance(metadata, dict) else ""


def _items(found: Json) -> list[Json]:
    # An empty list of metadata has null instead of [].
    items = [] if found["items"] is None else found["items"]
    assert isinstance(items, list), "a list was asked for"
    return items

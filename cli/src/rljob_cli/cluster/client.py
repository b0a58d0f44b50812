"""Sends the requests of the commands to a Kubernetes cluster. No other module uses the `kubernetes` package.

The package finds credentials (a kubeconfig with its plugins, or the service account of this pod) and sends the
requests. It is imported only when a command needs a cluster, because the import takes half a second.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP, LABEL_JOB, LABEL_JOB_UID, LABEL_POOL
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_cli.cluster.error_responses import API_PATH, PLURAL, error_of_response
from rljob_cli.cluster.kubernetes_models import Event, Json, Pod
from rljob_cli.cluster.stored_job import StoredJob, stored_job
from rljob_cli.errors import (
    ClusterError,
    ClusterUnreachableError,
    ConflictError,
    JobChangedError,
)
from rljob_cli.plain_text import one_line
from rljob_cli.settings import kubeconfig_files, service_account_namespace

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.client.rest import RESTResponse
    from websocket import WebSocket

CONNECT_TIMEOUT_SECONDS = 5.0
RESPONSE_TIMEOUT_SECONDS = 30.0
_PIECE_BYTES = 64 * 1024
_MAX_PATCHES = 10
"""How often a change is tried at most, while the operator writes the status between reading and changing the job."""
_PAGE_SIZE, _MAX_PAGES = 500, 4
"""Worker pods in one response, and the number of responses that are read of one namespace at most."""
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
    """Sends requests to one API server. All methods may raise ClusterError. Their docstrings name the subclasses that a
    caller may want to handle."""

    def __init__(self, api: ApiClient, namespace: str, name: str, flags: str = "") -> None:
        self._api = api
        self.namespace = namespace
        """Namespace of the jobs."""
        self.name = name
        """Name for messages, such as `context staging`; `in-cluster` for the service account of this pod."""
        self.flags = flags
        """Options that suggested commands need for this cluster and namespace."""

    def create_job(self, job: Mapping[str, object]) -> StoredJob:
        """Creates a job; the API server rejects unknown fields. Raises JobExistsError."""
        return stored_job(self._json("POST", self._job_path(), [("fieldValidation", "Strict")], job))

    def job(self, name: str) -> StoredJob:
        """One job. Raises JobNotFoundError."""
        return stored_job(self._json("GET", self._job_path(name)))

    def jobs(self, *, everywhere: bool = False) -> list[StoredJob]:
        """All jobs of the namespace, or of all namespaces."""
        path = f"{API_PATH}/{PLURAL}" if everywhere else self._job_path()
        return [stored_job(item) for item in _items(self._json("GET", path))]

    def change_spec(
        self, job: StoredJob, changes: Mapping[str, object], labels: Mapping[str, str | None] | None = None
    ) -> StoredJob:
        """Applies merge patches to `spec` and to the labels of the job as it was read; None removes a field or label.
        Raises JobNotFoundError and JobChangedError."""
        return self._patch_job(job, {"labels": dict(labels)} if labels else {}, {"spec": dict(changes)})

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
        path, found, token = f"/api/v1/namespaces/{namespace}/pods", Counter[str](), ""
        query = [("labelSelector", f"{LABEL_JOB_UID},{LABEL_POOL}"), ("fieldSelector", _ON_NODES)]
        for _ in range(_MAX_PAGES):
            page = self._json(
                "GET", path, [*query, ("limit", str(_PAGE_SIZE)), ("continue", token)], accept=_ONLY_METADATA
            )
            found.update(Pod.model_validate(item).metadata.labels.get(LABEL_JOB, "?") for item in _items(page))
            metadata = page.get("metadata")
            token = str(metadata.get("continue") or "") if isinstance(metadata, dict) else ""
            if not token:
                break
        return PlacedPods(dict(found.most_common()), not token)

    def nodes(self) -> list[Json]:
        """The nodes of the cluster, as API objects."""
        return _items(self._json("GET", "/api/v1/nodes"))

    def warnings(self, namespace: str) -> list[Event]:
        """The Warning events of a namespace, oldest first."""
        found = self._json("GET", f"/api/v1/namespaces/{namespace}/events", [("fieldSelector", "type=Warning")])
        return sorted(map(Event.model_validate, _items(found)), key=lambda event: event.seen)

    def pod_log(self, pod: Pod, container: str, *, follow: bool, num_lines: int | None) -> Iterator[bytes]:
        """Streams the last `num_lines` lines of a container's log, in pieces of bytes; None for all lines. With
        `follow`, waits for new lines until the container exits."""
        query = [("container", container), ("follow", str(follow).lower())]
        if num_lines is not None:
            query.append(("tailLines", str(num_lines)))
        path = f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}/log"
        response = self._send("GET", path, query, endless=follow)
        with _plain_errors(self.name):
            while piece := response.response.read1(_PIECE_BYTES):
                yield piece

    def request(self, method: str, path: str, query: Query = (), body: Mapping[str, object] | None = None) -> Json:
        """Sends a request for objects that have no method here, such as pods of a user. Raises ObjectNotFoundError."""
        return self._json(method, path, query, body)

    def websocket(self, path: str, query: Query) -> WebSocket:
        """Opens a WebSocket for `exec` or `portforward`. Raises ObjectNotFoundError."""
        from rljob_cli.cluster.websockets import open_websocket

        with _plain_errors(self.name):
            return open_websocket(self._api, path, query, self.name, self.flags)

    def _patch_job(self, job: StoredJob, metadata: Mapping[str, object], rest: Mapping[str, object]) -> StoredJob:
        """Applies a merge patch to the version of the job that was read. The operator writes the status all the time;
        if users have not changed spec, queue, stop or retry request meanwhile, the patch is repeated for the newer
        version."""
        seen, path = job, self._job_path(job.metadata.name)
        for _ in range(_MAX_PATCHES):
            patch = {"metadata": {**metadata, "resourceVersion": seen.metadata.resource_version}, **rest}
            try:
                return stored_job(self._json("PATCH", path, [("fieldValidation", "Strict")], patch))
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
        reading the body, because a log that is followed may have no new lines for hours. Raises ClusterError for an
        error response."""
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


def _requested_state(job: StoredJob) -> tuple[str, int, Sequence[str | None]]:
    """What users have requested of the job: its UID, the generation of its spec, its stop and its retry request, its
    queue and its priority."""
    metadata = job.metadata
    annotations = [metadata.annotations.get(name) for name in (ANNOTATION_STOP, ANNOTATION_RETRY)]
    labels = [metadata.labels.get(name) for name in (QUEUE_LABEL, PRIORITY_CLASS_LABEL)]
    return metadata.uid, metadata.generation, [*annotations, *labels]


def connect(options: ClusterOptions) -> Cluster:
    """A client for the cluster that the options select. Sends no request yet.

    Raises:
        ClusterError: there is no kubeconfig, or it cannot be used.
    """
    from kubernetes.client import ApiClient, Configuration

    # Retries are turned off: by default the client retries three times and prints a warning each time.
    configuration = Configuration(retries=False)
    is_selected = options.kubeconfig is not None or options.context is not None
    files = [options.kubeconfig] if options.kubeconfig else kubeconfig_files()
    # `file.is_file()` would reject a pipe, which a shell creates for `--kubeconfig <(command)`.
    existing = [file for file in files if file.exists() and not file.is_dir()]
    if existing:
        name, namespace = _load_kubeconfig(configuration, existing, options.context)
    elif not is_selected and (own_namespace := service_account_namespace()):
        name, namespace = _load_service_account(configuration), own_namespace
    else:
        raise _no_kubeconfig(options.kubeconfig, files)
    namespace = namespace if options.namespace is None else options.namespace
    return Cluster(ApiClient(configuration), namespace, name, options.flags())


def _no_kubeconfig(given: Path | None, searched: Sequence[Path]) -> ClusterError:
    """The error if none of the searched files exists. `given`: the path of --kubeconfig, if it is set."""
    if given is not None:
        return ClusterError(f"--kubeconfig {given}: {'is a folder' if given.is_dir() else 'no such file'}; correct it")
    paths = ", ".join(map(str, searched))
    return ClusterError(
        f"no kubeconfig found (searched: {paths}); set KUBECONFIG or --kubeconfig to an existing file, or create one"
        " with the tool of your cluster"
    )


def checked_name(what: str, name: str) -> str:
    """Returns the name if it is a valid Kubernetes name, else raises ClusterError. `what`: where the name is from, such
    as `--namespace`."""
    if not _VALID_NAME.fullmatch(name):
        raise ClusterError(
            f"{what}: {name!r} is not a valid Kubernetes name; use letters a-z, digits, and '-' between them"
        )
    return name


def _load_kubeconfig(configuration: Configuration, files: Sequence[Path], context: str | None) -> tuple[str, str]:
    """Fills the configuration from kubeconfig files. Returns the context for messages, such as `context staging`, and
    the context's namespace."""
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    file_names = ", ".join(map(str, files))
    try:
        # Several files are merged as kubectl does it. Credentials that a plugin renews are written back to the file.
        merged = KubeConfigMerger(os.pathsep.join(map(str, files)))  # type: ignore[no-untyped-call]
        names = [str(entry["name"]) for entry in merged.config["contexts"]]
        if context is not None and context not in names:
            raise ClusterError(f"{file_names}: no context {context}; use one of: {', '.join(names) or 'none'}")
        loader = KubeConfigLoader(merged.config, active_context=context, config_persister=merged.save_changes)  # type: ignore[no-untyped-call]
        with _logged_errors() as failures:
            loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
        if failures:
            raise ClusterError(
                f"{file_names}: the program that gets the credentials failed ({one_line(failures[0])}); install it or"
                " log in again, or use another kubeconfig with --kubeconfig"
            )
        _check_server(configuration.host, file_names)
        chosen = loader.current_context
        return f"context {chosen['name']}", str(chosen["context"].get("namespace") or "default")
    except ClusterError:
        raise
    # The package does not wrap the errors of its parsers and of credential plugins.
    except Exception as error:
        raise ClusterError(
            f"{file_names}: invalid kubeconfig ({one_line(error)}); correct it, or use another with --kubeconfig"
        ) from error


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collects the errors that the package logs. If a credential plugin fails, the package only logs this, and would
    then send requests without credentials."""
    failures: list[str] = []
    collector = logging.Handler(logging.ERROR)
    collector.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(collector)
    try:
        yield failures
    finally:
        logging.getLogger().removeHandler(collector)


def _check_server(url: str, file_names: str) -> None:
    """Raises ClusterError if requests cannot be sent to this URL. `file_names`: the kubeconfigs, for the message."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ClusterError(
            f"{file_names}: `server` must be the URL of an API server (seen: {url!r}), such as https://10.0.0.1:6443;"
            " correct it, or use another kubeconfig with --kubeconfig"
        )


def _load_service_account(configuration: Configuration) -> str:
    from kubernetes.config import ConfigException, load_incluster_config

    try:
        load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise ClusterError(
            f"this pod's service account cannot be used ({one_line(error)}); mount the account's token into the pod, or"
            " use a kubeconfig with --kubeconfig"
        ) from error
    return "in-cluster"


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


def _items(found: Json) -> list[Json]:
    # An empty list of metadata has null instead of [].
    items = [] if found["items"] is None else found["items"]
    assert isinstance(items, list), "a list was asked for"
    return items

"""The pod that reads a job's results from its claim: its manifest, its start and its deletion.

The pod belongs to the user, not to the operator. It mounts the job's folder read-only, runs as the user who wrote the
files, and ends by itself if the command that created it disappears.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from rljob.cluster import Cluster
from rljob.errors import (
    ClusterError,
    ClusterUnreachableError,
    NotAllowedError,
    ObjectNotFoundError,
    RejectedError,
    ResultsError,
)
from rljob.kubernetes_models import Json, Pod
from rljob.plain_text import one_line
from rljob.polling import Clock
from rljob.results import pod_file_server
from rljob.results.connection import BrokenConnectionError, Connection, ExecConnection, PodGoneError
from rljob.results.pod_start import wait_until_running
from rljob.results.volume import Placement, placement_of
from rljob.stored_job import StoredJob
from rljob_api.constants import (
    API_GROUP,
    API_VERSION,
    KIND,
    LABEL_RESULTS_OF,
    POD_STORAGE_FOLDER,
)

CONTAINER = "results"
_PROGRAM_VARIABLE = "RLJOB_PROGRAM"
_PYTHON = ("python3", "-I", "-B", "-c")
_RUN_PROGRAM = f"import os; exec(os.environ[{_PROGRAM_VARIABLE!r}])"
"""The program is in a variable, because the command of `exec` is a part of a URL, whose length is limited."""
POD_IDLE_SECONDS = 120
"""The pod ends after this time without a connection."""
ACTIVE_SECONDS = 3600
"""The pod ends after this time in any case. A copy that takes longer continues with another pod."""
_LEFT_OVER_AGE = timedelta(minutes=40)
"""A pod that has not started after this time is a left-over: no command waits so long for the start (`pod_start`)."""
_CREATE_GRACE_SECONDS = 1.0
"""Time for the API server to handle a request to create a pod, after the command has stopped waiting for it."""
_DEFAULT_USER = 1000
"""User of the job's pods if the status does not say it: the chart's default."""
_RESOURCES: Json = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


@dataclass(frozen=True)
class PodUser:
    """The image and the user of the pod."""

    image: str
    pull_policy: str | None
    user: int | None
    """None to leave the choice to the cluster."""


def pod_user(job: StoredJob, image: str | None = None) -> PodUser:
    """The image and user of the job's own pods, from its status. `image`: replaces the image. Raises ResultsError if
    the job has not started yet, or if its image is not known."""
    if not job.status.attempts:
        raise ResultsError(f"{job.where}: has no attempt yet, so there are no results; see `rljob explain`")
    recorded = job.status.pods
    if recorded is None:
        given = image or job.image
        if given is None:
            raise ResultsError(
                f"{job.where}: the operator has not recorded the image of the job's pods; give an image that has"
                " python3 with --image"
            )
        return PodUser(given, None, _DEFAULT_USER)
    if image is not None:
        return PodUser(image, None, recorded.run_as_user)
    return PodUser(recorded.image, recorded.image_pull_policy, recorded.run_as_user)


def manifest(job: StoredJob, name: str, runs_as: PodUser, placement: Placement) -> Json:
    """The pod. It complies with the restricted Pod Security Standard, and gets no token for the API server."""
    storage = job.storage
    assert storage is not None, "the command rejects a job without storage"
    user = {} if runs_as.user is None else {"runAsUser": runs_as.user}
    # `fsGroup` would change the group of all files; a supplemental group changes no files.
    groups = {} if runs_as.user is None else {"supplementalGroups": [runs_as.user]}
    profile = {"seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": "rljob", LABEL_RESULTS_OF: job.metadata.uid},
            # Without this, the cluster's autoscaler keeps the node for a pod without a controller.
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
            "ownerReferences": [
                {
                    "apiVersion": f"{API_GROUP}/{API_VERSION}",
                    "kind": KIND,
                    "name": job.metadata.name,
                    "uid": job.metadata.uid,
                }
            ],
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": ACTIVE_SECONDS,
            "terminationGracePeriodSeconds": 1,
            # The account may have the pull secret of the image.
            **({"serviceAccountName": job.service_account} if job.service_account else {}),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"runAsNonRoot": True, **user, **groups, **profile},
            "imagePullSecrets": [{"name": secret} for secret in job.image_pull_secrets],
            "containers": [_container(runs_as, storage.sub_path or job.metadata.name)],
            # The volume itself is not read-only: some drivers mount a volume on a node either read-only or writable.
            "volumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": storage.persistent_volume_claim}}],
            **placement.pod_fields(),
        },
    }


def _container(runs_as: PodUser, folder: str) -> Json:
    program = inspect.getsource(pod_file_server)
    return {
        "name": CONTAINER,
        "image": runs_as.image,
        **({"imagePullPolicy": runs_as.pull_policy} if runs_as.pull_policy else {}),
        "command": [*_PYTHON, _RUN_PROGRAM, "wait", str(POD_IDLE_SECONDS)],
        "env": [{"name": _PROGRAM_VARIABLE, "value": program.replace("$(", "$$(")}],
        "resources": _RESOURCES,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "storage", "mountPath": POD_STORAGE_FOLDER, "subPath": folder, "readOnly": True}],
    }


class ResultsPod:
    """Creates the pod when a connection is needed, and deletes it at the end (a context manager)."""

    def __init__(
        self,
        cluster: Cluster,
        job: StoredJob,
        note: Callable[[str], None],
        image: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._note = note
        self._clock = clock or Clock()
        self._runs_as = pod_user(job, image)
        self._pods = f"/api/v1/namespaces/{job.metadata.namespace}/pods"
        self._name: str | None = None
        self._creation_unconfirmed = False

    def __enter__(self) -> ResultsPod:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def connect(self) -> Connection:
        """A connection to the program in the pod. Creates a pod if there is none that runs.

        Raises:
            BrokenConnectionError: the API server or the pod does not respond, or the pod has ended; try again.
            ClusterError: the pod cannot be created or does not start, for example because a permission is missing.
        """
        try:
            if self._name is None or not self._is_running(self._name):
                self.delete()
                self._start()
            assert self._name is not None
            command = [*_PYTHON, _RUN_PROGRAM, "serve", POD_STORAGE_FOLDER]
            streams = [(name, "true") for name in ("stdin", "stdout", "stderr")]
            query = [("container", CONTAINER), *streams, *(("command", part) for part in command)]
            return ExecConnection(self._cluster.websocket(f"{self._pods}/{self._name}/exec", query))
        except ObjectNotFoundError as error:
            raise PodGoneError(str(error)) from error
        except ClusterUnreachableError as error:
            raise BrokenConnectionError(error.reason) from error

    def _start(self) -> None:
        placement = placement_of(self._cluster, self._job)
        self._delete_left_overs()
        # The name is set first, so that the pod is deleted also if the command is stopped during the next request.
        self._name = f"{self._job.metadata.name}-results-{secrets.token_hex(3)}"
        self._creation_unconfirmed = True
        try:
            self._cluster.request("POST", self._pods, body=manifest(self._job, self._name, self._runs_as, placement))
            self._creation_unconfirmed = False
        except ClusterUnreachableError:
            raise
        except NotAllowedError:
            self._name = None
            raise
        except (ClusterError, RejectedError) as error:
            self._name = None
            raise ResultsError(
                f"{self._job.where}: the pod that reads the results cannot be created: {error}"
            ) from None
        wait_until_running(self._cluster, self._job, self._name, self._note, self._clock)

    def _is_running(self, name: str) -> bool:
        try:
            found = Pod.model_validate(self._cluster.request("GET", f"{self._pods}/{name}"))
        except ObjectNotFoundError:
            return False
        return found.status.phase == "Running" and found.metadata.deletion_timestamp is None

    def _delete_left_overs(self) -> None:
        """Deletes pods of earlier commands for this job that have ended or never started. A running pod may belong
        to another command."""
        selector = [("labelSelector", f"{LABEL_RESULTS_OF}={self._job.metadata.uid}")]
        items = self._cluster.request("GET", self._pods, selector).get("items")
        for pod in map(Pod.model_validate, items if isinstance(items, list) else []):
            is_old = pod.metadata.creation_timestamp < self._clock.now() - _LEFT_OVER_AGE
            if pod.status.phase in ("Succeeded", "Failed") or (pod.status.phase == "Pending" and is_old):
                self._delete(pod.metadata.name)

    def delete(self) -> None:
        """Deletes the pod of this command; the next connection creates another one. Raises nothing."""
        name, self._name = self._name, None
        if name is None or self._delete(name) or not self._creation_unconfirmed:
            return
        # Ctrl-C during the request that creates the pod: the API server may handle it later.
        self._clock.sleep(_CREATE_GRACE_SECONDS)
        self._delete(name)

    def _delete(self, name: str) -> bool:
        """Deletes a pod. Returns False if it does not exist."""
        try:
            self._cluster.request("DELETE", f"{self._pods}/{name}", [("gracePeriodSeconds", "1")])
        except ObjectNotFoundError:
            return False
        except (ClusterError, RejectedError) as error:
            self._note(
                f"pod {name} could not be deleted ({one_line(error)}); it ends by itself some minutes after its last"
                " connection"
            )
        return True

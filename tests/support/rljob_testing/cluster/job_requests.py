"""Plain HTTP requests for RLJobs on an API server: how tests send them and read the responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rljob_testing.cluster.api_server import ApiServer

JOBS = "/apis/rljob.dev/v1alpha1/namespaces/default/rljobs"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@dataclass(frozen=True)
class JobNamespace:
    """The jobs of one namespace, as an administrator accesses them."""

    server: ApiServer
    namespace: str

    @property
    def http(self) -> httpx.Client:
        """The administrator's client."""
        return self.server.http

    @property
    def jobs(self) -> str:
        """API path of the jobs."""
        return f"/apis/rljob.dev/v1alpha1/namespaces/{self.namespace}/rljobs"

    def job(self, name: str) -> dict[str, Any]:
        """Returns a stored job."""
        found: dict[str, Any] = self.http.get(f"{self.jobs}/{name}").raise_for_status().json()
        return found

    def change(self, name: str, patch: Mapping[str, object]) -> None:
        """Sends a merge patch to a job."""
        self.http.patch(f"{self.jobs}/{name}", json=patch).raise_for_status()

    def delete(self, name: str) -> None:
        """Deletes a job."""
        self.http.delete(f"{self.jobs}/{name}").raise_for_status()


@dataclass(frozen=True)
class Response:
    """The server's response to one request."""

    status: int
    body: Mapping[str, object]

    @property
    def message(self) -> str:
        """The error message of a rejected request; empty if the request was accepted."""
        return str(self.body.get("message", "")) if self.status >= 400 else ""

    def at(self, *path: str) -> object:
        """The value at a path of the returned object."""
        value: object = self.body
        for part in path:
            assert isinstance(value, dict), f"{part} is not in {value!r}"
            value = value[part]
        return value


def create(http: httpx.Client, job: Mapping[str, object], *, keep: bool = False) -> Response:
    """Creates a job with strict field validation. Without `keep` it is a dry run that stores nothing."""
    parameters = {"fieldValidation": "Strict"} | ({} if keep else {"dryRun": "All"})
    answer = http.post(JOBS, params=parameters, json=job)
    return Response(answer.status_code, answer.json())


def merge(http: httpx.Client, name: str, patch: Mapping[str, object], subresource: str = "") -> Response:
    """Sends a merge patch to a stored job, or to one of its subresources (`/status`)."""
    answer = http.patch(f"{JOBS}/{name}{subresource}", json=patch, params={"fieldValidation": "Strict"})
    return Response(answer.status_code, answer.json())


def get_table(http: httpx.Client, name: str) -> tuple[list[str], list[object]]:
    """Column names and cells of a job's row, in the form that `kubectl get` requests."""
    answer = http.get(f"{JOBS}/{name}", headers={"Accept": TABLE}).raise_for_status().json()
    return [column["name"] for column in answer["columnDefinitions"]], answer["rows"][0]["cells"]


def delete(http: httpx.Client, name: str, deadline_seconds: float = 10.0) -> None:
    """Deletes a stored job and waits until it no longer exists."""
    http.delete(f"{JOBS}/{name}").raise_for_status()
    deadline = time.monotonic() + deadline_seconds
    while http.get(f"{JOBS}/{name}").status_code != 404:
        assert time.monotonic() < deadline, f"job {name} still exists"
        time.sleep(0.05)

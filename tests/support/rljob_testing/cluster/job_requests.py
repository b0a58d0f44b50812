"""RLJobs on an API server, with plain HTTP: what the tests send and how they read the answer."""

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
    """The jobs of one namespace, for an administrator."""

    server: ApiServer
    namespace: str

    @property
    def http(self) -> httpx.Client:
        """The administrator's client."""
        return self.server.http

    @property
    def jobs(self) -> str:
        """Path of the jobs."""
        return f"/apis/rljob.dev/v1alpha1/namespaces/{self.namespace}/rljobs"

    def job(self, name: str) -> dict[str, Any]:
        """A stored job."""
        found: dict[str, Any] = self.http.get(f"{self.jobs}/{name}").raise_for_status().json()
        return found

    def change(self, name: str, patch: Mapping[str, object]) -> None:
        """Sends a merge patch to a job."""
        self.http.patch(f"{self.jobs}/{name}", json=patch).raise_for_status()

    def delete(self, name: str) -> None:
        """Deletes a job."""
        self.http.delete(f"{self.jobs}/{name}").raise_for_status()


@dataclass(frozen=True)
class Answer:
    """The server's verdict on one request."""

    status: int
    body: Mapping[str, object]

    @property
    def message(self) -> str:
        """The text of a refusal; empty when accepted."""
        return str(self.body.get("message", "")) if self.status >= 400 else ""

    def at(self, *path: str) -> object:
        """The value at a path of the object that came back."""
        value: object = self.body
        for part in path:
            assert isinstance(value, dict), f"{part} of {value!r}"
            value = value[part]
        return value


def create(http: httpx.Client, job: Mapping[str, object], *, keep: bool = False) -> Answer:
    """Creates a job with strict field validation; unless `keep`, only as a dry run that stores nothing."""
    parameters = {"fieldValidation": "Strict"} | ({} if keep else {"dryRun": "All"})
    answer = http.post(JOBS, params=parameters, json=job)
    return Answer(answer.status_code, answer.json())


def merge(http: httpx.Client, name: str, patch: Mapping[str, object], subresource: str = "") -> Answer:
    """Sends a merge patch to a stored job, or to one of its subresources (`/status`)."""
    answer = http.patch(f"{JOBS}/{name}{subresource}", json=patch, params={"fieldValidation": "Strict"})
    return Answer(answer.status_code, answer.json())


def get_table(http: httpx.Client, name: str) -> tuple[list[str], list[object]]:
    """Column names and the cells of a job's row, as `kubectl get` asks for them."""
    answer = http.get(f"{JOBS}/{name}", headers={"Accept": TABLE}).raise_for_status().json()
    return [column["name"] for column in answer["columnDefinitions"]], answer["rows"][0]["cells"]


def delete(http: httpx.Client, name: str, deadline_seconds: float = 10.0) -> None:
    """Deletes a stored job and waits until it is gone."""
    http.delete(f"{JOBS}/{name}").raise_for_status()
    deadline = time.monotonic() + deadline_seconds
    while http.get(f"{JOBS}/{name}").status_code != 404:
        assert time.monotonic() < deadline, f"{name} is still there"
        time.sleep(0.05)

"""A running Ray cluster as the operator sees it: its dashboard, spoken to with a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import JsonValue

from rljob_api.constants import (
    ENV_ATTEMPT,
    ENV_RUN_STATE_FILE,
    ENV_START_NUMBER,
    TRAINER_ENTRYPOINT,
    driver_log_file_name,
    run_state_file_name,
)
from rljob_api.handover import load_run_state
from rljob_api.run_state import RunState

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
END_SECONDS = 480.0
STOP_WAIT_SECONDS = 240
"""Ray's, from its stop of a driver to the end of its patience: a step and a checkpoint on a busy machine."""
Document = dict[str, JsonValue]


@dataclass(frozen=True)
class RayCluster:
    """The cluster whose dashboard listens on a port of this machine."""

    port: int
    token: str
    log_folder: Path
    """Ray's, of the newest session."""

    def get(self, path: str, **query: str) -> httpx.Response:
        """An answer of the dashboard."""
        return self._http("GET", path, query, None)

    def wait_for_nodes(self, num_nodes: int, seconds: float) -> None:
        """Waits until so many nodes have joined."""
        deadline = time.monotonic() + seconds
        while len(self._alive_nodes()) < num_nodes:
            assert time.monotonic() < deadline, "the cluster is not complete"
            time.sleep(0.2)

    def head_node(self) -> str:
        """The head's node id."""
        return next(str(node["node_id"]) for node in self._alive_nodes() if node["is_head_node"])

    def submit(self, submission_id: str, start_number: int, **variables: str) -> RayJob:
        """Submits the trainer as the operator does; `variables` are added to the environment of its driver."""
        state_file = self.log_folder / run_state_file_name(submission_id)
        environment = {
            ENV_ATTEMPT: "1",
            ENV_START_NUMBER: str(start_number),
            ENV_RUN_STATE_FILE: str(state_file),
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS),
            **variables,
        }
        body = {
            "entrypoint": TRAINER_ENTRYPOINT,
            "submission_id": submission_id,
            "runtime_env": {"env_vars": environment},
            "metadata": {"uid": "of-the-job"},
        }
        deadline = time.monotonic() + 120
        while (answer := self._http("POST", "/api/jobs/", {}, body)).status_code != 200:
            # A head that has just started may have no agent for jobs yet.
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.5)
        return RayJob(self, submission_id)

    def stop(self, submission_id: str) -> None:
        """Asks Ray to stop a job."""
        self._http("POST", f"/api/jobs/{submission_id}/stop", {}, None).raise_for_status()

    def entries(self, kind: str) -> list[Document]:
        """All `actors`, `nodes` or `placement_groups` that Ray knows of."""
        answer = self.get(f"/api/v0/{kind}", detail="1", limit="1000").raise_for_status().json()
        return list(answer["data"]["result"]["result"])

    def _alive_nodes(self) -> list[Document]:
        try:
            return [node for node in self.entries("nodes") if node["state"] == "ALIVE"]
        except httpx.HTTPError:
            return []

    def _http(self, method: str, path: str, query: Mapping[str, str], body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=120) as client:
            return client.request(method, path, params=query, json=body, headers=headers)


@dataclass(frozen=True)
class RayJob:
    """One submission."""

    cluster: RayCluster
    submission_id: str

    def info(self) -> Document:
        """What Ray says about it."""
        document: Document = self.cluster.get(f"/api/jobs/{self.submission_id}").raise_for_status().json()
        return document

    def log_file(self, name: str) -> str:
        """A file of the log folder of the driver's node, through the dashboard; empty where there is none."""
        node = str(self.info()["driver_node_id"])
        answer = self.cluster.get("/api/v0/logs/file", node_id=node, filename=name, lines="-1", format="text")
        return answer.text if answer.status_code == 200 else ""

    def output(self) -> str:
        """What the driver has printed."""
        return self.log_file(driver_log_file_name(self.submission_id))

    def state(self) -> RunState | None:
        """RunState through the dashboard; None where there is none yet."""
        text = self.log_file(run_state_file_name(self.submission_id))
        return load_run_state(text) if text else None

    def wait_for_state(self, condition: Callable[[RunState], bool]) -> RunState:
        """Waits until RunState says so; fails when the job ends before."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            state = self.state()
            if state is not None and condition(state):
                return state
            assert self.info()["status"] not in ENDED, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)

    def end(self, seconds: float = END_SECONDS) -> Document:
        """Waits for the end; what Ray says then."""
        deadline = time.monotonic() + seconds
        while (info := self.info())["status"] not in ENDED:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)
        return info

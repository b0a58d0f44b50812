"""A client for the Jobs API of the Ray head in this pod, with the few calls that the programs of this package need."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from urllib.parse import quote

from rljob_trainer.errors import TrainerError

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 10.0
CONNECT_SECONDS = 1.0
_UNFINISHED = ("PENDING", "RUNNING")


class RayJobsError(TrainerError):
    """A request to Ray's dashboard failed."""


@dataclass(frozen=True)
class RayJobs:
    """The Ray jobs of the head whose dashboard listens on `port` of this machine. `token`: None without
    authentication."""

    port: int
    token: str | None

    def is_listening(self) -> bool:
        """Whether the dashboard accepts connections, even if it is too busy to respond."""
        try:
            socket.create_connection((HOST, self.port), timeout=CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def unfinished(self) -> list[str]:
        """Returns the submission ids of running and pending Ray jobs. Raises RayJobsError."""
        jobs = self._call("GET", "/api/jobs/")
        if not isinstance(jobs, list):
            raise RayJobsError(f"Ray's dashboard: expected a list of jobs (seen: {jobs!r:.200})")
        return [
            identifier
            for job in jobs
            if isinstance(job, dict)
            and job.get("status") in _UNFINISHED
            and isinstance(identifier := job.get("submission_id"), str)
        ]

    def stop(self, submission_id: str) -> bool:
        """Asks Ray to stop a Ray job. Returns False if the Ray job has no process yet. Raises RayJobsError."""
        content = self._call("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop")
        return isinstance(content, dict) and content.get("stopped") is True

    def _call(self, method: str, path: str) -> object:
        # urllib would use the proxy that the job's environment may set.
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {self.token}"} if self.token else {})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            if response.status != http.client.OK:
                raise RayJobsError(f"Ray's dashboard: {method} {path} returned {response.status} ({text[:200]})")
            content: object = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RayJobsError(f"Ray's dashboard: {method} {path} failed ({error})") from error
        finally:
            connection.close()
        return content

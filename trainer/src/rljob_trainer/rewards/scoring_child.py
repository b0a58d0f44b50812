"""The parent's side of one scoring process: a child process that replies to its frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_trainer.processes.child_process import ChildProcess, InvalidReply, Reply
from rljob_trainer.processes.wire import encode
from rljob_trainer.rewards.base import ScorerSpec

PROGRAM = "rljob_trainer.rewards.scoring_program"


class ScoringChild(ChildProcess):
    """One process that runs `scoring_program`."""

    def __init__(
        self,
        spec: ScorerSpec,
        log_file: Path,
        environment: Mapping[str, str],
        timeout_seconds: float,
        *,
        probes_service: bool,
    ) -> None:
        """`timeout_seconds`: of a call. `probes_service`: whether the scorer first tries the service that it calls."""
        super().__init__(PROGRAM, log_file, environment, "scores")
        self._tokens_without_reply: list[str] = []
        """The tokens of the calls that have no reply yet, in the order in which they were sent."""
        [self._own_token] = self.send(encode([type(spec).__name__, vars(spec), timeout_seconds, probes_service]))

    def send_calls(self, frames: Sequence[bytes]) -> None:
        """Queues the frames of calls; see `ChildProcess.send`."""
        self._tokens_without_reply.extend(self.send(*frames))

    def receive_results(self) -> list[tuple[int | None, object]]:
        """The replies since the last call. A reply has the number of its call among those without a reply, from 0, or
        None if it is about the process itself. Anything else is an `InvalidReply`."""
        return [self._result(reply) for reply in self.receive()]

    def _result(self, reply: Reply | InvalidReply) -> tuple[int | None, object]:
        if isinstance(reply, Reply) and reply.token == self._own_token:
            return None, reply.value
        if isinstance(reply, InvalidReply) or reply.token not in self._tokens_without_reply:
            return None, InvalidReply()
        number = self._tokens_without_reply.index(reply.token)
        del self._tokens_without_reply[number]
        return number, reply.value

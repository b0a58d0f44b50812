"""The parent's side of one scoring process: a child process that replies to its frames in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from rljob_trainer.processes.child_process import ChildProcess, InvalidReply, Reply
from rljob_trainer.processes.wire import encode
from rljob_trainer.rewards.base import ScorerSpec

PROGRAM = "rljob_trainer.rewards.scoring_program"


class ScoringChild(ChildProcess):
    """One process that runs `scoring_program`."""

    def __init__(self, spec: ScorerSpec, log_file: Path, environment: Mapping[str, str]) -> None:
        super().__init__(PROGRAM, log_file, environment, "scores")
        self._tokens_without_reply: deque[str] = deque()
        """The tokens of the frames that have no reply yet, in order."""
        self.send(encode([type(spec).__name__, vars(spec)]))

    def send(self, *frames: bytes) -> list[str]:
        """Queues frames; see `ChildProcess.send`."""
        tokens = super().send(*frames)
        self._tokens_without_reply.extend(tokens)
        return tokens

    def receive_results(self) -> list[object]:
        """The replies to frames since the last call, in order; `InvalidReply` for anything else."""
        return [self._result(reply) for reply in self.receive()]

    def _result(self, reply: Reply | InvalidReply) -> object:
        expected = self._tokens_without_reply
        if isinstance(reply, InvalidReply) or not expected or reply.token != expected[0]:
            return InvalidReply()
        expected.popleft()
        return reply.value

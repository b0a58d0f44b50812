"""What `rljob run` says about the end of the trainer."""

from __future__ import annotations

import pytest

from rljob_api.run_state import RunPhase, RunState
from rljob_api.v1alpha1.status import CheckpointStatus, Progress
from rljob_cli.local.run import explain_exit
from rljob_testing.messages import Mentions


@pytest.mark.parametrize(
    ("code", "word"),
    [(1, "code failed"), (2, "configuration"), (3, "unexpectedly"), (137, "out of memory"), (143, "signal 15")],
)
def test_every_exit_code_is_explained(code: int, word: str) -> None:
    assert explain_exit(code, None, was_killed_on_request=False) == Mentions(word)


@pytest.mark.parametrize(
    ("step", "checkpoint_step", "part"),
    [
        (0, None, "completed no step"),
        (4, None, "4 completed steps are lost"),
        (4, 2, "steps after the checkpoint of step 2 are lost"),
        (4, 4, "all completed steps are in the newest checkpoint"),
    ],
)
def test_a_second_stop_request_says_what_is_lost(step: int, checkpoint_step: int | None, part: str) -> None:
    time = "2026-03-01T12:00:00Z"
    saved = None
    if checkpoint_step is not None:
        saved = CheckpointStatus(step=checkpoint_step, uri="file:///x", digest="sha256:1", saved_at=time)
    state = RunState(
        job_name="job",
        attempt=1,
        phase=RunPhase.RUNNING,
        progress=Progress(step=step, total_steps=10, updated_at=time),
        checkpoint=saved,
        written_at=time,
    )
    assert explain_exit(137, state, was_killed_on_request=True) == Mentions("second request", part)

"""A job whose time is over is deleted only as it was when that was decided."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rljob_api.constants import ANNOTATION_RETRY
from rljob_operator.kube.objects import JOBS
from rljob_testing.controller_in_memory import KEY, ControllerInMemory, Json, controller_settings
from rljob_testing.valid_job import Wire, edited


def changed_meanwhile(folder: Path, edits: Wire) -> tuple[list[str], Json]:
    """The requests of the pass that deletes a job, which somebody changes just before, and of the next one; the job."""
    settings = controller_settings(folder)

    async def made() -> tuple[list[str], Json]:
        world = ControllerInMemory(settings)
        world.submit("job", {"spec.runPolicy.ttlSecondsAfterFinished": 60, "spec.checkpoint": {}})
        await world.relist()
        await world.passes(KEY, 1)
        world.clock.pass_by(61)
        world.api.interrupted = "delete rljobs"
        world.api.in_between = lambda: world.api.put(JOBS, edited(world.api.objects[JOBS, "job"], edits))
        calls = await world.passes(KEY, 2)
        await world.close()
        return calls, world.api.objects[JOBS, "job"]

    return asyncio.run(made())


@pytest.mark.parametrize(
    ("edits", "patched"),
    [
        ({"metadata.annotations": {ANNOTATION_RETRY: "now"}}, True),
        ({"spec.runPolicy.ttlSecondsAfterFinished": 3600}, False),
    ],
    ids=["another attempt is asked for", "it is to be kept for longer"],
)
def test_what_is_asked_for_before_the_deletion_wins(tmp_path: Path, edits: Wire, *, patched: bool) -> None:
    calls, job = changed_meanwhile(tmp_path, edits)
    assert calls.count("delete rljobs") == 1
    assert ("patch rljobs" in calls) == patched
    assert edited(job, edits) == job

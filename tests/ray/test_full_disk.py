"""When storage becomes full, the save fails with the numbers of bytes, earlier checkpoints stay, and free space is all
that is needed to continue."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_testing.training import training_runs
from rljob_trainer.checkpoints.load import find_newest_complete

pytestmark = [pytest.mark.ray, pytest.mark.long]

# A checkpoint holds 119k parameters three times (weights and two moments), 4 bytes each: 1.4 MB.
ROOM_FOR_TWO = "3400k"
ROOM_FOR_ALL = "16m"


@pytest.fixture
def small_storage(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own with space for two checkpoints."""
    folder = tmp_path / "storage"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounting = mount(folder, f"size={ROOM_FOR_TWO}")
    if mounting.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounting.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def mount(folder: Path, options: str) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_full_storage_fails_the_save_and_keeps_earlier_checkpoints(
    run_trainer: training_runs.RunTrainer, cluster: str, small_storage: Path
) -> None:
    job = training_runs.small_job()
    run = run_trainer(job, cluster, RLJOB_CHECKPOINT_FOLDER=str(small_storage))
    assert run.exit_code == 1, run.terminal
    state = run.files.state()
    assert state.phase == "Failed"
    assert state.error is not None
    for text in (run.terminal, state.error.message):
        match = re.search(r"(/\S+): .*[:;] ([\d,]+) bytes needed, ([\d,]+) bytes free", text)
        assert match, text
        assert match[1].startswith(str(small_storage))
        needed, free = (int(number.replace(",", "")) for number in match.groups()[1:])
        assert needed > free
        assert 1_400_000 < needed < 1_600_000
    assert state.checkpoint is not None
    assert state.checkpoint.step == 2
    assert folders(small_storage) == ["step-00000001.start-0001", "step-00000002.start-0001"]

    assert mount(small_storage, f"remount,size={ROOM_FOR_ALL}").returncode == 0
    found = find_newest_complete(small_storage, 2)
    assert found is not None
    assert (found.manifest.step, found.rejected) == (2, ())
    resumed = run_trainer(job, cluster, attempt=2, RLJOB_CHECKPOINT_FOLDER=str(small_storage))
    assert resumed.exit_code == 0, resumed.terminal
    assert "resumed from step 2 (step-00000002.start-0001)" in resumed.terminal
    assert resumed.files.training_steps() == [1, 2, 3, 4]
    assert folders(small_storage)[-1] == "step-00000004.start-0002"


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))

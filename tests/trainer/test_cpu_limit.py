"""CPU cores that a container may use, read from the files of control groups version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rljob_trainer.control_groups import num_usable_cores


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("max 100000\n", 16), ("400000 100000\n", 4), ("250000 100000\n", 2), ("50000 100000\n", 1), ("", 16)],
)
def test_a_version_2_container_sees_its_own_group_at_the_top(tmp_path: Path, cpu_max: str, expected: int) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": cpu_max}
    assert num_usable_cores(write(tmp_path, files)) == expected


def test_the_tightest_parent_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/one/ray\n",
        "sys/fs/cgroup/pods/one/ray/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pods/one/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/pods/cpu.max": "800000 100000\n",
    }
    assert num_usable_cores(write(tmp_path, files)) == 3


@pytest.mark.parametrize(("quota", "expected"), [("-1", 16), ("300000", 3)])
def test_a_version_1_container_is_read(tmp_path: Path, quota: str, expected: int) -> None:
    # The path is the host's and does not exist inside the container.
    files = {
        "proc/self/cgroup": "12:memory:/kubepods/pod1/x\n4:cpu,cpuacct:/kubepods/pod1/x\n1:name=systemd:/x\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota + "\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert num_usable_cores(write(tmp_path, files)) == expected


def test_cores_outside_the_affinity_mask_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000\n"}
    assert num_usable_cores(write(tmp_path, files)) == 2


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert num_usable_cores(tmp_path) == 16

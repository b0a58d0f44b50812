"""Memory that a container can still have, in the files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.host_memory import available_host_bytes

MACHINE = {"proc/meminfo": "MemTotal:  32000 kB\nMemFree: 2000 kB\nMemAvailable:   16000 kB\n"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_without_limits(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "1\n"}
    assert available_host_bytes(write(tmp_path, MACHINE | files)) == 16_000 * 1024


def test_the_tightest_group_above_counts_and_copies_of_files_do_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/one\n",
        "sys/fs/cgroup/pods/one/memory.max": "9000000\n",
        "sys/fs/cgroup/pods/one/memory.current": "1000000\n",
        "sys/fs/cgroup/pods/memory.max": "8000000\n",
        "sys/fs/cgroup/pods/memory.current": "5000000\n",
        "sys/fs/cgroup/pods/memory.stat": "anon 4000000\nactive_file 300000\ninactive_file 200000\n",
    }
    assert available_host_bytes(write(tmp_path, MACHINE | files)) == 3_500_000


def test_the_first_version(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/one\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "6000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
    }
    assert available_host_bytes(write(tmp_path, MACHINE | files)) == 4_500_000


def test_nothing_says(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) is None

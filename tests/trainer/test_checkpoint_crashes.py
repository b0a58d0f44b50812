"""A process that is killed anywhere in a save loses nothing that was committed, and leaves nothing behind for good."""

from __future__ import annotations

from collections import Counter

import pytest

from rljob_testing.checkpoint_crashes import CrashResult, sweep


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> list[CrashResult]:
    return sweep(tmp_path_factory.mktemp("sweep"))


@pytest.mark.parametrize("hard_links", [True, False], ids=["hard links", "no hard links"])
def test_killed_at_every_operation_resumes_from_the_newest_complete_checkpoint(
    all_results: list[CrashResult], hard_links: bool
) -> None:
    results = [result for result in all_results if result.hard_links == hard_links]
    # Two saves of two shards and a manifest, one start file: 7 durable files, of which shards have header and data.
    counts = Counter(result.operation for result in results if not result.mid_write)
    assert counts["write"] == 4 * 2 + 3
    assert counts["link"] == 3
    # 7 files; their folders: 4 shards, 3 created files, 2 new checkpoint folders; and the two that are removed:
    # before the files go and after.
    assert counts["fsync"] == 7 + 7 + 2 + 2 * 2
    assert counts["rmdir"] == 2
    for result in results:
        assert result.was_killed, result
        assert result.tensors_equal, result
        assert result.resumed_step in (20, 30, 40), result
        assert result.resumed_step >= result.committed_step, result
        assert len(result.left_at_end) == 3, result
        assert result.left_at_end[0] == "starts", result
        assert result.left_at_end[-1] == "step-00000050.start-0003", result
        aborted_commit = "manifest.json is empty"
        assert not result.rejected or (not hard_links and aborted_commit in result.rejected[0]), result
    assert {result.resumed_step for result in results} == {20, 30, 40}

"""The cache holds the newest state, whatever order events and listings come in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, WORKLOADS, ResourceType
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.raw_json import JsonObject, text_at


def pod(version: int | str, name: str = "p", uid: str = "p1", job: str = "j1", namespace: str = "team") -> JsonObject:
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "resourceVersion": str(version),
            "labels": {"rljob.dev/job-uid": job},
            "managedFields": [{"manager": "kubelet"}],
        },
    }


def replace(
    cache: ObjectCache, kind: ResourceType, namespace: str | None, listed: Sequence[JsonObject], version: str
) -> tuple[JsonObject, ...]:
    """Stores a whole listing, in pages of two objects."""
    found: set[tuple[str, str]] = set()
    for start in range(0, len(listed), 2):
        found |= cache.add_listed(kind, listed[start : start + 2])
    return cache.complete_listing(kind, namespace, found, version)


def filled() -> ObjectCache:
    cache = ObjectCache((None,))
    for kind in (JOBS, CLUSTERS, PODS):
        replace(cache, kind, None, [], "1")
    return cache


def versions(cache: ObjectCache, job: str = "j1") -> list[str]:
    return [text_at(raw, "metadata", "resourceVersion") for raw in cache.of_job(PODS, "team", job)]


def test_events_in_any_order_end_in_the_newest_state() -> None:
    events = [("ADDED", 5), ("MODIFIED", 6), ("MODIFIED", 7), ("MODIFIED", 7)]
    for order in itertools.permutations(events):
        cache = filled()
        for kind, version in order:
            cache.store(PODS, kind, pod(version))
        assert versions(cache) == ["7"]


def test_a_late_event_does_not_bring_back_a_deleted_object() -> None:
    events = [("ADDED", 5), ("MODIFIED", 6), ("DELETED", 7)]
    for order in itertools.permutations(events):
        cache = filled()
        for kind, version in order:
            cache.store(PODS, kind, pod(version))
        assert versions(cache) == [], order


def test_only_a_newer_version_is_a_change() -> None:
    cache = filled()
    assert cache.store(PODS, "ADDED", pod(5))
    assert not cache.store(PODS, "MODIFIED", pod(5)), "twice"
    assert not cache.store(PODS, "MODIFIED", pod(4)), "late"
    assert cache.store(PODS, "MODIFIED", pod(6))
    assert cache.store(PODS, "DELETED", pod(7))
    assert not cache.store(PODS, "DELETED", pod(7))


def test_the_deletion_of_a_former_object_does_not_remove_its_successor() -> None:
    cache = filled()
    cache.store(PODS, "ADDED", pod(5, uid="old"))
    cache.store(PODS, "ADDED", pod(9, uid="new"))
    assert not cache.store(PODS, "DELETED", pod(8, uid="old"))
    assert not cache.store(PODS, "MODIFIED", pod(7, uid="old"))
    assert versions(cache) == ["9"]


def test_a_recreated_object_is_a_change() -> None:
    cache = filled()
    cache.store(PODS, "ADDED", pod(5, uid="old"))
    cache.store(PODS, "DELETED", pod(6, uid="old"))
    assert cache.store(PODS, "ADDED", pod(7, uid="new"))
    assert versions(cache) == ["7"]


def test_an_object_that_left_the_selection_can_come_back() -> None:
    cache = filled()
    cache.store(PODS, "ADDED", pod(5))
    cache.store(PODS, "DELETED", pod(6))
    assert cache.store(PODS, "ADDED", pod(8))


def test_a_listing_repairs_missed_events() -> None:
    cache = filled()
    cache.store(PODS, "ADDED", pod(5, name="gone", uid="gone"))
    cache.store(PODS, "ADDED", pod(6, name="changed", uid="changed"))
    cache.store(PODS, "ADDED", pod(25, name="young", uid="young"))
    cache.store(PODS, "ADDED", pod(26, name="newer", uid="newer"))
    cache.store(PODS, "DELETED", pod(27, name="ended", uid="ended"))
    listed = [
        pod(12, name="changed", uid="changed"),
        pod(13, name="missed", uid="missed"),
        pod(14, name="newer", uid="newer"),
        pod(15, name="ended", uid="ended"),
    ]
    removed = replace(cache, PODS, None, listed, "20")
    found = {text_at(raw, "metadata", "name"): text_at(raw, "metadata", "resourceVersion") for raw in removed}
    assert found == {"gone": "5"}
    # By name: changed, missed, newer and young; a deletion after the listing was made is not undone by it.
    assert versions(cache) == ["12", "13", "26", "25"]
    assert replace(cache, PODS, None, [], "30") != ()
    assert versions(cache) == []


def test_a_listing_of_one_namespace_does_not_change_others() -> None:
    cache = ObjectCache(("team", "other"))
    cache.store(PODS, "ADDED", pod(5))
    cache.store(PODS, "ADDED", pod(6, namespace="other"))
    replace(cache, PODS, "other", [], "20")
    assert versions(cache) == ["5"]
    assert cache.of_job(PODS, "other", "j1") == ()


def test_nothing_is_complete_before_all_was_listed() -> None:
    cache = ObjectCache(("team", "other"))
    cache.store(JOBS, "ADDED", pod(5))
    for kind, namespace in itertools.product((JOBS, CLUSTERS, PODS), ("team", "other")):
        assert not cache.is_complete
        replace(cache, kind, namespace, [], "9")
    assert cache.is_complete


def test_an_unknown_kind_is_complete_and_empty() -> None:
    cache = ObjectCache((None,))
    cache.store(CLUSTERS, "ADDED", pod(5))
    cache.note_missing(CLUSTERS)
    replace(cache, JOBS, None, [], "9")
    replace(cache, PODS, None, [], "9")
    assert (cache.is_complete, cache.is_missing(CLUSTERS), cache.of_job(CLUSTERS, "team", "j1")) == (True, True, ())
    replace(cache, CLUSTERS, None, [], "10")
    assert not cache.is_missing(CLUSTERS)


def test_objects_without_read_permission_are_stale() -> None:
    cache = ObjectCache(("team", "other"))
    cache.store(PODS, "ADDED", pod(5))
    cache.note_forbidden(PODS, "team", "pods is forbidden")
    assert (cache.forbidden("team"), cache.forbidden("other"), versions(cache)) == ("pods is forbidden", None, ["5"])
    replace(cache, PODS, "team", [pod(6)], "9")
    assert (cache.forbidden("team"), versions(cache)) == (None, ["6"])


def test_objects_are_found_by_the_uid_of_their_job_and_trimmed() -> None:
    cache = filled()
    cache.store(PODS, "ADDED", pod(5, name="b", uid="b"))
    cache.store(PODS, "ADDED", pod(6, name="a", uid="a"))
    cache.store(PODS, "ADDED", pod(7, name="c", uid="c", job="j2"))
    assert [text_at(raw, "metadata", "name") for raw in cache.of_job(PODS, "team", "j1")] == ["a", "b"]
    assert versions(cache, "j2") == ["7"]
    cache.store(PODS, "MODIFIED", pod(8, name="c", uid="c", job="j1"))
    assert (versions(cache, "j2"), len(versions(cache))) == ([], 3)
    kept = cache.of_job(PODS, "team", "j1")[0]["metadata"]
    assert isinstance(kept, dict)
    assert "managedFields" not in kept
    assert (cache.num_objects, set(cache.uids())) == (3, {"a", "b", "c"})


def test_finished_jobs_are_kept_as_trimmed_copies() -> None:
    def job(version: int, **annotations: str) -> JsonObject:
        metadata = {"name": "j", "namespace": "team", "uid": "j1", "generation": 1, "annotations": annotations}
        return {
            "metadata": {**metadata, "resourceVersion": str(version)},
            "spec": {"runPolicy": {"ttlSecondsAfterFinished": 9}, "pools": [1, 2, 3]},
            "status": {"observedGeneration": 1, "gpus": 2, "attempts": [1], "result": {"cleanedUpAt": "x", "at": "y"}},
        }

    cache = filled()
    cache.store(JOBS, "ADDED", job(5))
    assert cache.is_trimmed("team", "j")
    kept = cache.job("team", "j")
    assert kept is not None
    assert (kept["spec"], kept["status"]) == (
        {"runPolicy": {"ttlSecondsAfterFinished": 9}},
        {"observedGeneration": 1, "gpus": 2, "result": {"cleanedUpAt": "x", "at": "y"}},
    )
    retried = job(6, **{"rljob.dev/retry-requested-at": "now"})
    cache.store(JOBS, "MODIFIED", retried)
    assert not cache.is_trimmed("team", "j")
    found = cache.job("team", "j")
    assert found is not None
    assert found["spec"] == retried["spec"]
    cache.store(JOBS, "MODIFIED", job(7))
    cache.store(JOBS, "DELETED", job(8))
    assert not cache.is_trimmed("team", "j")


def workload(version: int, name: str, owner: str = "RayCluster", created: str = "2026-01-31T12:00:00Z") -> JsonObject:
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": name,
            "resourceVersion": str(version),
            "creationTimestamp": created,
            "labels": {"kueue.x-k8s.io/job-uid": "c1", "team": "a"},
            "ownerReferences": [{"kind": owner, "uid": "c1", "controller": True}],
        },
        "spec": {"podSets": [{"template": {}}]},
        "status": {
            "conditions": [{"type": "QuotaReserved", "status": "False"}],
            "admissionChecks": [{"name": "capacity", "state": "Pending", "podSetUpdates": [1]}],
            "resourceRequests": [1],
        },
    }


def test_the_newest_workload_of_a_cluster_is_found_without_its_spec() -> None:
    cache = filled()
    assert cache.store(WORKLOADS, "ADDED", workload(6, "new", created="2026-01-31T12:00:01Z"))
    assert cache.store(WORKLOADS, "ADDED", workload(9, "old"))
    assert not cache.store(WORKLOADS, "ADDED", workload(7, "of a batch job", owner="Job"))
    found = cache.workload_of("team", "c1")
    assert found is not None
    assert (text_at(found, "metadata", "name"), set(found)) == ("new", {"metadata", "status"})
    assert found["status"] == {
        "conditions": [{"type": "QuotaReserved", "status": "False"}],
        "admissionChecks": [{"name": "capacity", "state": "Pending"}],
    }
    assert (cache.workload_of("team", "c2"), cache.workload_of("other", "c1"), cache.num_objects) == (None, None, 2)
    replace(cache, WORKLOADS, None, [], "20")
    assert cache.workload_of("team", "c1") is None


def test_missing_or_forbidden_workloads_change_nothing_for_jobs() -> None:
    cache = ObjectCache((None,))
    cache.note_forbidden(WORKLOADS, None, "workloads is forbidden")
    assert (cache.is_complete, cache.forbidden("team")) == (False, None)
    for kind in (JOBS, CLUSTERS, PODS):
        replace(cache, kind, None, [], "1")
    assert cache.is_complete
    cache.note_missing(WORKLOADS)
    assert cache.is_complete


@pytest.mark.parametrize("version", ["", "v-7"])
def test_of_incomparable_versions_the_last_counts(version: str) -> None:
    cache = filled()
    cache.store(PODS, "ADDED", pod(5))
    assert cache.store(PODS, "MODIFIED", pod(version))
    assert versions(cache) == [version]
    replace(cache, PODS, None, [], "9")
    assert versions(cache) == []

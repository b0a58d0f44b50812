"""A job on fewer nodes: the largest valid number, and the cost of finding it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api import elastic
from rljob_api.elastic import largest_valid_nodes, with_nodes
from rljob_api.rule import Violation
from rljob_api.v1alpha1.rules import violations
from rljob_api.v1alpha1.run_policy import Elastic, RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.operator import inputs

ONE_EACH = {"runPolicy": {"elastic": {"minNodes": 1}}}


def one_pool(nodes: int, gpus_per_node: int = 1) -> RLJobSpec:
    """One response for each GPU."""
    num_gpus = nodes * gpus_per_node
    pool = {"pools[0].nodes": nodes, "pools[0].gpusPerNode": gpus_per_node, "roles.rollout.tensorParallel": 1}
    return inputs.spec({**pool, "training.batchSize": num_gpus, "training.rollout.groupSize": 4, **ONE_EACH})


def two_pools(actor: int, critic: int, batch_size: int) -> RLJobSpec:
    """PPO, with the critic on a pool of its own; one GPU on each node."""
    return inputs.spec(
        {
            "pools[0].nodes": actor,
            "pools[0].gpusPerNode": 1,
            "pools[1]": {"name": "value", "nodes": critic, "gpusPerNode": 1},
            "roles.critic.pool": "value",
            "training.algorithm": {"type": "PPO"},
            "training.batchSize": batch_size,
            "training.rollout.groupSize": 1,
            **ONE_EACH,
        }
    )


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[RLJobSpec]:
    """The jobs that were checked as a whole."""
    jobs: list[RLJobSpec] = []

    def recorded(job: RLJobSpec) -> object:
        jobs.append(job)
        return violations(job)

    monkeypatch.setattr(elastic, "violations", recorded)
    return jobs


@pytest.mark.parametrize(
    ("job", "available", "most"),
    [
        (one_pool(1024), {"main": 1023}, {"main": 512}),
        (one_pool(96, 8), {"main": 95}, {"main": 64}),
        (two_pools(32, 32, 64), {"main": 31, "value": 32}, {"main": 16, "value": 32}),
        (two_pools(64, 64, 64), {"main": 63, "value": 64}, {"main": 32, "value": 64}),
        (two_pools(16, 64, 64), {"main": 15, "value": 63}, {"main": 8, "value": 32}),
        (two_pools(1024, 1024, 1024), {"main": 1, "value": 1023}, {"main": 1, "value": 512}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_large_job_finds_its_next_size_with_one_check_and_caches_it(
    checked: list[RLJobSpec], job: RLJobSpec, available: Mapping[str, int], most: Mapping[str, int]
) -> None:
    assert largest_valid_nodes(job, available) == most
    assert len(checked) == 1
    # A count that changes nothing, such as pods of no pool, is the same question.
    assert [largest_valid_nodes(job, {**available, "head": number}) for number in range(3)] == [most] * 3
    assert len(checked) == 1


def test_a_job_that_fits_nowhere_is_not_checked(checked: list[RLJobSpec]) -> None:
    # 32 responses, which do not divide by 5, 6 or 7 nodes.
    job = one_pool(8)
    job = job.model_copy(update={"run_policy": RunPolicy(elastic=Elastic(min_nodes=5))})
    assert largest_valid_nodes(job, {"main": 7}) is None
    assert checked == []


def test_the_search_ends_if_a_rule_between_pools_forbids_everything(
    checked: list[RLJobSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden = Violation(rule="none", path=(), wrong="", advice="")

    def forbids(job: RLJobSpec) -> object:
        checked.append(job)
        return (forbidden,)

    monkeypatch.setattr(elastic, "violations", forbids)
    assert largest_valid_nodes(two_pools(64, 64, 64 * 63 * 62 * 60), {"main": 64, "value": 64}) is None
    assert 1 < len(checked) <= elastic.MAX_CHECKS


@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10, 12])] * 2),
    gpus=st.tuples(*[st.sampled_from([1, 2, 4])] * 2),
    there=st.tuples(*[st.integers(0, 12)] * 2),
    least=st.integers(1, 3),
)
def test_no_valid_choice_has_more_gpus(
    sizes: tuple[int, int], gpus: tuple[int, int], there: tuple[int, int], least: int
) -> None:
    # 480 responses: all of these sizes divide them; 7, 9 and 11 nodes do not, nor do 9 x 4 GPUs.
    whole = two_pools(*sizes, batch_size=480)
    pools = [pool.model_copy(update={"gpus_per_node": number}) for pool, number in zip(whole.pools, gpus, strict=True)]
    policy = RunPolicy(elastic=Elastic(min_nodes=least))
    job = whole.model_copy(update={"pools": tuple(pools), "run_policy": policy})
    assert not violations(job)

    names = [pool.name for pool in job.pools]
    ranges = [range(min(least, most), min(most, number) + 1) for most, number in zip(sizes, there, strict=True)]
    valid = [
        choice
        for choice in itertools.product(*ranges)
        if not violations(with_nodes(job, dict(zip(names, choice, strict=True))))
    ]
    found = largest_valid_nodes(job, dict(zip(names, there, strict=True)))
    assert (found is None) == (valid == [])
    if found is not None:
        assert tuple(found.values()) in valid
        most = max(sum(count * number for count, number in zip(choice, gpus, strict=True)) for choice in valid)
        assert sum(count * number for count, number in zip(found.values(), gpus, strict=True)) == most

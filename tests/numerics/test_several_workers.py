"""An advantage on tokens is tried on several workers at once, and rejected if it depends on which worker has which
rows. Also the test workers themselves, which are threads.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rljob_api.v1alpha1.advantage import Advantage, AdvantageType, Function
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.training import user_algorithms
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import AdvantageEstimator, Level, Reduce
from rljob_trainer.algorithms.several_workers import on_workers
from rljob_trainer.errors import ConfigurationError

GROUP_SIZES = (1, 2, 3, 8)
MODULE = """
import torch
from rljob_trainer.algorithms import token_advantage, whitened

@token_advantage(needs=["old_logprobs", "ref_logprobs"])
def of_all_tokens(inputs, reduce):
    return whitened(inputs.columns["old_logprobs"] - 2 * inputs.columns["ref_logprobs"], reduce)

@token_advantage()
def leave_one_out(inputs, reduce):
    sums_G, counts_G = torch.zeros(2, 64)
    sums_G = reduce.sum(sums_G.index_add(0, inputs.groups_B, inputs.rewards_B))[inputs.groups_B]
    counts_G = reduce.sum(counts_G.index_add(0, inputs.groups_B, torch.ones_like(inputs.rewards_B)))[inputs.groups_B]
    return inputs.segments.spread(inputs.rewards_B - (sums_G - inputs.rewards_B) / (counts_G - 1))

@token_advantage()
def of_own_tokens(inputs, reduce):
    rewards_N = inputs.segments.spread(inputs.rewards_B)
    return rewards_N - rewards_N.mean()

@token_advantage()
def of_own_peers(inputs, reduce):
    is_peer_BB = inputs.groups_B[:, None] == inputs.groups_B
    return inputs.segments.spread(inputs.rewards_B - (is_peer_BB * inputs.rewards_B).sum(1) / is_peer_BB.sum(1))

@token_advantage()
def by_own_longest(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B / max(inputs.segments.lengths, default=1))

@token_advantage()
def by_own_best(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B / max(inputs.rewards_B.tolist(), default=1))

@token_advantage(needs="old_logprobs")
def of_own_column(inputs, reduce):
    return inputs.columns["old_logprobs"] - inputs.columns["old_logprobs"].mean()

@token_advantage()
def in_place(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B.sub_(inputs.rewards_B.mean()))

@token_advantage()
def only_with_rows(inputs, reduce):
    if not inputs.segments.num_rows:
        return torch.zeros(0)
    return inputs.segments.spread(inputs.rewards_B - reduce.max(inputs.rewards_B.max()))

@token_advantage()
def for_each_row(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B - sum(reduce.sum(each) for each in inputs.rewards_B))

@token_advantage()
def of_rows(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B - reduce.sum(inputs.rewards_B))

@token_advantage()
def of_another_dtype(inputs, reduce):
    largest = reduce.max(inputs.rewards_B.max() if inputs.segments.num_rows else torch.tensor(-99))
    return inputs.segments.spread(inputs.rewards_B - largest)

@token_advantage()
def of_several_rows(inputs, reduce):
    if inputs.segments.num_rows == 2:
        raise KeyError("two rows")
    return inputs.segments.spread(inputs.rewards_B - reduce.sum(inputs.rewards_B.sum()))
"""
DEPENDS = r"advantage.* when other rows were on another worker.*use `reduce`"
BAD_ADVANTAGES = [
    ("of_own_tokens", DEPENDS),
    ("of_own_peers", DEPENDS),
    ("by_own_longest", DEPENDS),
    ("by_own_best", DEPENDS),
    ("of_own_column", DEPENDS),
    ("in_place", DEPENDS),
    (
        "only_with_rows",
        r"raised ValueError;(?s:.)*reduce\.max(?s:.)*another worker.* without this call "
        r"\(max of \[\] float32\); (?s:.)*\n\(.*three workers",
    ),
    ("for_each_row", r"another worker.* without this call \(sum of \[\] float32\)"),
    ("of_rows", r"\(sum of \[0\] float32, sum of \[2\] float32, sum of \[6\] float32\); make the same calls"),
    ("of_another_dtype", r"\(max of \[\] float32, max of \[\] int64\)"),
    ("of_several_rows", r"raised KeyError;(?s:.)*two rows(?s:.)*\n\(.*three workers: two that share"),
]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module of this test."""
    name = f"advantages_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def estimator_of(path: str, group_size: int = 4) -> AdvantageEstimator:
    advantage = Advantage(type=AdvantageType.FUNCTION, function=Function(path=path))
    return advantage_estimator(resolve_algorithm(Algorithm(advantage=advantage)), group_size)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_an_advantage_that_communicates_is_accepted(module: str, group_size: int) -> None:
    for path in (f"{module}:of_all_tokens", user_algorithms.BASELINE_ON_TOKENS_PATH):
        assert estimator_of(path, group_size).level is Level.TOKEN


@pytest.mark.parametrize(("name", "message"), BAD_ADVANTAGES)
def test_an_advantage_that_depends_on_the_distribution_of_rows_is_rejected(
    module: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        estimator_of(f"{module}:{name}")
    assert str(caught.value).startswith(f"spec.training.algorithm.advantage.function.path: {module}:{name} ")


def test_groups_are_whole_and_of_the_jobs_size(module: str) -> None:
    for group_size in (2, 5):
        estimator_of(f"{module}:leave_one_out", group_size)
    with pytest.raises(ConfigurationError, match=r"NaN.* 12 of 12 tokens"):
        estimator_of(f"{module}:leave_one_out", 1)


def test_all_workers_get_sums_and_largest_values() -> None:
    def both(part: Tensor, reduce: Reduce) -> tuple[list[int], list[int], torch.dtype, torch.dtype]:
        summed, largest = reduce.sum(part), reduce.max(part)
        return summed.tolist(), largest.tolist(), summed.dtype, largest.dtype

    parts = [torch.tensor(each, dtype=torch.int32) for each in ([1, -2], [5, -9], [2, 0])]
    assert on_workers(parts, both) == [([8, -11], [5, 0], torch.int32, torch.int32)] * 3


def test_a_worker_may_change_its_arguments_afterwards() -> None:
    def total(part: Tensor, reduce: Reduce) -> float:
        found = reduce.sum(part)
        part.zero_()
        return float(found)

    assert on_workers([torch.tensor(1.0), torch.tensor(2.0)], total) == [3.0, 3.0]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_others_stop_when_a_worker_fails(failing: int) -> None:
    def work(rank: int, reduce: Reduce) -> Tensor:
        reduce.sum(torch.ones(()))
        if rank == failing:
            raise KeyError(f"of {rank}")
        return reduce.sum(torch.ones(()))

    with pytest.raises(KeyError, match=f"of {failing}"):
        on_workers([0, 1, 2], work, patience_seconds=200)


def test_one_worker_runs_at_a_time() -> None:
    running: list[int] = []

    def work(rank: int, reduce: Reduce) -> None:
        for _ in range(3):
            running.append(rank)
            time.sleep(0.001)
            assert running == [rank]
            running.remove(rank)
            reduce.sum(torch.zeros(()))

    on_workers([0, 1, 2], work)


def test_a_deadlock_of_workers_is_reported() -> None:
    lock = threading.Lock()

    def work(_part: None, reduce: Reduce) -> None:
        if lock.acquire(timeout=5):
            reduce.sum(torch.zeros(()))
            lock.release()

    with pytest.raises(TimeoutError, match=r"after 0\.2 s"):
        on_workers([None, None], work, patience_seconds=0.2)

"""The search for the best mapping, beside trying everything, and how long it takes (bench/planner.py)."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from rljob_bench.report import Bar, Measurement
from rljob_planner.constants import Constants
from rljob_planner.gpus import Cluster, NodeGroup
from rljob_planner.known_gpus import gpu_named
from rljob_planner.known_models import known_model
from rljob_planner.model_shape import ModelShape
from rljob_planner.placement import Schedule
from rljob_planner.search.arrangements import Partition, best_arrangements
from rljob_planner.search.mapping import best_mappings, search
from rljob_planner.search.set_tables import SetTables
from rljob_planner.workload import Head, Role, RolloutWork, TokenLengths, TrainModel, Workload
from rljob_testing.every_arrangement import (
    ROLLOUT,
    least_costs,
    one_after_the_other,
    one_step_off,
    random_tables,
)
from rljob_testing.every_mapping import EveryMapping

NUM_TABLES = 40
FOUR_ROLES = (Role.ACTOR, Role.ROLLOUT, Role.REF, Role.CRITIC)
NODE_SIZES = (1, 2, 4, *range(8, 65, 8))
TWO_KIND_SIZES = (1, 2, 4, 8, 16, 24, 32)
SMALL = ModelShape("two heads", 8, 1024, 2, 2, 128, 4096, 32000, ties_head=True)
"""Two heads leave few layouts to try one by one."""
CLOSE = 1e-9
"""How far, as a share, sums may be from each other that are added up in another order."""
SECONDS_OF_SEARCH = {128: 2.0, 1024: 10.0}


def search_measurements(*, is_quick: bool) -> tuple[Measurement, ...]:
    """Trying everything takes a minute or two."""
    return (search_equals_everything(is_quick=is_quick), search_seconds())


def search_equals_everything(*, is_quick: bool) -> Measurement:
    """Of every grouping of roles on kinds of GPUs the best cost, in both schedules."""
    rows: dict[str, tuple[float | None, ...]] = {
        "random tables, 4 roles, 64 GPUs": _of_tables(NODE_SIZES, (64,), 10 if is_quick else NUM_TABLES),
        "random tables, 4 roles, 32 + 32 GPUs": _of_tables(TWO_KIND_SIZES, (32, 32), 1 if is_quick else 6),
    }
    one_head = replace(SMALL, name="one head", num_heads=1, num_kv_heads=1, head_size=256)
    fast = replace(gpu_named("H100"), memory_bytes=6.0 * 2**30)
    slow = replace(gpu_named("A100-80"), memory_bytes=5.5 * 2**30)
    cases: dict[str, tuple[ModelShape, Cluster]] = {
        "models, 4 roles, 1 x 16 GPUs": (one_head, (NodeGroup(1, 16, fast),)),
        "models, 4 roles, 4 x 2 + 2 x 2 GPUs of two kinds": (one_head, (NodeGroup(4, 2, fast), NodeGroup(2, 2, slow))),
    }
    if not is_quick:
        cases["models, 4 roles, 2 x 8 GPUs, with sequence and tensor parallelism"] = SMALL, (NodeGroup(2, 8, fast),)
    for name, (shape, cluster) in cases.items():
        rows[name] = _of_models(shape, cluster)
    num_different = sum(row[2] or 0.0 for row in rows.values())
    bar = Bar("groupings whose best is not that of trying everything", num_different, 0)
    header = ("tried one by one", "groupings", "different", "search, s", "everything, s")
    return Measurement("The best mapping: by search, and by trying everything", header, rows, (bar,))


def search_seconds() -> Measurement:
    """CPU seconds of a search, tables included: PPO with a reward model, five roles, on two kinds of GPUs. Batches of
    840 x 24 responses divide by more sizes than most."""
    rows: dict[str, tuple[float | None, ...]] = {}
    worst = dict.fromkeys(SECONDS_OF_SEARCH, 0.0)
    names = ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B")
    for num_gpus in SECONDS_OF_SEARCH:
        half = num_gpus // 16
        cluster = (NodeGroup(half, 8, gpu_named("H100")), NodeGroup(half, 8, gpu_named("A100-80")))
        for name in names:
            shape = known_model(name)
            assert shape is not None, "a model of the table"
            job = _ppo(shape, tuple(Role), TokenLengths(400.0, 1024, 1200.0, 3072), 840, 24)
            _forget_all()
            begin = time.process_time()
            result = search(job, cluster)
            seconds = time.process_time() - begin
            worst[num_gpus] = max(worst[num_gpus], seconds)
            best = result.candidates[0].seconds if result.candidates else None
            rows[f"{num_gpus:,} GPUs, {name}"] = (seconds, len(result.candidates), best)
    bars = [
        Bar(f"seconds at {num_gpus:,} GPUs, the slowest", worst[num_gpus], limit)
        for num_gpus, limit in SECONDS_OF_SEARCH.items()
    ]
    return Measurement("Seconds of a search", ("search, s", "candidates", "best step, s"), rows, tuple(bars))


def _forget_all() -> None:
    """What earlier searches have left in the planner's caches, so that each is measured as a command's first."""
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper) and each.__module__.startswith("rljob_planner"):
            each.cache_clear()


def _of_tables(sizes: Sequence[int], capacity: Sequence[int], num_tables: int) -> tuple[float, ...]:
    num_tried = num_groupings = num_different = 0
    seconds = [0.0, 0.0]
    for seed in range(num_tables):
        tables = random_tables(Random(seed), 4, sizes, len(capacity))
        num_tried += _num_choices(tables)
        for cost in (one_after_the_other, one_step_off):
            is_alone = cost is one_step_off
            begin = time.process_time()
            found = best_arrangements(
                tables,
                capacity,
                cost,
                roles=15,
                num_wanted=10_000,
                is_allowed=_is_alone if is_alone else _is_any,
            )
            middle = time.process_time()
            expected = least_costs(tables, capacity, cost, 4, rollout_is_alone=is_alone)
            seconds[0] += middle - begin
            seconds[1] += time.process_time() - middle
            num_groupings += len(expected)
            num_different += _num_different([each.cost for each in found], expected)
    return float(num_tried), float(num_groupings), float(num_different), *seconds


def _of_models(shape: ModelShape, cluster: Cluster) -> tuple[float, ...]:
    job = _ppo(shape, FOUR_ROLES, TokenLengths(256.0, 1024, 1024.0, 3072), 64, 8)
    everything = EveryMapping(job, cluster, Constants())
    num_groupings = num_different = 0
    seconds = [0.0, 0.0]
    for schedule in Schedule:
        begin = time.process_time()
        found = best_mappings(SetTables(job, cluster, Constants()), schedule, 10_000)
        middle = time.process_time()
        expected = sorted(everything.fastest(schedule).values())
        seconds[0] += middle - begin
        seconds[1] += time.process_time() - middle
        num_groupings += len(expected)
        num_different += _num_different([each.cost for each in found], expected)
    return float(everything.num_tried), float(num_groupings), float(num_different), *seconds


def _is_alone(partition: Partition) -> bool:
    return ROLLOUT in partition


def _is_any(partition: Partition) -> bool:
    return bool(partition)


def _num_different(found: Sequence[float], expected: Sequence[float]) -> int:
    different = sum(abs(one - other) > CLOSE * other for one, other in zip(found, expected, strict=False))
    return different + abs(len(found) - len(expected))


def _num_choices(tables: Mapping[int, Sequence[object]]) -> int:
    """Of all partitions of four roles, whether or not they have enough GPUs."""
    each = len(tables[1])
    return sum(count * each**num_sets for num_sets, count in ((1, 1), (2, 7), (3, 6), (4, 1)))


def _ppo(shape: ModelShape, roles: Sequence[Role], lengths: TokenLengths, batch_size: int, group_size: int) -> Workload:
    models = {
        Role.ACTOR: TrainModel(shape, is_trained=True, checkpoints_activations=True),
        Role.REF: TrainModel(shape, is_trained=False),
        Role.CRITIC: TrainModel(shape, is_trained=True, head=Head.VALUE, checkpoints_activations=True),
        Role.REWARD_MODEL: TrainModel(shape, is_trained=False, head=Head.SCORE),
    }
    return Workload(
        name="PPO",
        batch_size=batch_size,
        group_size=group_size,
        mini_batch_size=batch_size // 4,
        num_epochs_per_batch=1,
        num_steps=100,
        max_tokens_per_micro_batch=16384,
        lengths=lengths,
        models={role: model for role, model in models.items() if role in roles},
        rollout=RolloutWork(shape, max_model_length=lengths.longest_row),
        needs_old_logprobs=True,
    )

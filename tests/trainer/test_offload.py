"""Offloading: the training is bitwise the same, and nothing stays on the device that should have left."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from rljob_testing.messages import Mentions
from rljob_testing.training import gloo_ranks, offload_runs
from rljob_trainer.engines.train.offload import HostedGradients

RANKS = (1, 2)
ROLLOUT = ["step_before", "wake_weights", "sync_weights", "wake_kv_cache", "generate", "sleep"]
UPDATE = ["forward_backward", "optimizer_step"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[offload_runs.OffloadRun]]:
    """Runs, by number of ranks."""
    roots: dict[int, Path] = {num_ranks: tmp_path_factory.mktemp(f"ranks-{num_ranks}") for num_ranks in RANKS}
    found = gloo_ranks.run_on_ranks(
        [
            gloo_ranks.RankedRun(partial(offload_runs.measure_offload, roots[num_ranks]), num_ranks)
            for num_ranks in RANKS
        ]
    )
    return {
        num_ranks: [run for run in each if isinstance(run, offload_runs.OffloadRun)]
        for num_ranks, each in zip(RANKS, found, strict=True)
    }


def all_of(runs: dict[int, list[offload_runs.OffloadRun]]) -> list[offload_runs.OffloadRun]:
    return [run for each in runs.values() for run in each]


def bytes_of(marks: offload_runs.Marks, owner: str) -> dict[str, int]:
    """Bytes at each boundary; if a boundary occurs twice, at the later one."""
    return {boundary: values[owner] for boundary, values in marks}


def test_training_is_bitwise_the_same(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    assert [len(runs[num_ranks]) for num_ranks in RANKS] == list(RANKS)
    assert all(run.is_equal for run in all_of(runs))


def test_checkpoints_do_not_depend_on_what_is_offloaded(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    assert all(run.is_resumed_equal for run in all_of(runs))


def test_the_boundaries_of_a_step_come_in_order(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    for run in all_of(runs):
        for marks in (run.step, run.plain_step):
            assert [name for name, _ in marks] == [*ROLLOUT, "old_logprobs", "ref_logprobs", *UPDATE, *UPDATE, "update"]


def test_parameters_are_offloaded_while_responses_are_generated(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    for run in all_of(runs):
        found = bytes_of(run.step, "parameters")
        whole = run.num_parameter_bytes
        away = {name for name, num_bytes in found.items() if num_bytes == 0}
        # They come back with the first pass.
        assert away == {"sync_weights", "wake_kv_cache", "generate", "sleep"}
        assert {num_bytes for num_bytes in found.values() if num_bytes} == {whole}
        assert set(bytes_of(run.plain_step, "parameters").values()) == {whole}


def test_moments_are_on_the_device_in_optimizer_steps_only(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    for run in all_of(runs):
        found = bytes_of(run.step, "optimizer")
        assert found.pop("optimizer_step") == 2 * run.num_parameter_bytes
        assert set(found.values()) == {0}
        assert set(bytes_of(run.plain_step, "optimizer").values()) == {2 * run.num_parameter_bytes}


def test_gradients_are_on_the_device_between_backward_and_update_only(
    runs: dict[int, list[offload_runs.OffloadRun]],
) -> None:
    for run in all_of(runs):
        for marks in (run.step, run.plain_step):
            found = bytes_of(marks, "gradients")
            there = {name for name, num_bytes in found.items() if num_bytes}
            assert there == {"forward_backward", "optimizer_step"}
            assert found["optimizer_step"] == run.num_parameter_bytes


def test_gradient_sums_are_offloaded_while_the_next_micro_batch_is_computed(
    runs: dict[int, list[offload_runs.OffloadRun]],
) -> None:
    for run in all_of(runs):
        assert len(run.gradients_in_passes) == len(run.plain_gradients_in_passes) > 2
        assert set(run.gradients_in_passes) == {0}
        assert set(run.plain_gradients_in_passes) == {0, run.num_parameter_bytes}


def test_the_reference_is_offloaded_unless_it_scores(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    for run in all_of(runs):
        assert set(bytes_of(run.step, "reference").values()) == {0}
        assert set(bytes_of(run.plain_step, "reference").values()) == {run.num_parameter_bytes}
        during, after = (run.metrics[f"memory/{when}_ref_logprobs_bytes_max"] for when in ("during", "after"))
        assert during - after >= run.num_parameter_bytes


def test_checkpoints_leave_nothing_of_offloaded_state_on_the_device(
    runs: dict[int, list[offload_runs.OffloadRun]],
) -> None:
    for run in all_of(runs):
        assert list(run.at_rest) == ["sizes", "save", "load", "step"]
        assert all(each == {"actor's moments": 0, "critic": 0} for each in run.at_rest.values())


def test_nothing_is_unsharded_when_generation_begins(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    for run in all_of(runs):
        for marks in (run.step, run.plain_step):
            other = bytes_of(marks, "other")
            assert [other[name] for name in ("sync_weights", "wake_kv_cache", "generate", "update")] == [0] * 4


def test_no_step_leaves_anything_behind(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    """Counts all storages that a tensor of the process refers to: buckets, whole parameters, gradients, copies."""
    for run in all_of(runs):
        _, second, third = run.live_bytes
        assert abs(third - second) < run.num_parameter_bytes // 50


def test_metrics_report_the_largest_values(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    for run in all_of(runs):
        whole = run.num_parameter_bytes
        assert run.metrics["memory/parameters_bytes_max"] == whole
        assert run.metrics["memory/optimizer_bytes_max"] == 2 * whole
        weights = run.metrics["memory/rollout_weights_bytes_max"]
        assert run.metrics["memory/after_optimizer_step_bytes_max"] == 4 * whole + weights
        assert run.metrics["memory/during_generate_bytes_max"] >= run.metrics["memory/after_generate_bytes_max"]
        assert run.metrics["memory/process_bytes_max"] > weights


def test_too_little_memory_is_reported_before_the_first_step(runs: dict[int, list[offload_runs.OffloadRun]]) -> None:
    [alone], [first, second] = runs[1], runs[2]
    # 119 thousand parameters: moments of 0.9 MiB, gradients of half of that; the same on two ranks of one machine.
    for run in (alone, first, second):
        offload, moments = run.memory_errors["offload"], run.memory_errors["moments"]
        assert offload == Mentions("spec.pools[].resources:", "too little memory", "actor's moments 0.9 MiB")
        assert offload == Mentions("actor's gradients 0.5 MiB (spec.training.model.offload.gradients)")
        assert offload == Mentions("1.4 MiB needed, 1.0 MiB available", "increase the memory")
        assert moments == Mentions("too little memory", "actor's moments 0.9 MiB", "copies for checkpoints 1.4 MiB")
        assert moments == Mentions("2.3 MiB needed, 2.0 MiB available")


def test_one_reduction_per_update_keeps_whole_gradients_until_then(
    runs: dict[int, list[offload_runs.OffloadRun]],
) -> None:
    for num_ranks, each in runs.items():
        for run in each:
            whole = num_ranks * run.num_parameter_bytes
            assert run.deferred_peak - run.plain_peak == whole - run.num_parameter_bytes


def test_sums_of_layers_that_some_micro_batches_skip_are_whole() -> None:
    """Experts that are modules of their own are such layers."""
    always, sometimes = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    hosted = HostedGradients([always, sometimes])
    for in_micro_batches in ([True, False, False], [False, True, False], [False, True, True], [False, False, True]):
        for number, is_passed in enumerate(in_micro_batches, 1):
            for parameter, adds in ((always, True), (sometimes, is_passed)):
                if adds:
                    parameter.grad = torch.full((2,), float(number)) + (0 if parameter.grad is None else parameter.grad)
            hosted.after_micro_batch(is_first=number == 1, is_last=number == len(in_micro_batches))
        expected = sum(number for number, is_passed in enumerate(in_micro_batches, 1) if is_passed)
        for parameter, value in ((always, 6), (sometimes, expected)):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [value, value]
            parameter.grad = None

"""Memory of each phase, compared with values by hand; and more work never needs less memory."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_planner.constants import Constants
from rljob_planner.memory.phases import DRIVER_BYTES, limit_of, phases_of
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan_types import Phase, PhaseMemory, Verdict, verdict_of
from rljob_planner.workload import (
    ModelOffload,
    PlacedPool,
    Role,
    RolloutLayout,
    TokenLengths,
    TrainLayout,
    TrainModel,
    Workload,
)
from rljob_testing.planner import samples

CONSTANTS = Constants()
P4 = 4.0225e9
"""Parameters of Qwen3 4B."""


def phases(job: Workload, pool: PlacedPool | None = None) -> dict[Phase, PhaseMemory]:
    return {phase.phase: phase for phase in phases_of(pool or samples.one_pool(job), job, CONSTANTS)}


def parts(phase: PhaseMemory) -> dict[str, float]:
    return {part.owner: part.num_bytes for part in phase.parts}


def near(gigabytes: float) -> object:
    return pytest.approx(gigabytes * 1e9, rel=2e-3)


def test_the_phases_of_a_shared_pool_by_hand() -> None:
    """Qwen3 4B on 8 GPUs of 80 GiB: shards of 4, 8 and 2 bytes x 4.02e9 / 8; half of the GPU for the engine."""
    found = phases(samples.workload())
    awake = 0.5 * 80 * samples.GIB
    for phase in (Phase.ENGINE_START, Phase.FIRST_WAKE):
        assert found[phase].total == pytest.approx(P4 * (4 + 2) / 8 + awake, rel=1e-3)
    for phase in (Phase.LATER_WAKE, Phase.GENERATION):
        assert found[phase].total == pytest.approx(P4 * (12 + 2) / 8 + awake, rel=1e-3)
    sync = parts(found[Phase.SYNC])
    assert sync["actor parameters"] == near(P4 * 4 / 8 / 1e9)
    assert sync["actor moments"] == near(P4 * 8 / 8 / 1e9)
    assert sync["rollout weights"] == near(2 * P4 / 1e9)
    # Twice the embedding, 151,936 x 2,560 numbers, which is larger than a bucket.
    assert sync["buckets"] == 2 * 2 * 151936 * 2560
    assert found[Phase.CHECKPOINT].total == pytest.approx(P4 * 14 / 8 + CONSTANTS.sleeping_engine_bytes, rel=1e-3)
    assert all(phase.limit == 80 * samples.GIB - DRIVER_BYTES for phase in found.values())


def test_an_update_has_its_peak_the_allocators_reserve_and_the_other_roles() -> None:
    """16,384 tokens with checkpointing: 17.25 GB for the update itself (torch's memory tracker on fake tensors agrees
    within 3 %), 7 % allocator's reserve, the reference's 2 P / 8, and the sleeping engine."""
    update = phases(samples.workload())[Phase.UPDATE]
    own = sum(number for owner, number in parts(update).items() if owner.startswith("actor "))
    assert own == pytest.approx(17.25e9, rel=0.03)
    assert update.total == pytest.approx(own * 1.07 + 2 * P4 / 8 + CONSTANTS.sleeping_engine_bytes, rel=1e-3)


@pytest.mark.parametrize(
    "model",
    [
        samples.trained_model(),
        samples.trained_model(defers_reduction=True),
        samples.trained_model(offload=ModelOffload(gradients=True, optimizer=True)),
    ],
    ids=["reduced", "deferred", "offloaded"],
)
def test_the_formula_of_state_gives_its_bytes(model: TrainModel) -> None:
    update = phases(samples.workload(model))[Phase.UPDATE]
    state = [part for part in update.parts if part.owner in ("actor parameters", "actor moments", "actor gradients")]
    assert len(state) >= 2
    for part in state:
        numbers = [float(each) for each in re.findall(r"\d[\d.e+]*", part.formula)]
        divided = math.prod(numbers[:2]) / (numbers[2] if "/" in part.formula else 1) * math.prod(numbers[3:])
        assert part.num_bytes == pytest.approx(divided, rel=0.05), part


def test_the_formula_of_the_cache_gives_its_bytes() -> None:
    start = phases(samples.workload())[Phase.ENGINE_START]
    [cache] = [part for part in start.parts if part.owner == "KV cache"]
    share, memory, others = (float(each) for each in re.findall(r"\d[\d.]*", cache.formula))
    assert cache.num_bytes == pytest.approx((share * memory - others) * samples.GIB, rel=0.01)


def test_offloaded_state_is_off_the_device_in_the_documented_phases() -> None:
    away = ModelOffload(parameters=True, gradients=True, optimizer=True)
    job = samples.workload(samples.trained_model(offload=away), models=None)
    job = replace(
        job,
        models={
            Role.ACTOR: samples.trained_model(offload=away),
            Role.REF: samples.frozen_model(offload=ModelOffload(True)),
        },
    )
    found = phases(job)
    for phase in (Phase.ENGINE_START, Phase.FIRST_WAKE, Phase.LATER_WAKE, Phase.GENERATION):
        assert found[phase].total == pytest.approx(0.5 * 80 * samples.GIB)
    assert set(parts(found[Phase.SYNC])) == {"actor parameters", "rollout weights", "buckets", "sleeping engine"}
    assert "ref parameters" in parts(found[Phase.LOGPROBS])
    assert "actor moments" in parts(found[Phase.CHECKPOINT])
    assert "ref parameters" not in parts(found[Phase.UPDATE])


def test_the_first_and_second_rollout_differ_by_the_moments() -> None:
    """Four GPUs at 0.85: shards and engine are 74 GiB, which fit into 79.3; with moments of 7.5 GiB they do not."""
    job = samples.workload(rollout=replace(samples.workload().rollout, memory_utilization=0.85))
    found = phases(job, samples.one_pool(job, gpus_per_node=4))
    assert found[Phase.FIRST_WAKE].total == pytest.approx(P4 * 6 / 4 + 0.85 * 80 * samples.GIB, rel=1e-3)
    assert found[Phase.FIRST_WAKE].spare > 0
    assert found[Phase.LATER_WAKE].spare == pytest.approx(79.3 * samples.GIB - P4 * 14 / 4 - 68 * samples.GIB, rel=1e-2)
    assert found[Phase.LATER_WAKE].spare < 0


def test_a_cache_that_is_too_small_does_not_fit_even_with_free_memory() -> None:
    job = samples.workload(rollout=replace(samples.workload().rollout, memory_utilization=0.2, max_model_length=60_000))
    start = phases(job)[Phase.ENGINE_START]
    assert start.total < 0.5 * start.limit
    # 60,000 tokens x 144 KiB are 8.2 GiB.
    assert 0 < start.kv_cache_shortage < 60_000 * 144 * 1024
    assert start.spare == -start.kv_cache_shortage
    assert verdict_of((start,)) is Verdict.TOO_LARGE


def test_a_critic_has_its_own_update_and_moments() -> None:
    job = samples.workload()
    job = replace(job, models={**job.models, Role.CRITIC: samples.critic()}, needs_old_logprobs=True)
    found = phases(job)
    beside = parts(found[Phase.CRITIC_UPDATE])
    assert beside["actor moments"] == near(P4 * 8 / 8 / 1e9)
    # The actor's embedding stays gathered after the actor's own pass.
    assert beside["actor gathered parameters"] == 2 * (151936 * 2560 + 2560)
    assert "critic gradients" in beside
    assert parts(found[Phase.LATER_WAKE])["critic moments"] == near(P4 * 8 / 8 / 1e9)
    assert "critic gradients" not in parts(found[Phase.UPDATE])


def test_a_pool_has_only_the_phases_of_its_roles() -> None:
    job = samples.workload()
    scoring = PlacedPool("ref", 1, 4, samples.gpu(), {Role.REF: TrainLayout(4, 4)})
    assert set(phases(job, scoring)) == {Phase.LOGPROBS}
    generating = PlacedPool("rollout", 1, 4, samples.gpu(), {}, RolloutLayout(4))
    assert set(phases(job, generating)) == {
        Phase.ENGINE_START, Phase.FIRST_WAKE, Phase.LATER_WAKE, Phase.SYNC, Phase.GENERATION
    }  # fmt: skip
    assert phases(job, generating)[Phase.LATER_WAKE].total == pytest.approx(0.5 * 80 * samples.GIB)
    training = PlacedPool("actor", 1, 4, samples.gpu(), {Role.ACTOR: TrainLayout(4, 4)})
    assert set(phases(job, training)) == {Phase.SYNC, Phase.UPDATE, Phase.CHECKPOINT}


def test_a_reference_that_is_the_actor_takes_no_memory_but_a_pass() -> None:
    job = samples.workload()
    job = replace(
        job,
        models={Role.ACTOR: samples.trained_model(), Role.REF: samples.frozen_model(is_actor_without_adapters=True)},
    )
    found = phases(job)
    assert not any(part.startswith("ref") for phase in found.values() for part in parts(phase))
    assert "actor parameters" in parts(found[Phase.LOGPROBS])


def test_transformers_keeps_its_weights_and_a_cache_of_its_rows() -> None:
    job = samples.workload(rollout=replace(samples.workload().rollout, is_vllm=False, max_sequences=16))
    found = phases(job)
    assert Phase.LATER_WAKE not in found
    assert parts(found[Phase.UPDATE])["rollout weights"] == near(2 * P4 / 1e9)
    generation = parts(found[Phase.GENERATION])
    # 16 rows of 1,024 + 3,072 tokens x 144 KiB, one of 36 layers twice; logits of 16 prompts of 1,024 tokens.
    assert generation["KV cache"] == pytest.approx(16 * 4096 * 144 * 1024 * (1 + 1 / 36))
    assert generation["engine activations"] == 16 * 1024 * 151936 * 2
    job = replace(job, rollout=replace(job.rollout, has_float32_head=True))
    assert parts(phases(job)[Phase.GENERATION])["engine activations"] == 16 * 1024 * 151936 * 4


def test_cpu_workers_of_a_node_share_its_memory() -> None:
    """Nothing leaves this memory: the engine's weights stay, and so do copies for checkpoints from the first one on."""
    away = ModelOffload(parameters=True, optimizer=True)
    job = samples.workload(samples.trained_model(offload=away, compute_bytes=4))
    job = replace(job, rollout=replace(job.rollout, weight_bytes=4), models={Role.ACTOR: job.models[Role.ACTOR]})
    pool = samples.one_pool(job, samples.gpu(256, is_cpu=True), gpus_per_node=2)
    found = phases_of(pool, job, replace(CONSTANTS, process_bytes=5e8))
    assert limit_of(pool) == 128 * samples.GIB
    by_phase = {phase.phase: parts(phase) for phase in found}
    assert all(each["process"] == 5e8 for each in by_phase.values())
    assert all(each["rollout weights"] == near(4 * P4 / 1e9) for each in by_phase.values())
    generation = by_phase[Phase.GENERATION]
    assert generation["actor parameters"] + generation["actor moments"] == near(12 * P4 / 2 / 1e9)
    assert generation["actor copies for checkpoints"] == near(12 * P4 / 2 / 1e9)
    assert generation["KV cache"] == 1 << 30
    assert "actor copies for checkpoints" not in by_phase[Phase.FIRST_WAKE]
    assert "allocator's reserve" not in by_phase[Phase.UPDATE]
    away = ModelOffload(gradients=True)
    job = replace(job, models={Role.ACTOR: samples.trained_model(offload=away, compute_bytes=4)})
    for phase in phases_of(pool, job, CONSTANTS):
        assert parts(phase)["actor gradients on the host"] == near(4 * P4 / 2 / 1e9)


@pytest.mark.parametrize(
    ("shard_size", "shape", "expected"),
    [
        # Llama 3 8B: the embedding is larger than a bucket of 256 MiB.
        (8, samples.LLAMA3_8B, 2 * 2 * 128256 * 4096),
        (1, samples.LLAMA3_8B, 2 * 128256 * 4096),
        (8, replace(samples.LLAMA3_8B, vocabulary_size=1000), 2 * 256 * 2**20),
    ],
)
def test_weight_sync_buckets(shard_size: int, shape: ModelShape, expected: int) -> None:
    job = samples.workload(samples.trained_model(shape))
    pool = replace(samples.one_pool(job), layouts={Role.ACTOR: TrainLayout(8, shard_size)})
    assert parts(phases(job, pool)[Phase.SYNC])["buckets"] == expected


SHAPES = st.sampled_from(
    [samples.QWEN3_4B, samples.LLAMA3_8B, replace(samples.QWEN3_4B, num_experts=8, experts_per_token=2, mlp_size=768)]
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Workload, PlacedPool]:
    """Any kind of job on one pool."""
    shape = draw(SHAPES)
    model: TrainModel = samples.trained_model(
        shape,
        checkpoints_activations=draw(st.booleans()),
        offload=ModelOffload(draw(st.booleans()), draw(st.booleans()), draw(st.booleans())),
    )
    job = samples.workload(
        model,
        batch_size=draw(st.sampled_from([8, 64, 256])),
        group_size=draw(st.integers(1, 16)),
        max_tokens_per_micro_batch=draw(st.integers(4096, 65536)),
        needs_old_logprobs=draw(st.booleans()),
    )
    job = replace(job, mini_batch_size=job.batch_size // draw(st.sampled_from([1, 2, 4])))
    if draw(st.booleans()):
        job = replace(job, models={**job.models, Role.CRITIC: samples.critic(shape)})
    rollout = replace(
        job.rollout,
        is_vllm=draw(st.booleans()),
        memory_utilization=draw(st.floats(0.05, 0.95)),
        max_sequences=draw(st.sampled_from([8, 256, 1024])),
    )
    job = replace(job, rollout=rollout)
    on = samples.gpu(draw(st.sampled_from([16.0, 24.0, 48.0, 80.0, 141.0])), is_cpu=draw(st.booleans()))
    return job, samples.one_pool(job, on, gpus_per_node=draw(st.sampled_from([1, 2, 8])))


@given(jobs(), st.floats(1.0, 8.0))
def test_more_memory_never_fits_less(case: tuple[Workload, PlacedPool], factor: float) -> None:
    job, pool = case
    larger = replace(pool, gpu=replace(pool.gpu, memory_bytes=pool.gpu.memory_bytes * factor))
    for before, after in zip(phases_of(pool, job, CONSTANTS), phases_of(larger, job, CONSTANTS), strict=True):
        assert before.phase is after.phase
        assert after.spare >= before.spare - 1
        order = (Verdict.TOO_LARGE, Verdict.TIGHT, Verdict.FITS)
        assert order.index(verdict_of((after,))) >= order.index(verdict_of((before,)))


def longer_responses(job: Workload, factor: int) -> Workload:
    lengths = replace(job.lengths, response_max=job.lengths.response_max * factor)
    rollout = replace(job.rollout, max_model_length=lengths.longest_row)
    return replace(job, lengths=lengths, rollout=rollout)


def larger_batch(job: Workload, factor: int) -> Workload:
    return replace(job, batch_size=job.batch_size * factor, mini_batch_size=job.mini_batch_size * factor)


def larger_groups(job: Workload, factor: int) -> Workload:
    return replace(job, group_size=job.group_size * factor)


def larger_micro_batches(job: Workload, factor: int) -> Workload:
    return replace(job, max_tokens_per_micro_batch=job.max_tokens_per_micro_batch * factor)


@given(
    jobs(),
    st.sampled_from([longer_responses, larger_batch, larger_groups, larger_micro_batches]),
    st.integers(1, 4),
)
def test_more_work_never_needs_less(case, change, factor: int) -> None:  # type: ignore[no-untyped-def]
    job, pool = case
    for before, after in zip(
        phases_of(pool, job, CONSTANTS), phases_of(pool, change(job, factor), CONSTANTS), strict=True
    ):
        assert before.phase is after.phase
        assert after.spare <= before.spare + 1


def test_memory_is_planned_for_the_longest_row() -> None:
    """Some row will have the maximum length at some time."""
    job = samples.workload()
    short = replace(job, lengths=TokenLengths(256.0, 1024, 100.0, 3072))
    assert phases(short)[Phase.UPDATE].total == phases(job)[Phase.UPDATE].total

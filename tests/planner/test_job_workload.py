"""The workload of a job: which models and passes it has, as the trainer reads the job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from rljob_api.v1alpha1.advantage import Advantage, AdvantageType
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.recipes import may_need_critic, resolve_algorithm
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.errors import PlanError
from rljob_planner.job_placement import placement_of, spec_with
from rljob_planner.job_workload import lora_shape, model_sources, workload_of
from rljob_planner.known_models import known_model
from rljob_planner.memory.job_changes import smaller_jobs
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan import plan_of
from rljob_planner.workload import Head, LoraShape, ModelOffload, Role, Workload
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_testing.models import tiny_models
from rljob_testing.planner import samples
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import GREEDY_REWARDS, OLD_LOGPROBS, REF_LOGPROBS, VALUES
from rljob_trainer.controller.dynamic_sampling import num_fresh_prompts
from rljob_trainer.engines.train.lora import target_endings
from rljob_trainer.engines.train.model import build_on_meta

Edits = dict[str, object]

T = "spec.training"
PPO: Edits = {f"{T}.algorithm": {"type": "PPO"}}
KL: Edits = {f"{T}.algorithm": {"kl": {"coefficient": 0.001}}}
FAMILIES = ("qwen3", "phi3", "gemma2", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
TEACHER: Edits = {"source": "them/teacher"}
LORA: Edits = {f"{T}.model.lora": {"rank": 4}}


def shape(name: str = "Qwen/Qwen3-0.6B") -> ModelShape:
    found = known_model(name)
    assert found is not None
    return found


def spec_of(edits: Mapping[str, object]) -> RLJobSpec:
    return RLJob.from_wire(valid_job(edits)).spec


def made(edits: Mapping[str, object], *, is_cpu: bool = False) -> Workload:
    return workload_of(spec_of(edits), {Role.ACTOR: shape()}, is_cpu=is_cpu)


def test_a_default_job_has_an_actor_and_a_rollout() -> None:
    found = made({})
    assert found.roles == (Role.ACTOR, Role.ROLLOUT)
    assert (found.batch_size, found.group_size, found.mini_batch_size, found.num_steps) == (8, 4, 8, 10)
    assert (found.num_responses, found.num_updates) == (32, 1)
    assert found.max_tokens_per_micro_batch == 16384
    assert not found.needs_old_logprobs
    assert found.generation_factor == 1.0
    assert found.checkpoint_every_steps == 20


def test_a_kl_term_adds_a_reference_and_ppo_a_critic() -> None:
    assert made(KL).roles == (Role.ACTOR, Role.ROLLOUT, Role.REF)
    assert not made(KL).models[Role.REF].is_trained
    critic = made(PPO).models[Role.CRITIC]
    assert critic.is_trained
    assert critic.head is Head.VALUE
    # The body, and a head with one number per hidden number instead of the output head.
    assert critic.num_parameters == shape().layers_parameters + shape().embedding_parameters + 2 * 1024


def test_a_reward_model_has_its_own_source() -> None:
    edits: dict[str, object] = {
        f"{T}.rewards": [
            {"name": "math", "type": "MathAnswer"},
            {"name": "taste", "type": "RewardModel", "rewardModel": {"source": "them/judge", "offload": True}},
        ],
        f"{T}.rollout": {"groupSize": 4, "maxNewTokens": 64},
    }
    spec = spec_of(edits)
    sources = model_sources(spec)
    assert sources[Role.REWARD_MODEL].source == "them/judge"
    assert sources[Role.REWARD_MODEL].field == "spec.training.rewards[1].rewardModel.source"
    judge = shape("Qwen/Qwen3-1.7B")
    model = workload_of(spec, {Role.ACTOR: shape(), Role.REWARD_MODEL: judge}).models[Role.REWARD_MODEL]
    assert (model.shape, model.head, model.offload) == (judge, Head.SCORE, ModelOffload(parameters=True))
    with pytest.raises(PlanError, match=r"^rewardModel: the shape .*config.json"):
        workload_of(spec, {Role.ACTOR: shape()})


@pytest.mark.parametrize("lora", [{}, LORA])
def test_a_teacher_has_its_own_source_and_shape_and_is_never_the_actor(lora: Edits) -> None:
    edits = {f"{T}.algorithm": {"type": "Distillation"}, "spec.roles.ref.model": TEACHER, **lora}
    spec, teacher = spec_of(edits), shape("Qwen/Qwen3-1.7B")
    source = model_sources(spec)[Role.REF]
    assert (source.source, source.field) == ("them/teacher", "spec.roles.ref.model.source")
    found = workload_of(spec, {Role.ACTOR: shape(), Role.REF: teacher})
    model = found.models[Role.REF]
    assert (model.shape, model.lora, model.is_trained) == (teacher, None, False)
    assert not model.is_actor_without_adapters
    assert found.assumptions == ()
    placement = placement_of(spec, {"main": samples.gpu()})
    written = spec_with(spec, placement).roles.ref
    assert (written.model, written.shard_size) == (spec.roles.ref.model, None)
    changed = [each for ladder in smaller_jobs(found, placement) for each in ladder]
    assert not any(each.workload.models[Role.REF].is_actor_without_adapters for each in changed)


def test_a_critic_may_have_its_own_source_and_shape() -> None:
    edits = PPO | {f"{T}.critic": {"model": {"source": "them/critic", "gradientCheckpointing": "Always"}}}
    sources = model_sources(spec_of(edits))
    assert sources[Role.CRITIC].source == "them/critic"
    other = shape("Qwen/Qwen3-1.7B")
    found = workload_of(spec_of(edits), {Role.ACTOR: shape(), Role.CRITIC: other}).models
    assert found[Role.CRITIC].shape == other
    assert (found[Role.CRITIC].checkpoints_activations, found[Role.ACTOR].checkpoints_activations) == (True, False)
    assert model_sources(spec_of(PPO))[Role.CRITIC] == model_sources(spec_of(PPO))[Role.ACTOR]


@pytest.mark.parametrize(
    "edits",
    [
        {f"{T}.miniBatchSize": 4},
        {f"{T}.numEpochsPerBatch": 2},
        {f"{T}.model.lora": {"dropout": 0.1}},
        {f"{T}.algorithm": {"kl": {"coefficient": 0.1, "placement": "Reward"}}},
        {f"{T}.algorithm": {"advantage": {"type": "OptimalTokenBaseline"}}},
    ],
)
def test_old_log_probs_need_a_pass_if_the_update_does_not_give_them(edits: dict[str, object]) -> None:
    assert made(edits).needs_old_logprobs


@pytest.mark.parametrize(
    "edits",
    [
        {f"{T}.miniBatchSize": 4},
        {f"{T}.numEpochsPerBatch": 2},
        {f"{T}.model.lora": {"dropout": 0.1}},
        {f"{T}.algorithm.kl": {"coefficient": 0.1, "placement": "Reward"}},
    ],
)
def test_old_log_probs_of_the_rollout_engine_need_no_pass(edits: dict[str, object]) -> None:
    found = made({**edits, f"{T}.algorithm.rolloutCorrection.oldLogprobs": "Rollout"})
    assert not found.needs_old_logprobs
    assert not found.always_needs_old_logprobs


def test_covariance_losses_need_a_pass_over_mini_batches() -> None:
    assert not made({}).needs_mini_batch_pass
    assert made({f"{T}.algorithm": {"loss": {"type": "ClipCov"}}}).needs_mini_batch_pass


def test_dtype_auto_depends_on_the_device() -> None:
    assert made({}).models[Role.ACTOR].compute_bytes == 2
    assert made({}, is_cpu=True).models[Role.ACTOR].compute_bytes == 4
    assert made({f"{T}.model.dtype": "BFloat16"}, is_cpu=True).rollout.weight_bytes == 2
    assert made({f"{T}.model.dtype": "Float32"}).rollout.weight_bytes == 4


@pytest.mark.parametrize(
    ("model", "wanted", "is_cpu", "expected"),
    [
        ("Qwen/Qwen3-0.6B", "Auto", False, False),
        ("Qwen/Qwen3-1.7B", "Auto", False, True),
        ("Qwen/Qwen3-1.7B", "Auto", True, False),
        ("Qwen/Qwen3-1.7B", "Never", False, False),
        ("Qwen/Qwen3-0.6B", "Always", True, True),
    ],
)
def test_checkpointing_auto_depends_on_the_device_and_the_model(
    model: str, wanted: str, is_cpu: bool, expected: bool
) -> None:
    edits = PPO | {f"{T}.model.gradientCheckpointing": wanted, f"{T}.critic.model.gradientCheckpointing": wanted}
    job = workload_of(spec_of(edits), {Role.ACTOR: shape(model)}, is_cpu=is_cpu)
    assert {job.models[role].checkpoints_activations for role in (Role.ACTOR, Role.CRITIC)} == {expected}
    plan = plan_of(job, samples.placement(samples.one_pool(job, samples.gpu(is_cpu=is_cpu))))
    chosen = "Always" if expected else "Never"
    notes = [note for note in plan.notes if "gradientCheckpointing: Auto is " in note]
    assert all(re.search(r" with \d+\.\d\d [mb]illion parameters on ", note) for note in notes)
    assert notes == (
        [
            Mentions(f"{field}.gradientCheckpointing: Auto is {chosen}", "parameters", "CPUs" if is_cpu else "GPUs")
            for field in (f"{T}.model", f"{T}.critic.model")
        ]
        if wanted == "Auto"
        else []
    )


@pytest.mark.parametrize("is_cpu", [False, True])
def test_checkpointing_of_every_second_layer_is_on_for_every_model(is_cpu: bool) -> None:
    job = workload_of(
        spec_of({f"{T}.model.gradientCheckpointingEveryNthLayer": 2}), {Role.ACTOR: shape()}, is_cpu=is_cpu
    )
    assert job.models[Role.ACTOR].checkpoints_activations
    placement = samples.placement(samples.one_pool(job, samples.gpu(is_cpu=is_cpu)))
    field = f"{T}.model.gradientCheckpointing"
    notes = [note for note in plan_of(job, placement).notes if "Auto is" in note]
    assert notes == [Mentions(f"{field}: Auto is Always", "gradientCheckpointingEveryNthLayer is 2")]
    # With 1, `Auto` would be `Never`, which needs more memory.
    assert f"{field}EveryNthLayer" not in {
        each.change.field for ladder in smaller_jobs(job, placement) for each in ladder
    }


def test_adapters_are_beside_all_linear_layers() -> None:
    lora = made(LORA).models[Role.ACTOR].lora
    assert lora is not None
    # Qwen3-0.6B: hidden 1024, queries 2048, keys and values 1024 each, MLP 3072; 28 layers of seven linear ones.
    attention = (1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024)
    assert lora.num_parameters == 28 * 4 * (attention + 3 * (1024 + 3072))
    assert lora.num_linear_layers == 28 * 7
    a_of_layer, b_of_layer = lora.tensors(28)
    assert a_of_layer == (4, 3 * 1024 + 2048 + 2 * 1024 + 3072, 1)
    assert lora.matrices[-2:] == ((4, 3072, 28), (1024, 4, 28))
    assert sum(each.rows * each.columns * each.copies for each in lora.matrices) == lora.num_parameters
    assert 28 * sum(each.rows * each.columns for each in (a_of_layer, b_of_layer)) == lora.num_parameters
    assert lora.syncs_alone


def test_adapters_may_be_limited_to_some_layers() -> None:
    lora = made({f"{T}.model.lora": {"rank": 4, "targets": ["self_attn.q_proj", "down_proj"]}}).models[Role.ACTOR].lora
    assert lora is not None
    assert lora.num_linear_layers == 28 * 2
    assert lora.num_parameters == 28 * 4 * ((1024 + 2048) + (3072 + 1024))


def test_targets_that_no_layer_has_are_refused() -> None:
    experts = {Role.ACTOR: shape("Qwen/Qwen3-30B-A3B")}
    for target, shapes in (("lm_head", None), ("nonsense", None), ("mlp.gate_proj", experts), ("experts", experts)):
        spec = spec_of({f"{T}.model.lora": {"targets": ["q_proj", target]}})
        with pytest.raises(PlanError) as caught:
            workload_of(spec, shapes or {Role.ACTOR: shape()})
        assert str(caught.value) == Mentions(f"{T}.model.lora.targets", repr(target), "q_proj", "leave targets out")


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_are_the_names_of_the_trainer(name: str, tmp_path: Path) -> None:
    config = tiny_models.ARCHITECTURES[name]()
    config.save_pretrained(tmp_path)
    found = shape_of_config(config.to_dict(), name)
    for target in target_endings(build_on_meta(tmp_path), None):
        adapters = lora_shape(found, 4, [target], syncs_alone=False)
        assert adapters.num_parameters > 0
        workload_of(spec_of({f"{T}.model.lora": {"targets": [target]}}), {Role.ACTOR: found})


def test_adapters_without_parameters_do_not_count_as_all_weights() -> None:
    none = LoraShape(rank=4, num_parameters=0, num_linear_layers=0)
    assert samples.trained_model(lora=none).num_trained_parameters == 0
    assert samples.trained_model().num_trained_parameters == samples.trained_model().num_parameters


def test_kernels_that_do_not_run_are_refused() -> None:
    liger = {f"{T}.model.kernels": "Liger"}
    made(liger)
    with pytest.raises(PlanError) as caught:
        made(liger, is_cpu=True)
    assert str(caught.value) == Mentions(f"{T}.model.kernels", "needs GPUs", "seen: cpu", "set Plain")
    with pytest.raises(PlanError) as caught:
        workload_of(spec_of(liger), {Role.ACTOR: shape("google/gemma-2-2b")})
    assert str(caught.value) == Mentions(f"{T}.model.kernels", "qwen3_moe", "seen: 'gemma2'", "set Plain")


def test_adapters_beside_experts_are_those_of_the_attention() -> None:
    spec = spec_of(LORA)
    lora = workload_of(spec, {Role.ACTOR: shape("Qwen/Qwen3-30B-A3B")}).models[Role.ACTOR].lora
    assert lora is not None
    assert lora.num_linear_layers == 48 * 4
    assert lora.syncs_alone


def test_vllm_is_assumed_to_support_adapters_beside_experts() -> None:
    for model, sync, expected in (
        ("Qwen/Qwen3-30B-A3B", "Auto", [Mentions("Qwen3-30B-A3B", "lora.sync: Auto", "Merged")]),
        ("Qwen/Qwen3-30B-A3B", "Adapter", []),
        ("Qwen/Qwen3-0.6B", "Auto", []),
    ):
        job = workload_of(spec_of({f"{T}.model.lora": {"sync": sync}}), {Role.ACTOR: shape(model)})
        assert [each for each in job.assumptions if "adapters" in each] == expected


def test_adapters_of_latent_attention_are_merged() -> None:
    shapes = {Role.ACTOR: shape("deepseek-ai/DeepSeek-V2-Lite")}

    def syncs_alone(**lora: object) -> bool:
        found = workload_of(spec_of({f"{T}.model.lora": lora}), shapes).models[Role.ACTOR].lora
        assert found is not None
        return found.syncs_alone

    assert not syncs_alone()
    assert not syncs_alone(targets=["o_proj", "self_attn.kv_b_proj"])
    assert syncs_alone(targets=["o_proj"])
    assert syncs_alone(targets=["o_proj"], sync="Adapter")
    with pytest.raises(PlanError) as caught:
        syncs_alone(sync="Adapter")
    assert str(caught.value) == Mentions(f"{T}.model.lora.sync", "kv_b_proj", "seen: Adapter", "set Merged")


def test_adapters_are_merged_in_float32_on_cpus_and_by_transformers() -> None:
    assert made(LORA).rollout.adapter_rank == 4
    assert made(LORA, is_cpu=True).rollout.adapter_rank is None
    assert made(LORA | {f"{T}.model.dtype": "BFloat16"}, is_cpu=True).rollout.adapter_rank == 4
    assert made(LORA | {f"{T}.rollout.engine": "HuggingFace"}).rollout.adapter_rank is None


def test_a_reference_beside_adapters_is_the_actor() -> None:
    assert made(LORA | KL).models[Role.REF].is_actor_without_adapters
    assert not made(LORA | KL | {"spec.roles.ref.shardSize": 1}).models[Role.REF].is_actor_without_adapters
    assert not made(KL).models[Role.REF].is_actor_without_adapters


def test_offload_is_read_for_each_model() -> None:
    edits = KL | {f"{T}.model.offload": {"optimizer": True, "reference": True}}
    models = made(edits).models
    assert models[Role.ACTOR].offload == ModelOffload(optimizer=True)
    assert models[Role.REF].offload == ModelOffload(parameters=True)


def test_the_rollout_has_the_limits_of_the_job() -> None:
    edits: Edits = {f"{T}.rollout.gpuMemoryUtilization": 0.7, f"{T}.rollout.maxNumSequences": 64}
    rollout = made(edits).rollout
    assert (rollout.max_model_length, rollout.max_sequences, rollout.memory_utilization) == (128, 64, 0.7)
    assert rollout.is_vllm
    assert not rollout.has_float32_head
    assert made({f"{T}.model.headDtype": "Float32"}).rollout.has_float32_head
    assert not made({f"{T}.rollout.engine": "HuggingFace"}).rollout.is_vllm


def test_vllm_compiles_on_gpus_and_in_long_jobs_on_cpus() -> None:
    assert made({}).rollout.compiles
    assert not made({}, is_cpu=True).rollout.compiles
    assert made({f"{T}.steps": 300}, is_cpu=True).rollout.compiles
    assert not made({f"{T}.rollout.compile": "Never"}).rollout.compiles


def test_dynamic_sampling_generates_more_than_is_trained_on() -> None:
    found = made({f"{T}.algorithm": {"type": "DAPO"}})
    # 72 of 120 prompts are kept; for the other 48, the trainer generates for 100 prompts more.
    again = num_fresh_prompts(num_wanted=120, num_kept=72, num_drawn=120, multiple=1)
    assert found.generation_factor == pytest.approx(1 + again / 120)
    assert found.assumptions == (Mentions("Dynamic sampling", "40%"),)


def test_scores_come_first_if_they_decide_what_is_trained_on() -> None:
    def waits_for_scores(algorithm: dict[str, object]) -> bool:
        return made({f"{T}.algorithm": algorithm}).waits_for_scores

    assert waits_for_scores({"type": "DAPO"})
    assert waits_for_scores({"dropZeroVarianceGroups": True})
    assert not waits_for_scores({"dropZeroVarianceGroups": False})
    assert not waits_for_scores({"dropZeroVarianceGroups": False, "maskTruncatedResponses": True})
    assert not waits_for_scores({"type": "ReMax"})


def test_greedy_responses_are_added_to_the_sampled_ones() -> None:
    found = made({f"{T}.algorithm": {"type": "ReMax"}})
    assert found.generation_factor == 1.0
    # One per prompt in addition to four sampled ones.
    assert found.num_requests == 5 * found.batch_size
    assert found.num_responses == 4 * found.batch_size
    assert made({}).num_requests == made({}).num_responses


@pytest.mark.parametrize("advantage", sorted(set(AdvantageType) - {AdvantageType.FUNCTION}))
def test_an_advantage_has_the_models_and_passes_it_needs(advantage: AdvantageType) -> None:
    algorithm = Algorithm(advantage=Advantage(type=advantage))
    needs = advantage_estimator(resolve_algorithm(algorithm)).needs
    assert may_need_critic(algorithm) == (VALUES in needs)
    rewards = [{"name": name, "type": "MathAnswer"} for name in ("first", "second")]
    teacher = {"spec.roles.ref.model": TEACHER} if REF_LOGPROBS in needs else {}
    found = made({f"{T}.algorithm": algorithm.to_wire(), f"{T}.rewards": rewards, **teacher})
    assert (Role.REF in found.models) == (REF_LOGPROBS in needs)
    assert found.has_greedy_responses == (GREEDY_REWARDS in needs)
    assert found.needs_old_logprobs == (OLD_LOGPROBS in needs)


def test_models_that_functions_may_need_are_counted_and_mentioned() -> None:
    edits = {f"{T}.algorithm": {"advantage": {"type": "Function", "function": {"path": "mine:advantage"}}}}
    found = made(edits)
    assert found.roles == (Role.ACTOR, Role.ROLLOUT, Role.REF, Role.CRITIC)
    assert found.assumptions == (
        Mentions("reference", "log-probabilities"),
        Mentions("critic", "values"),
    )
    assert made(PPO | KL).assumptions == ()


def test_rows_longer_than_the_models_positions_are_mentioned() -> None:
    found = made({f"{T}.rollout.maxNewTokens": 41_000, f"{T}.maxTokensPerMicroBatch": 50_000})
    assert found.assumptions == (Mentions("Qwen/Qwen3-0.6B", "40,960 positions", "41,064 tokens", "maxNewTokens"),)

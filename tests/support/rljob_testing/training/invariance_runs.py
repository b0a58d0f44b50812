"""The training steps that `test_update_invariance` compares, and a program that runs all of them on one rank.

Legend: B responses.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rljob_api.v1alpha1.advantage import Advantage, AdvantageType, Function
from rljob_api.v1alpha1.algorithm import Algorithm, LossAggregation
from rljob_api.v1alpha1.kl import AdaptiveKl, Kl, KlController, KlControllerType, KlPlacement
from rljob_api.v1alpha1.optimizer import Optimizer, Schedule
from rljob_api.v1alpha1.policy_loss import Loss, LossType
from rljob_api.v1alpha1.rollout_correction import (
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrection,
    RolloutCorrectionType,
    RolloutRejection,
)
from rljob_testing.training import replays, step_cases, user_algorithms
from rljob_testing.training.recorders import Pass, recorded_gradients, recorded_passes
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.layout import REPLICATE
from rljob_trainer.workers.columns import ADVANTAGES, IS_TRAINED

ADAPTIVE = KlController(type=KlControllerType.ADAPTIVE, adaptive=AdaptiveKl(target=1e-3, horizon=32))
"""A step with eight trained responses changes the coefficient by at most a twentieth."""
ALGORITHM = Algorithm(
    entropy_coefficient=0.01,
    kl=Kl(coefficient=0.1, placement=KlPlacement.LOSS, controller=ADAPTIVE),
    drop_zero_variance_groups=True,
)
WITHOUT_KL = ALGORITHM.model_copy(update={"kl": Kl()})
COVARIANCE = Algorithm(loss=Loss(type=LossType.FUNCTION, function=Function(path=user_algorithms.COVARIANCE_PATH)))
OPTIMIZER = Optimizer(learning_rate=3e-4, warmup_steps=3, schedule=Schedule.COSINE)
LONG_REPLAY = replays.Replay(ALGORITHM, OPTIMIZER, mini_batch_size=2)
"""Two updates per step; in the second one, the policy differs from the old policy."""
REPLAY = replace(LONG_REPLAY, algorithm=WITHOUT_KL)
MORE_HEADS, EXPERTS = "more-heads", "experts"
NUM_STEPS, SAVED_STEP, RESUMED_STEPS = 10, 3, 3
"""Steps of the long run, the step at which it is saved, and the number of steps after it is resumed."""


@dataclass(frozen=True)
class LongRun:
    """A run of NUM_STEPS steps."""

    metrics: list[dict[str, float]]
    passes: list[Pass]
    """Inputs of the actor's passes in the first step."""
    reference_passes: list[Pass]
    """Inputs of the reference's passes in the first step."""
    saved: dict[str, torch.Tensor]
    """State after SAVED_STEP steps."""
    later: dict[str, torch.Tensor]
    """State after RESUMED_STEPS more steps."""


@dataclass(frozen=True)
class Resumed:
    """A run that was resumed from a checkpoint."""

    loaded: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    later: dict[str, torch.Tensor]


@dataclass(frozen=True)
class UnevenUpdate:
    """An update in which one rank has all rows that are used in the update."""

    outcome: step_cases.Outcome
    passes: list[Pass]


@dataclass(frozen=True)
class Replicas:
    """Two replicas of two shards, and what they reduced in a step of one update."""

    placements: set[tuple[str, ...]]
    share: float
    """Fraction of the parameters' elements on this rank."""
    num_units: int
    """Number of FSDP2 units."""
    num_reduces: int
    """Number of reductions over replicas."""
    num_passes: int


@dataclass(frozen=True)
class RankResults:
    """All results of one rank. On four ranks there is no long run and no uneven update."""

    steps: dict[str, step_cases.Outcome]
    long: LongRun | None
    resumed: Resumed
    uneven: UnevenUpdate | None
    failure: str
    other_models: dict[str, step_cases.Outcome]
    replicas: Replicas | None
    """Only on four ranks."""


def checkpointed(replay: replays.Replay) -> replays.Replay:
    return replace(replay, gradient_checkpointing=True)


def micro(replay: replays.Replay, max_tokens: int) -> replays.Replay:
    """The replay with this limit per micro-batch. Rows have up to 19 tokens, updates about 45."""
    return replace(replay, max_tokens_per_micro_batch=max_tokens)


def aggregated(aggregation: LossAggregation) -> replays.Replay:
    return replace(REPLAY, algorithm=WITHOUT_KL.model_copy(update={"aggregation": aggregation}))


KL_IN_REWARD = Kl(coefficient=4.0, placement=KlPlacement.REWARD)
"""A KL coefficient with which, after one step, the KL changes the gradients as much as the scores do."""


def with_advantage(path: str, kl: Kl = KL_IN_REWARD) -> replays.Replay:
    advantage = Advantage(type=AdvantageType.FUNCTION, function=Function(path=path))
    return replace(REPLAY, algorithm=Algorithm(advantage=advantage, drop_zero_variance_groups=True, kl=kl))


def corrected(num_prompts_per_update: int) -> replays.Replay:
    """Rollout correction with weights of whole responses, most of which are far below 1. With all prompts in one update
    the weights come from the update's own forward pass, and nothing is rejected."""
    rejection = RolloutRejection(level=RejectionLevel.SEQUENCE_MEAN, estimator=RejectionEstimator.K2, max=8.0)
    correction = RolloutCorrection(
        type=RolloutCorrectionType.SEQUENCE_TRUNCATED,
        max_ratio=1e-6,
        rejection=rejection if num_prompts_per_update < REPLAY.batch_size else None,
    )
    algorithm = WITHOUT_KL.model_copy(update={"rollout_correction": correction})
    return replace(REPLAY, algorithm=algorithm, mini_batch_size=num_prompts_per_update)


def replay_with_loss(wire: dict[str, object]) -> replays.Replay:
    """The loss with the aggregation of its paper."""
    aggregation = "TokenMean" if str(wire["type"]).endswith("Cov") else "SequenceMeanTokenMean"
    algorithm = Algorithm.from_wire({"loss": wire, "aggregation": aggregation, "dropZeroVarianceGroups": True})
    return replace(REPLAY, algorithm=algorithm)


LOSSES = {
    "CISPO": replay_with_loss({"type": "CISPO", "cispo": {"clipRatioHigh": 0.01}}),
    "SAPO": replay_with_loss({"type": "SAPO"}),
    "GPG": replay_with_loss({"type": "GPG"}),
    "DPPO by TV": replay_with_loss({"type": "DPPO", "dppo": {"thresholdLow": 0.001, "thresholdHigh": 0.001}}),
    "DPPO by KL": replay_with_loss(
        {"type": "DPPO", "dppo": {"divergence": "KL", "thresholdLow": 1e-6, "thresholdHigh": 1e-6}}
    ),
    # beta multiplies the rounding error of log-probabilities in the gradient: with 5 it is 1e-5 on some processors,
    # with 2 half of that.
    "DRO": replay_with_loss({"type": "DRO", "dro": {"beta": 2}}),
    "GSPO": replay_with_loss({"type": "GSPO"}),
    "GMPO": replay_with_loss({"type": "GMPO"}),
    "Clip-Cov": replay_with_loss({"type": "ClipCov", "clipCov": {"tokenShare": 0.1, "covarianceLow": 0.1}}),
    "KL-Cov": replay_with_loss({"type": "KLCov", "klCov": {"tokenShare": 0.1}}),
}
"""All losses except Clipped. Thresholds are small, so that some tokens exceed them. For the last two losses, the number
of selected tokens is such that one token more or less changes the result."""


def with_token_advantage(wire: dict[str, object]) -> replays.Replay:
    kl = {"coefficient": 0.5, "placement": "Reward", "estimator": "K1"}
    return replace(REPLAY, algorithm=Algorithm.from_wire({"dropZeroVarianceGroups": True, "kl": kl, **wire}))


TOKEN_ADVANTAGES = {
    "REINFORCE++": with_token_advantage(
        {"type": "ReinforcePlusPlus", "advantage": {"reinforcePlusPlus": {"gamma": 0.9}}}
    ),
    "optimal token baseline": with_token_advantage({"advantage": {"type": "OptimalTokenBaseline"}}),
}
"""Advantages with a KL penalty per token. GAE is tested with the critic (`test_critic`)."""
FILTERED = {
    f"filtered by {scope}": replace(
        REPLAY,
        algorithm=Algorithm.from_wire({"policyFiltration": {"type": "MaxRandom", "scope": scope}}),
    )
    for scope in ("Batch", "Group")
}
OTHER_AGGREGATIONS = [each for each in LossAggregation if each is not REPLAY.resolved.aggregation]
COVARIANCE_REPLAY = replace(REPLAY, algorithm=COVARIANCE)
SAME_AS_ONE = {
    "micro-batches of a row or two": step_cases.Case(micro(REPLAY, 19)),
    "row by row": step_cases.Case(micro(REPLAY, 40), layout=step_cases.Layout.PER_ROW),
    "padded": step_cases.Case(REPLAY, layout=step_cases.Layout.PADDED),
    "checkpointing": step_cases.Case(checkpointed(REPLAY)),
    "in tiles": step_cases.Case(REPLAY, in_tiles=True),
    "two workers": step_cases.Case(REPLAY, 2),
    "two workers, in tiles, checkpointing": step_cases.Case(checkpointed(micro(REPLAY, 40)), 2, in_tiles=True),
    "two workers, row by row": step_cases.Case(micro(REPLAY, 30), 2, step_cases.Layout.PER_ROW),
    "two workers, padded, checkpointing": step_cases.Case(checkpointed(micro(REPLAY, 40)), 2, step_cases.Layout.PADDED),
    "four workers": step_cases.Case(REPLAY, 4),
    "two replicas": step_cases.Case(replace(micro(REPLAY, 19), shard_size=1), 2),
    "two replicas of two shards": step_cases.Case(replace(micro(REPLAY, 19), shard_size=2), 4),
    "two workers, one reduction": step_cases.Case(replace(micro(REPLAY, 19), defers_reduction=True), 2),
    "two replicas of two shards, one reduction": step_cases.Case(
        replace(micro(REPLAY, 19), shard_size=2, defers_reduction=True), 4
    ),
    "two sequence ranks": step_cases.Case(replace(micro(REPLAY, 20), sequence_parallel=2), 2),
    "two sequence ranks, row by row, in tiles": step_cases.Case(
        replace(REPLAY, sequence_parallel=2), 2, step_cases.Layout.PER_ROW, in_tiles=True
    ),
    "two replicas, two sequence ranks, checkpointing": step_cases.Case(
        replace(checkpointed(micro(REPLAY, 19)), shard_size=2, sequence_parallel=2), 4
    ),
    "four workers, checkpointing, micro-batches": step_cases.Case(checkpointed(micro(REPLAY, 19)), 4),
}
ONE = {
    "one": step_cases.Case(REPLAY),
    "covariance": step_cases.Case(COVARIANCE_REPLAY),
    "corrected": step_cases.Case(corrected(4)),
    "corrected, rejected": step_cases.Case(corrected(2)),
    "advantage": step_cases.Case(with_advantage(user_algorithms.BASELINE_ON_RESPONSES_PATH), step=1),
    "advantage, no KL": step_cases.Case(with_advantage(user_algorithms.BASELINE_ON_RESPONSES_PATH, Kl()), step=1),
    **{f"{each} one": step_cases.Case(aggregated(each)) for each in OTHER_AGGREGATIONS},
    **{name: step_cases.Case(replay) for name, replay in {**LOSSES, **FILTERED}.items()},
    **{name: step_cases.Case(replay, step=1) for name, replay in TOKEN_ADVANTAGES.items()},
}
OTHERS = {
    **SAME_AS_ONE,
    "covariance, micro-batches": step_cases.Case(micro(COVARIANCE_REPLAY, 30)),
    "covariance, two workers": step_cases.Case(COVARIANCE_REPLAY, 2),
    "corrected, two sequence ranks": step_cases.Case(replace(micro(corrected(4), 20), sequence_parallel=2), 2),
    "corrected, rejected, two workers": step_cases.Case(micro(corrected(2), 30), 2),
    "advantage, two workers": step_cases.Case(with_advantage(user_algorithms.BASELINE_ON_RESPONSES_PATH), 2, step=1),
    "advantage on tokens": step_cases.Case(with_advantage(user_algorithms.BASELINE_ON_TOKENS_PATH), step=1),
    "advantage on tokens, two workers": step_cases.Case(
        with_advantage(user_algorithms.BASELINE_ON_TOKENS_PATH), 2, step=1
    ),
    "long, four workers": step_cases.Case(LONG_REPLAY, 4, step=NUM_STEPS - 1),
    "long, padded": step_cases.Case(
        checkpointed(micro(LONG_REPLAY, 30)), layout=step_cases.Layout.PADDED, step=NUM_STEPS - 1
    ),
    "long, row by row": step_cases.Case(micro(LONG_REPLAY, 40), layout=step_cases.Layout.PER_ROW, step=NUM_STEPS - 1),
    "bfloat16": step_cases.Case(replace(REPLAY, compute_dtype=torch.bfloat16), 2),
    "bfloat16, in tiles": step_cases.Case(replace(REPLAY, compute_dtype=torch.bfloat16), 2, in_tiles=True),
    **{f"{each} micro": step_cases.Case(micro(aggregated(each), 19)) for each in OTHER_AGGREGATIONS},
    **{f"{each} two": step_cases.Case(aggregated(each), 2) for each in OTHER_AGGREGATIONS},
    **{
        f"{name}, two workers": step_cases.Case(micro(replay, 30), 2) for name, replay in {**LOSSES, **FILTERED}.items()
    },
    **{
        f"{name}, two workers": step_cases.Case(micro(replay, 30), 2, step=1)
        for name, replay in TOKEN_ADVANTAGES.items()
    },
    **{
        f"{name}, two sequence ranks": step_cases.Case(replace(micro(replay, 20), sequence_parallel=2), 2, step=1)
        for name, replay in TOKEN_ADVANTAGES.items()
    },
}
CASES = ONE | OTHERS


def all_runs_of_rank(root: Path, context: WorkerContext) -> RankResults:
    """Runs everything in one process per rank, because each process costs seconds. Two ranks save checkpoints below
    `root`, which other numbers of ranks load."""
    warnings.filterwarnings("error", "FSDP2-wrapped module")
    num_ranks = context.world_size
    if num_ranks == 2:
        save_after_some_steps(root, context)
    return RankResults(
        {name: step_cases.one_step(case, context) for name, case in CASES.items() if case.num_ranks == num_ranks},
        long_run(context) if num_ranks <= 2 else None,
        resume(root, context),
        uneven_update(context) if num_ranks <= 2 else None,
        # Sequence ranks work on the same rows, and one of them may fail alone, too.
        user_algorithms.failure_of(replace(REPLAY, sequence_parallel=2 if num_ranks == 4 else 1), context),
        steps_of_other_models(root, context),
        replicas(context) if num_ranks == 4 else None,
    )


def replicas(context: WorkerContext) -> Replicas:
    run = replays.replayed_run(replace(micro(REPLAY, 19), shard_size=2, mini_batch_size=4), context)
    engine = run.actor.engine
    group = engine.meshes.parameters.get_group(REPLICATE)
    sizes: list[int] = []
    reduce_all = dist.all_reduce

    def counted(tensor: torch.Tensor, *more: object, **named: object) -> object:
        if named.get("group") is group:
            sizes.append(tensor.numel())
        return reduce_all(tensor, *more, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, recorded_passes(engine) as passes:
        patch.setattr(dist, "all_reduce", counted)
        run.step(0)
    shards = [parameter for parameter in engine.model.parameters() if isinstance(parameter, DTensor)]
    return Replicas(
        placements={tuple(map(str, each.placements)) for each in shards},
        share=sum(each.to_local().numel() for each in shards) / sum(each.numel() for each in shards),
        num_units=sum(isinstance(module, FSDPModule) for module in engine.model.modules()),
        num_reduces=len(sizes),
        num_passes=len(passes),
    )


def write_other_models(root: Path) -> None:
    """Writes two models. MORE_HEADS has four attention heads and two key-value heads. EXPERTS has eight fused experts
    and an auxiliary loss for its routers."""
    common = {
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "eos_token_id": replays.END_TOKEN,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(2)
    Qwen3ForCausalLM(Qwen3Config(**common)).save_pretrained(root / MORE_HEADS)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}
    config = Qwen3MoeConfig(**common, **experts, router_aux_loss_coef=0.5)
    Qwen3MoeForCausalLM(config).save_pretrained(root / EXPERTS)


def steps_of_other_models(root: Path, context: WorkerContext) -> dict[str, step_cases.Outcome]:
    """Steps of the other models: on one rank, or in all layouts of this number of ranks."""
    num_ranks = context.world_size
    layouts: dict[str, dict[int, tuple[int, int]]] = {
        MORE_HEADS: {1: (1, 1), 4: (4, 4)},
        EXPERTS: {1: (1, 1), 2: (2, 1), 4: (2, 2)},
    }
    found = {}
    for name, shapes in layouts.items():
        if num_ranks in shapes:
            shard_size, sequence_parallel = shapes[num_ranks]
            replay = replace(
                micro(REPLAY, 19), model=root / name, shard_size=shard_size, sequence_parallel=sequence_parallel
            )
            found[name] = step_cases.one_step(step_cases.Case(replay, num_ranks), context)
    return found


def long_run(context: WorkerContext) -> LongRun:
    run = replays.replayed_run(LONG_REPLAY, context)
    assert run.reference is not None
    actor, reference = run.actor.engine, run.reference.engine
    with recorded_passes(actor) as passes, recorded_passes(reference) as reference_passes:
        metrics = run.steps(0, 1)
    metrics += run.steps(1, SAVED_STEP)
    saved = run.state()
    metrics += run.steps(SAVED_STEP, SAVED_STEP + RESUMED_STEPS)
    later = run.state()
    metrics += run.steps(SAVED_STEP + RESUMED_STEPS, NUM_STEPS)
    return LongRun(metrics, passes, reference_passes, saved, later)


def save_after_some_steps(root: Path, context: WorkerContext) -> None:
    run = replays.replayed_run(LONG_REPLAY, context)
    run.steps(0, SAVED_STEP)
    run.save(root, SAVED_STEP)


def resume(root: Path, context: WorkerContext) -> Resumed:
    """Resumes the saved run. Four ranks resume as two replicas of two shards, and save a checkpoint in between."""
    [folder] = root.glob("step-*")
    replay = LONG_REPLAY if context.world_size != 4 else replace(LONG_REPLAY, shard_size=2, sequence_parallel=2)
    run = replays.replayed_run(replay, context)
    run.load(folder, SAVED_STEP)
    if context.world_size == 4:
        again = run.save(root / "again", SAVED_STEP)
        run.steps(SAVED_STEP, SAVED_STEP + 1)
        run.load(again, SAVED_STEP)
    loaded = run.state()
    num_steps = RESUMED_STEPS if context.world_size == 2 else 1
    return Resumed(loaded, run.steps(SAVED_STEP, SAVED_STEP + num_steps), run.state())


def uneven_update(context: WorkerContext) -> UnevenUpdate:
    """An update on sixteen rows of which only the first eight are used. With two ranks, the second has none of them."""
    run = replays.replayed_run(micro(replace(REPLAY, mini_batch_size=4), 40), context)
    rollouts, sampling = replays.ReplayedRollouts(), run.replay.plan(1).sampling
    batch = rollouts.run(replays.prompts_of(0, 4), 4, sampling, torch.tensor([3])).rows
    columns = {IS_TRAINED: torch.arange(16) < 8, ADVANTAGES: torch.linspace(-1, 2, 16)}
    share = batch.with_columns(columns).chunk(context.world_size)[context.rank]
    with recorded_gradients(run.actor.engine) as gradients, recorded_passes(run.actor.engine) as passes:
        share = share.union(run.actor.compute_logprobs(share))
        metrics = dict(run.actor.update_policy(share, 0))
    return UnevenUpdate(step_cases.Outcome(gradients, metrics, set()), passes)

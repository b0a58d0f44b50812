"""The planner's formulas equal the training engine's own accounting, to the byte, on one and on two ranks; and its
peaks equal what a CPU allocates."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rljob_api.v1alpha1.model import Lora
from rljob_planner.constants import Constants
from rljob_planner.job_workload import lora_shape
from rljob_planner.memory.host_state import host_parts
from rljob_planner.memory.train_passes import train_peak
from rljob_planner.memory.train_state import gradient_bytes, moments_part, parameters_part
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape, gathered_elements
from rljob_planner.workload import ModelOffload, PlacedPool, Role, TrainLayout, TrainModel
from rljob_testing.models import tiny_models
from rljob_testing.planner import samples
from rljob_testing.training import engine_updates, gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.host_ledger import HostUse, buffer_bytes
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.engine_memory import copies_use, engine_uses
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.model import model_size
from rljob_trainer.engines.train.offload import OffloadSettings
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_logprobs import TokenDistribution
from rljob_trainer.workers.trained_worker import TrainedWorker

UNEVEN = {**tiny_models.COMMON, "vocab_size": 121, "num_hidden_layers": 3}
"""Its embedding does not divide by two."""
CONFIGS = {
    "qwen3": Qwen3Config(**UNEVEN, head_dim=tiny_models.HEAD_SIZE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**UNEVEN, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **UNEVEN, head_dim=tiny_models.HEAD_SIZE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
RANK = 6


@dataclass(frozen=True)
class AccountCase:
    """A model and its layout and offload."""

    model: str
    num_shards: int
    num_replicas: int = 1
    is_trained: bool = True
    has_adapters: bool = False
    defers_reduction: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def num_ranks(self) -> int:
        return self.num_shards * self.num_replicas


@dataclass(frozen=True)
class Account:
    """Bytes on this rank, and the parameters of the model in the folder."""

    num_parameters: int
    parameters: int
    moments: int
    gradients_between: int
    """After the first of two micro-batches."""
    gradients: int
    """After the last micro-batch."""
    gathered: int
    """Parameters that stay gathered after a pass without backward, for a trained model."""
    host: Mapping[str, int]
    """Host memory on a GPU with full offload, by its owner."""
    copies: tuple[int, int] = (0, 0)
    """The buffers from which all ranks together write a checkpoint, on GPUs: as counted before the first step, and as
    allocated."""


def save_configured(name: str, folder: Path) -> Path:
    """Writes a random model of CONFIGS into `folder`."""
    tiny_models.make_from(CONFIGS[name]).save_pretrained(folder)
    return folder


def accounts_of(folders: Mapping[str, Path], context: WorkerContext) -> dict[AccountCase, Account]:
    """Collective. All cases with this number of ranks; `folders` have the models."""
    cases = [case for case in CASES if case.num_ranks == context.world_size]
    return {case: account(case, folders[case.model], context) for case in cases}


def account(case: AccountCase, folder: Path, context: WorkerContext) -> Account:
    """Collective. `folder` has the model."""
    settings = engine_updates.engine_settings(folder, context.device, case.dtype, max_tokens=128)
    worker = TrainedWorker(
        context,
        replace(
            settings,
            layout=ParallelLayout(case.num_shards, case.num_replicas),
            optimizer=settings.optimizer if case.is_trained else None,
            adapters=AdapterSettings(Lora(rank=RANK, alpha=RANK), 0) if case.has_adapters else None,
            defers_reduction=case.defers_reduction,
        ),
    )
    engine = worker.engine
    away = replace(engine.settings, device=torch.device("cuda"), offload=OffloadSettings(True, True, True))
    is_first_replica = engine.layout.is_first_replica(context.rank)
    copies = copies_use(away, engine.memory, is_first_replica=is_first_replica)
    uses = (*engine_uses(away, engine.memory), copies)
    host = {use.owner.replace("'s ", " "): use.num_bytes for use in uses if use.num_bytes}
    batch = engine_updates.random_batch([100, 100])
    if not case.is_trained:
        engine.forward(batch, 1.0)
        return Account(
            model_size(folder).num_parameters, engine.memory.parameters, 0, 0, 0, engine.memory.gathered, host
        )
    between: list[int] = []

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        between.append(engine.memory.gradients)
        return -distribution.logprobs_N.sum()

    engine.forward_backward(batch, loss, 1.0)
    gradients = engine.memory.gradients
    engine.optimizer_step(1e-3)
    engine.forward(batch, 1.0)
    memory = engine.memory
    return Account(
        model_size(folder).num_parameters,
        memory.parameters,
        memory.moments,
        between[-1],
        gradients,
        memory.gathered,
        host,
        copies_of_all_ranks(worker, copies),
    )


def copies_of_all_ranks(worker: TrainedWorker, counted: HostUse) -> tuple[int, int]:
    """Collective. See `Account.copies`. `counted`: on this rank."""
    copies = worker.host_buffers.copy(worker._shards())
    # Not the optimizer's step counters, which are numbers.
    allocated = buffer_bytes([copy.local.nbytes for copy in copies if copy.global_shape], is_pinned=True)
    sums = torch.tensor([counted.num_bytes, allocated])
    dist.all_reduce(sums)
    return int(sums[0]), int(sums[1])


def allocated_peak(engine: TrainEngine, lengths: list[int]) -> int:
    """The largest sum of all allocations of the process during two updates on rows of these lengths, after a first one;
    with parameters and moments, from the events of torch's profiler on CPUs."""
    batch = engine_updates.random_batch([*lengths, *lengths])

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        return -distribution.logprobs_N.sum()

    engine.forward_backward(batch, loss, 1.0)
    engine.optimizer_step(1e-3)
    # An engine has reference cycles. If an earlier engine of this process were collected during this profile, the
    # profiler would subtract its gradients, whose sizes it still knows.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.forward_backward(batch, loss, 1.0)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return engine.memory.parameters + engine.memory.moments + peak


CASES = (
    AccountCase("qwen3", 1),
    AccountCase("qwen3", 2),
    AccountCase("qwen3", 1, 2),
    AccountCase("qwen2", 2),
    AccountCase("qwen2", 2, defers_reduction=True),
    AccountCase("qwen3_moe", 2),
    AccountCase("qwen3", 2, has_adapters=True, dtype=torch.bfloat16),
    AccountCase("qwen3", 2, is_trained=False, dtype=torch.bfloat16),
)


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> dict[AccountCase, tuple[ModelShape, Account]]:
    """The measurements of the first rank, which has most memory."""
    root = tmp_path_factory.mktemp("models")
    folders = {name: save_configured(name, root / name) for name in {case.model for case in CASES}}
    found: dict[AccountCase, tuple[ModelShape, Account]] = {}
    for first, *_ in gloo_ranks.run_on_ranks(
        [gloo_ranks.RankedRun(partial(accounts_of, folders), num_ranks) for num_ranks in (1, 2)]
    ):
        assert isinstance(first, dict)
        found |= {case: (shape_of(folders[case.model]), each) for case, each in first.items()}
    return found


def shape_of(folder: Path) -> ModelShape:
    return shape_of_config(json.loads((folder / "config.json").read_text()), folder.name)


def model_of(case: AccountCase, shape: ModelShape) -> TrainModel:
    """The planner's model of a case, with full offload."""
    return TrainModel(
        shape,
        case.is_trained,
        compute_bytes=case.dtype.itemsize,
        lora=lora_shape(shape, RANK, None, syncs_alone=False) if case.has_adapters else None,
        offload=ModelOffload(True, case.is_trained, case.is_trained),
        defers_reduction=case.defers_reduction,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_host_memory_equals_that_of_the_engine(
    case: AccountCase, accounts: dict[AccountCase, tuple[ModelShape, Account]]
) -> None:
    shape, found = accounts[case]
    workload = replace(samples.workload(), models={Role.ACTOR: model_of(case, shape)})
    pool = PlacedPool("main", 1, 1, samples.gpu(), {Role.ACTOR: TrainLayout(case.num_ranks, case.num_shards)})
    parts = {part.owner: part.num_bytes for part in host_parts(pool, workload, Constants(process_bytes=5.0))}
    assert parts == {"libraries": 5.0, **found.host}


@pytest.mark.parametrize("case", [case for case in CASES if case.is_trained], ids=str)
def test_only_the_first_replica_copies_for_checkpoints(
    case: AccountCase, accounts: dict[AccountCase, tuple[ModelShape, Account]]
) -> None:
    shape, found = accounts[case]
    counted, allocated = found.copies
    assert counted == allocated > 0
    workload = replace(samples.workload(), models={Role.ACTOR: model_of(case, shape)})
    layout = TrainLayout(case.num_ranks, case.num_shards)
    pool = PlacedPool("main", 1, case.num_ranks, samples.gpu(), {Role.ACTOR: layout})
    parts = {part.owner: part.num_bytes for part in host_parts(pool, workload, Constants())}
    planned = parts["actor copies for checkpoints"]
    # The plan counts the first rank's buffers for all ranks; the second one has fewer experts.
    assert planned > counted if shape.num_experts else planned == counted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_equals_that_of_the_engine(
    case: AccountCase, accounts: dict[AccountCase, tuple[ModelShape, Account]]
) -> None:
    shape, found = accounts[case]
    model = model_of(case, shape)
    layout = TrainLayout(case.num_ranks, case.num_shards)
    # `gradientCheckpointing: Auto` depends on it.
    assert found.num_parameters == shape.num_parameters
    assert found.parameters == parameters_part(model, layout).num_bytes
    assert found.moments == moments_part(model, layout).num_bytes
    if not case.is_trained:
        assert found.gathered == found.gradients == 0
        return
    assert found.gathered == model.compute_bytes * gathered_elements(model.non_layer_units.root, case.num_shards)
    assert found.gradients_between == gradient_bytes(model, layout)
    reduced = TrainModel(shape, True, compute_bytes=model.compute_bytes, lora=model.lora)
    assert found.gradients == gradient_bytes(reduced, layout)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("ties_head", [False, True])
def test_peak_is_what_a_cpu_allocates(tmp_path: Path, ties_head: bool, recomputes: bool) -> None:
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=ties_head,
    )
    folder, lengths = tmp_path / "model", [129] * 4
    tiny_models.make_from(config).save_pretrained(folder)
    (tmp_path / "group").mkdir()
    with gloo_ranks.process_group_of_one(tmp_path / "group") as context:
        settings = engine_updates.engine_settings(
            folder, context.device, max_tokens=512, gradient_checkpointing=recomputes
        )
        measured = allocated_peak(TrainEngine(settings), lengths)
    model = TrainModel(shape_of(folder), True, compute_bytes=4, checkpoints_activations=recomputes)
    peak = train_peak(model, TrainLayout(1, 1), 512, is_cpu=True)
    assert sum(part.num_bytes for part in peak) == pytest.approx(measured, rel=0.03)

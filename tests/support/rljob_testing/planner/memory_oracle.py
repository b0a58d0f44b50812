"""Counts the memory of the training engine with torch's memory tracker: the reference for the planner's formulas.

`FSDPMemTracker` (torch.distributed._tools, 2.13) sees when every storage is allocated and freed. With fake tensors,
which have shapes but no memory, and the process group `fake`, models of any size run on any number of ranks. The code
that runs is the engine's own: `sharded_model` with its sharding units, mixed precision, recomputation and adapters,
`TokenModel` with its passes and its tiled output head, `make_adamw`, micro-batches of `TokenBatch`, sequence ranks.
Only `_accumulate` and `optimizer_step` of the engine are written again here.

FSDP2 creates streams, so it cannot run on fake CUDA tensors without a driver. The tensors are on the CPU, and three
choices that depend on the device are set as on a GPU: the attention kernel is `torch.nn.attention.varlen` (torch's fake
FlashAttention, which keeps queries, keys, values, output and one float32 number per token and head), tiles of logits
have the size for GPUs, and matrix products are in 16 bits. Effects of streams are not visible: an allocator that waits
for another stream before it reuses memory, and fragmentation.

The tracker itself adds memory in one case: autograd adds gradients of a shared tensor (tied embeddings) out of place
while a dispatch mode is active, otherwise in place. This shows only at the end of a backward pass with few tokens. A
second case is corrected here: the tracker's hook keeps the last gradient of a unit while it is reduced.

`MemoryCase` is one case for both sides: a model by its name in the planner's table, with the sizes of its
`config.json`. `peak_by_tracker` is the tracker's count, `peak_by_planner` the planner's prediction.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType, _FSDPState
from torch.distributed._tools.mem_tracker import _State
from torch.distributed.tensor import _sharding_prop
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PreTrainedConfig

from rljob_api.v1alpha1.model import Lora
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_planner.job_workload import lora_shape
from rljob_planner.known_models import known_configs, known_model
from rljob_planner.memory.train_passes import scoring_peak, train_peak
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import TrainLayout, TrainModel
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train import attention, token_logprobs
from rljob_trainer.engines.train.attention_kernels import Kernel
from rljob_trainer.engines.train.layout import LayoutMeshes, ParallelLayout
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.optimizer import make_adamw
from rljob_trainer.engines.train.sequence_parallel import SequenceRanks
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.sharded_model import sharded_model
from rljob_trainer.engines.train.token_batch import MicroBatch, TokenBatch
from rljob_trainer.engines.train.token_model import LogprobRequest, TokenModel

CPU = torch.device("cpu")
NUM_MICRO_BATCHES = 2
"""Micro-batches of an update: the second one finds the gradients of the first."""
PROMPT_TOKENS = 3


@dataclass(frozen=True)
class OracleCase:
    """A model, its layout, and its micro-batch."""

    config: PreTrainedConfig
    layout: ParallelLayout
    tokens_of_rank: int
    """Tokens of a micro-batch on which the layers of each rank compute."""
    row_tokens: int
    """Tokens of each row; divides the tokens of a micro-batch."""
    recomputed_every: int = 0
    """Every n-th layer is recomputed; 0 keeps all activations."""
    adapter_rank: int | None = None
    is_trained: bool = True
    defers_reduction: bool = False
    compute_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Tracked:
    """Bytes of the first rank."""

    resident: int
    """Memory between updates, after the first update."""
    passes: int
    """Peak of forward and backward passes."""
    whole: int
    """Peak including the optimizer step."""
    at_peak: dict[str, int]
    """Bytes at the peak, by the tracker's categories."""


class Planned(NamedTuple):
    """Predicted bytes of the fullest rank."""

    resident: float
    """Parameters and moments."""
    whole: float
    """Peak."""


class _QuickTracker(FSDPMemTracker):  # type: ignore[no-untyped-call]
    """Skips two slow parts of the tracker: the peak of every single module, which takes most of the time, and queries
    for a tensor's device, which are most of the operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _fsdp_param_group_post_backward(self, fsdp_mod, orig_fsdp_param_group_post_backward):  # type: ignore[no-untyped-def]
        """Like the tracker's own hook, but a local variable does not keep the last gradient while it is reduced, and
        there are no snapshots of modules."""

        def inner(*args: object) -> None:
            for parameter in fsdp_mod._get_fsdp_state()._fsdp_param_group.fsdp_params:
                self._assign_kind(parameter._unsharded_param.grad, _FSDPRefType.UNSHARDED_GRAD)
            self._fsdp_state = _FSDPState.POST_BW
            orig_fsdp_param_group_post_backward(*args)
            for parameter in fsdp_mod._get_fsdp_state()._fsdp_param_group.fsdp_params:
                self._assign_kind(parameter.sharded_param.grad, _FSDPRefType.SHARDED_GRAD)

        return inner

    def _assign_kind(self, tensor: Tensor | None, kind: _FSDPRefType) -> None:
        if tensor is not None:
            self._update_and_maybe_create_winfos(tensor, kind, update_existing=kind is _FSDPRefType.UNSHARDED_GRAD)

    def _update_peak_stats(self, peak_state: _State) -> None:
        del peak_state
        for device, snapshot in self._curr_mem_snap.items():
            if snapshot["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = snapshot["Total"]
                self._peak_mem_snap[device] = dict(snapshot)


@contextmanager
def fake_engine(case: OracleCase) -> Iterator[tuple[TokenModel, MicroBatch]]:
    """The case's model on fake ranks and a micro-batch, both with fake tensors, with the fake tensor mode active."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        case.config.save_pretrained(folder)
        stack.enter_context(_fake_ranks(case.layout.num_ranks))
        stack.enter_context(_as_on_a_gpu())
        meshes = LayoutMeshes(case.layout, "cpu")
        model = sharded_model(_settings(case, folder), case.layout, meshes.parameters, case.compute_dtype)
        model.train(case.is_trained)
        micro_batch = _micro_batch(case, meshes.sequence_ranks)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        micro_batch = _faked(micro_batch, mode)
        stack.enter_context(mode)
        model._apply(lambda each: torch.empty_like(each, device=CPU) if each.is_meta else each)  # type: ignore[no-untyped-call]
        model.requires_grad_(case.is_trained) if case.adapter_rank is None else None
        yield model, micro_batch


def peak_by_tracker(case: OracleCase) -> Tracked:
    """Peak of an update that already has optimizer moments, or of a forward pass of a frozen model."""
    with fake_engine(case) as (model, micro_batch):
        optimizer = None
        if case.is_trained:
            trained = [each for each in model.parameters() if each.requires_grad]
            optimizer = make_adamw(trained, Optimizer())
            for each in trained:
                optimizer.state[each] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(each),
                    "exp_avg_sq": torch.zeros_like(each),
                }
        tracker = _QuickTracker(model, optimizer)
        with tracker:
            resident = _total(tracker, "current")
            if optimizer is None:
                scoring_pass(model, micro_batch)
            else:
                for number in range(NUM_MICRO_BATCHES):
                    training_pass(case, model, micro_batch, is_last=number == NUM_MICRO_BATCHES - 1)
                    tracker.reset_mod_stats()
            of_passes = _total(tracker, "peak")
            if optimizer is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        at_peak = {str(kind): size for kind, size in tracker.get_tracker_snapshot("peak")[CPU].items()}
        return Tracked(resident, of_passes, _total(tracker, "peak"), at_peak)


def training_pass(case: OracleCase, model: TokenModel, micro_batch: MicroBatch, *, is_last: bool) -> None:
    """Forward and backward pass of a micro-batch. `is_last`: it is the last one before an optimizer step."""
    if case.defers_reduction:
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    elif case.layout.num_replicas > 1:
        model.set_requires_all_reduce(is_last)  # type: ignore[operator]
    *_, logprobs_N, _entropy, _squares = model(lambda each: each.routed_columns(micro_batch, LogprobRequest(1.0)))
    assert logprobs_N is not None
    (-logprobs_N.sum()).backward()


@torch.no_grad()
def scoring_pass(model: TokenModel, micro_batch: MicroBatch) -> None:
    """Forward pass of a micro-batch without gradients."""
    model(lambda each: each.columns(micro_batch, LogprobRequest(1.0)))


def _total(tracker: FSDPMemTracker, moment: str) -> int:
    return int(tracker.get_tracker_snapshot(moment)[CPU]["Total"])


def _settings(case: OracleCase, folder: Path) -> TrainEngineSettings:
    rank = case.adapter_rank
    return TrainEngineSettings(
        model_folder=folder,
        device=CPU,
        compute_dtype=case.compute_dtype,
        gradient_checkpointing=case.recomputed_every > 0,
        max_tokens_per_micro_batch=case.tokens_of_rank,
        optimizer=Optimizer() if case.is_trained else None,
        layout=case.layout,
        adapters=None if rank is None else AdapterSettings(Lora(rank=rank, alpha=2 * rank), 0),
        gradient_checkpointing_every_nth_layer=max(1, case.recomputed_every),
        defers_reduction=case.defers_reduction,
    )


def _micro_batch(case: OracleCase, ranks: SequenceRanks | None) -> MicroBatch:
    """A micro-batch on the host. A row has one more token, because its last token is not an input."""
    num_rows = case.tokens_of_rank * case.layout.num_sequence_ranks // case.row_tokens
    tokens = RaggedColumn.from_rows([torch.zeros(case.row_tokens + 1, dtype=torch.int64)] * num_rows)
    mask = RaggedColumn.from_rows([torch.arange(case.row_tokens + 1) >= PROMPT_TOKENS] * num_rows)
    return TokenBatch(tokens, mask, {}).micro_batch(range(num_rows), CPU, ranks)


def _faked(micro_batch: MicroBatch, mode: FakeTensorMode) -> MicroBatch:
    def fake(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor)

    rows = micro_batch.rows
    # These are computed when they are first used, from values that fake tensors do not have.
    vars(rows).update(position_ids_1M=fake(rows.position_ids_1M), cumulative_lengths=fake(rows.cumulative_lengths))
    return replace(
        micro_batch,
        tokens_M=fake(micro_batch.tokens_M),
        predictors_N=fake(micro_batch.predictors_N),
        targets_N=fake(micro_batch.targets_N),
    )


@contextmanager
def _fake_ranks(num_ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    with (
        patch.object(attention, "choose_kernel", lambda *_: Kernel.VARIABLE_LENGTH),
        patch.object(token_logprobs, "CPU_TILE_BYTES", token_logprobs.GPU_TILE_BYTES),
        patch.object(token_logprobs, "_product_dtype", lambda hidden_MD: hidden_MD.dtype),
        # DTensor computes shapes with whole tensors in the fake mode that it detects, and the tracker would count them:
        # four times all parameters in an AdamW step. Without a detected mode it uses its own, which is not tracked.
        patch.object(_sharding_prop, "detect_fake_mode", lambda: None),
    ):
        yield


ROW_TOKENS = 4096


@dataclass(frozen=True)
class MemoryCase:
    """A case for the tracker and the planner."""

    model: str
    num_shards: int
    num_replicas: int = 1
    sequence_parallel: int = 1
    tokens_of_rank: int = ROW_TOKENS
    recomputed_every: int = 0
    rank: int | None = None
    is_trained: bool = True
    defers_reduction: bool = False
    num_layers: int | None = None
    """Number of layers; None for all layers of the model."""

    def changed(
        self,
        *,
        model: str | None = None,
        recomputed_every: int | None = None,
        rank: int | None = None,
        is_trained: bool | None = None,
    ) -> MemoryCase:
        """A copy in which the given values are replaced."""
        return replace(
            self,
            model=self.model if model is None else model,
            recomputed_every=self.recomputed_every if recomputed_every is None else recomputed_every,
            rank=self.rank if rank is None else rank,
            is_trained=self.is_trained if is_trained is None else is_trained,
        )

    def config(self) -> PreTrainedConfig:
        """The configuration for transformers."""
        fields = dict(known_configs()[self.model.lower()][1])
        if self.num_layers is not None:
            fields["num_hidden_layers"] = self.num_layers
        config: PreTrainedConfig = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
        return config

    def shape(self) -> ModelShape:
        """The shape for the planner."""
        shape = known_model(self.model)
        assert shape is not None, self.model
        return shape if self.num_layers is None else replace(shape, num_layers=self.num_layers)

    def oracle(self) -> OracleCase:
        """The case for the tracker."""
        return OracleCase(
            self.config(),
            ParallelLayout(self.num_shards, self.num_replicas, self.sequence_parallel),
            self.tokens_of_rank,
            min(self.tokens_of_rank * self.sequence_parallel, ROW_TOKENS),
            self.recomputed_every,
            adapter_rank=self.rank,
            is_trained=self.is_trained,
            defers_reduction=self.defers_reduction,
            compute_dtype=torch.bfloat16,
        )


def peak_by_planner(case: MemoryCase) -> Planned:
    """The memory that the planner predicts."""
    shape = case.shape()
    model = TrainModel(
        shape,
        case.is_trained,
        checkpoints_activations=case.recomputed_every > 0,
        checkpoints_every_nth_layer=max(1, case.recomputed_every),
        lora=None if case.rank is None else lora_shape(shape, case.rank, None, syncs_alone=False),
        defers_reduction=case.defers_reduction,
    )
    layout = TrainLayout(case.num_shards * case.num_replicas, case.num_shards, case.sequence_parallel)
    parts = (train_peak if case.is_trained else scoring_peak)(model, layout, case.tokens_of_rank)
    resident = sum(part.num_bytes for part in parts if part.owner in ("parameters", "moments"))
    return Planned(resident, sum(part.num_bytes for part in parts))

"""The training engine: a causal language model sharded with FSDP2 (`fully_shard`), its optimizer, and its passes.

Every rank of the process group builds one engine; every method that is marked collective must be called by all ranks in
the same order. Master weights, gradients and optimizer state are float32 shards; the passes run in the given precision.

Legend: B rows, T tokens, N chosen tokens of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rljob_api.v1alpha1.optimizer import Optimizer as OptimizerSpec
from rljob_trainer.engines.train.forward import PolicyModel
from rljob_trainer.engines.train.micro_batches import plan_micro_batches
from rljob_trainer.engines.train.model import (
    build_on_meta,
    load_weights,
    materialize,
    named_tensors,
    transformer_layers,
)
from rljob_trainer.engines.train.optimizer import make_adamw

NAME_PREFIX = "language_model."
"""What wrapping adds in front of the parameter names of the Hugging Face model."""


@dataclass(frozen=True)
class TrainEngineSettings:
    """What an engine is built from. `compute_dtype` is that of the passes; `optimizer` is None for a frozen model."""

    model_folder: Path
    device: torch.device
    compute_dtype: torch.dtype
    gradient_checkpointing: bool
    max_tokens_per_micro_batch: int
    optimizer: OptimizerSpec | None


class Fsdp2Engine:
    """One model, sharded over all ranks of the default process group (which must exist)."""

    def __init__(self, settings: TrainEngineSettings) -> None:
        """Collective. Raises ConfigurationError when the folder holds no usable model."""
        self.device = settings.device
        self.max_tokens_per_micro_batch = settings.max_tokens_per_micro_batch
        self.mesh: DeviceMesh = init_device_mesh(settings.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        language_model = build_on_meta(settings.model_folder)
        if settings.gradient_checkpointing:
            language_model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.model: nn.Module = PolicyModel(language_model)
        policy = MixedPrecisionPolicy(param_dtype=settings.compute_dtype, reduce_dtype=torch.float32)
        for layer in transformer_layers(self.model):
            fully_shard(layer, mesh=self.mesh, mp_policy=policy)
        fully_shard(self.model, mesh=self.mesh, mp_policy=policy)
        materialize(self.model, settings.device)
        load_weights(self.model, settings.model_folder, NAME_PREFIX)
        self.model.train(settings.optimizer is not None)
        self.optimizer: torch.optim.AdamW | None = None
        if settings.optimizer is None:
            self.model.requires_grad_(False)
        else:
            self.optimizer = make_adamw(self.model.parameters(), settings.optimizer)
            self.max_gradient_norm = settings.optimizer.max_gradient_norm

    def score(
        self,
        tokens_BT: torch.Tensor,
        predicted_BT: torch.Tensor,
        temperature: float,
        with_entropy_gradient: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective. Log-probabilities and entropies [N] of the marked tokens; see PolicyModel.forward."""
        logprobs_N, entropy_N = self.model(
            tokens_BT.to(self.device), predicted_BT.to(self.device), temperature, with_entropy_gradient
        )
        return logprobs_N, entropy_N

    @torch.no_grad()
    def logprobs(self, tokens_BT: torch.Tensor, predicted_BT: torch.Tensor, temperature: float) -> torch.Tensor:
        """Collective. [B, T] float32 on the CPU: log-probability of every marked token, 0 elsewhere."""
        result_BT = torch.zeros(tokens_BT.shape, dtype=torch.float32)
        lengths = row_lengths(tokens_BT, predicted_BT)
        for rows in self.micro_batches(lengths):
            tokens, predicted = cut_rows(rows, lengths, tokens_BT, predicted_BT)
            logprobs_N, _ = self.score(tokens, predicted, temperature)
            scattered = torch.zeros(tokens.shape, dtype=torch.float32)
            scattered[predicted] = logprobs_N.float().cpu()
            result_BT[rows, : tokens.shape[1]] = scattered[: len(rows)]
        return result_BT

    def micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Collective. Row indices of each micro-batch; equally many micro-batches on every rank."""
        return plan_micro_batches(lengths, self.max_tokens_per_micro_batch, self._largest)

    def optimizer_step(self, learning_rate: float) -> float:
        """Collective. Clips and applies the gradients; returns their global norm before clipping.

        With a norm that is not finite nothing is changed and the gradients are dropped."""
        assert self.optimizer is not None, "a frozen engine has no optimizer"
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_gradient_norm)
        gradient_norm = float(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        if math.isfinite(gradient_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.drop_gradients()
        return gradient_norm

    def drop_gradients(self) -> None:
        """Forgets the gradients of the passes since the last update."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def named_shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards (DTensors) under the names of the Hugging Face model, in the same order on all ranks."""
        self._reshard()
        for name, tensor in named_tensors(self.model):
            yield name.removeprefix(NAME_PREFIX), tensor

    def named_optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Moments and step counters of AdamW: `<moment>.<parameter name>`. Made (as zeros) where none exist yet."""
        self._reshard()
        assert self.optimizer is not None, "a frozen engine has no optimizer"
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            for moment in ("exp_avg", "exp_avg_sq", "step"):
                yield f"{moment}.{name.removeprefix(NAME_PREFIX)}", state[moment]

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. Elementwise sum."""
        values = values.to(self.device)
        dist.all_reduce(values)
        return values

    def max_over_ranks(self, value: float) -> float:
        """Collective. The largest value."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def _largest(self, count: int) -> int:
        return int(self.max_over_ranks(float(count)))

    def _reshard(self) -> None:
        """FSDP2 leaves the root's parameters whole after a pass; here they become DTensors again."""
        self.model.reshard()  # type: ignore[operator]


def row_lengths(tokens_BT: torch.Tensor, predicted_BT: torch.Tensor) -> list[int]:
    """Tokens per row up to the last marked one: later ones influence nothing that is asked for."""
    positions_T = torch.arange(1, tokens_BT.shape[1] + 1)
    return [max(1, int(length)) for length in (predicted_BT * positions_T).amax(dim=1).tolist()]


def cut_rows(
    rows: Sequence[int], lengths: Sequence[int], tokens_BT: torch.Tensor, predicted_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a micro-batch, cut to the longest; for an empty one a single row with nothing marked."""
    if not rows:
        return tokens_BT[:1, :1], torch.zeros((1, 1), dtype=torch.bool)
    width = max(lengths[row] for row in rows)
    index = list(rows)
    return tokens_BT[index, :width], predicted_BT[index, :width]

"""The training engine: a causal language model sharded with FSDP2 (`fully_shard`), its optimizer, and its passes.

The actor, the critic and frozen models such as the reference each have a training engine (for generation there is a
rollout engine). Every rank of the process group builds it; all ranks must call collective methods in the same order.

Master weights, gradients and optimizer state of a trained model are float32 shards; forward and backward passes run in
`compute_dtype`. The shards of frozen weights (with LoRA, all but the adapters) are in `compute_dtype`.

Legend: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rljob_trainer.engines.host_ledger import HOST_LEDGER, HostUse
from rljob_trainer.engines.process_group import max_over_all_ranks
from rljob_trainer.engines.train import micro_batching
from rljob_trainer.engines.train.engine_build import built_model
from rljob_trainer.engines.train.engine_memory import EngineMemory, engine_uses
from rljob_trainer.engines.train.layout import ParallelLayout, meshes_of
from rljob_trainer.engines.train.lora import adapter_tensors, adapters_in_inference, base_tensors, lora_layers
from rljob_trainer.engines.train.model import check_bfloat16, named_tensors
from rljob_trainer.engines.train.offload import Offloading
from rljob_trainer.engines.train.optimizer import make_adamw
from rljob_trainer.engines.train.router import RouterUse, Routing
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import MicroBatch, TokenBatch
from rljob_trainer.engines.train.token_logprobs import Entropy, TokenDistribution
from rljob_trainer.engines.train.token_model import (
    NAME_PREFIX,
    ForwardRequest,
    LogprobRequest,
    TokenModel,
    ValueRequest,
)
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.observability.activity import ACTIVITY
from rljob_trainer.observability.memory import MEMORY, Boundary

Loss = Callable[[MicroBatch, TokenDistribution], Tensor]
"""Returns the micro-batch's part of the mini-batch's loss, 0-d, times the layout's `gradient_divisor`."""
ValueLoss = Callable[[MicroBatch, Tensor], Tensor]
"""Like `Loss`, for values [N]."""


class WeightVersion(NamedTuple):
    """The identity of an engine's parameters and moments within its process."""

    num_loads: int
    """The number of checkpoints whose loading has begun."""
    num_updates: int

    def after_update(self) -> WeightVersion:
        """Returns the version after one more update."""
        return self._replace(num_updates=self.num_updates + 1)

    def after_load(self) -> WeightVersion:
        """Returns the version after one more load."""
        return self._replace(num_loads=self.num_loads + 1)


class TrainEngine:
    """One model, sharded over all ranks of the default process group (which must exist)."""

    def __init__(self, settings: TrainEngineSettings) -> None:
        """Collective. Raises ConfigurationError if the folder has no usable model, or if this engine does not compute
        the model's log-probabilities correctly (see `logprob_parity`); ResourceError if memory is too small."""
        if settings.compute_dtype == torch.bfloat16 and settings.device.type == "cuda":
            check_bfloat16(settings.device)
        self.settings = settings
        self.device = settings.device
        self.layout = settings.layout or ParallelLayout.of(dist.get_world_size())
        self.meshes = meshes_of(self.layout, settings.device.type)
        self.data_group = self.meshes.data_group
        self.sequence_ranks = self.meshes.sequence_ranks
        self.model = built_model(settings, self.layout, self.meshes)
        self.routing = Routing(self.model.router, lambda sums: self._reduced(sums, dist.ReduceOp.SUM, None))
        self.adapted_layers = [] if settings.adapters is None else lora_layers(self.language_model)
        self.optimizer: torch.optim.AdamW | None = None
        if settings.optimizer is None:
            self.model.requires_grad_(False)
        else:
            self.optimizer = make_adamw(
                (each for each in self.model.parameters() if each.requires_grad), settings.optimizer
            )
            self.max_gradient_norm = settings.optimizer.max_gradient_norm
        self.memory = EngineMemory(self.model, self.optimizer)
        self.weight_version = WeightVersion(0, 0)
        """Changes whenever parameters or moments change. Other code that changes them must change it, too."""
        self.before_use: Callable[[], None] = lambda: None
        """Called before this engine uses the device: before each pass, and before its state is read."""
        self.offloading = Offloading(
            settings.offload, self.device, self.model, self.optimizer, lambda: self.weight_version
        )
        HOST_LEDGER.watch(self.host_uses)
        HOST_LEDGER.check()
        self.offload_state()

    @property
    def language_model(self) -> PreTrainedModel:
        """The transformers model within the sharded module."""
        language_model = self.model.language_model
        assert isinstance(language_model, PreTrainedModel)
        return language_model

    @torch.no_grad()
    def forward(
        self,
        batch: TokenBatch,
        temperature: float,
        entropy: Entropy = Entropy.NO,
        *,
        with_squares: bool = False,
        with_adapters: bool = True,
    ) -> TokenDistribution:
        """Collective. The log-probabilities of the batch's response tokens by the current weights, and entropy and
        squared probabilities if requested: [N] float32 on the host, row after row. Without adapters, a LoRA model is as
        before its training. Offloaded parameters of a frozen model are on the device only during this call."""
        found = self._columns(batch, LogprobRequest(temperature, entropy, with_squares), with_adapters=with_adapters)
        logprobs_N, *others = found
        entropy_N = others.pop(0) if entropy is not Entropy.NO and others else None
        return TokenDistribution(logprobs_N, entropy_N, others.pop(0) if others else None)

    @torch.no_grad()
    def values(self, batch: TokenBatch) -> Tensor:
        """Collective. The values of a model with a value head at the tokens before the batch's response tokens: [N]
        float32 on the host, row after row."""
        [values_N] = self._columns(batch, ValueRequest(), with_adapters=True)
        return values_N

    def forward_backward(
        self,
        batch: TokenBatch,
        loss: Loss,
        temperature: float,
        entropy: Entropy = Entropy.NO,
        *,
        with_squares: bool = False,
    ) -> None:
        """Collective. Accumulates the gradient of the loss on this rank's rows, and of the routers' auxiliary loss if
        the model's configuration has one. `loss` is called once for each micro-batch."""
        self._accumulate(
            batch,
            LogprobRequest(temperature, entropy, with_squares),
            lambda micro_batch, columns: loss(micro_batch, _as_distribution(columns)),
        )

    def fit_values(self, batch: TokenBatch, loss: ValueLoss) -> None:
        """Collective. Like `forward_backward` for a model with a value head: `loss` gets the values [N]."""
        self._accumulate(batch, ValueRequest(), lambda micro_batch, columns: loss(micro_batch, _as_values(columns)))

    def take_routing(self) -> dict[str, float]:
        """Collective. Metrics of how tokens were distributed across experts in the forward passes with gradient since
        the last call; empty for a model without experts."""
        return self.routing.take()

    def optimizer_step(self, learning_rate: float) -> float:
        """Collective. Clips and applies the gradients; returns their global norm before clipping.

        If the norm is not finite, the gradients are dropped and nothing changes."""
        assert self.optimizer is not None, "a frozen engine has no optimizer"
        with self.offloading.optimizer_step() as wait_for_moments:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_gradient_norm)
            gradient_norm = float(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
            if math.isfinite(gradient_norm):
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate
                wait_for_moments()
                self.optimizer.step()
                self.weight_version = self.weight_version.after_update()
                MEMORY.mark(Boundary.OPTIMIZER_STEP)
            self.optimizer.zero_grad(set_to_none=True)
        return gradient_norm

    def host_uses(self) -> list[HostUse]:
        """The host memory that this engine keeps."""
        parameters = self.offloading.parameters
        return engine_uses(self.settings, self.memory, 0 if parameters is None else parameters.num_host_bytes)

    def fetch_parameters(self) -> None:
        """Copies offloaded parameters back to the device; later operations wait for the copies."""
        self.before_use()
        if self.offloading.parameters is not None:
            self.offloading.parameters.wait()

    def offload_state(self) -> None:
        """Reshards gathered parameters, and offloads parameters and moments if the settings say so."""
        self._reshard()
        if self.offloading.parameters is not None:
            self.offloading.parameters.move_to_host()
        self.offload_moments()

    def offload_moments(self) -> None:
        """Offloads the optimizer's moments if the settings say so."""
        if self.offloading.moments is not None:
            self.offloading.moments.move_to_host()

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shards (DTensors) without adapters, under the names of the Hugging Face model, in the same order
        on all ranks. Offloaded state is copied to the device (also by `named_adapters` and `named_optimizer_state`) and
        stays there until `offload_state` or `offload_moments`."""
        return base_tensors(self._named_tensors())

    def named_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shards of all adapters, under the names of peft's files, in the same order on all ranks."""
        return adapter_tensors(self._named_tensors())

    def named_optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """The moments and step counters of AdamW as `<moment>.<parameter name>`; created as zeros if missing."""
        self.before_use()
        self._reshard()
        assert self.optimizer is not None, "a frozen engine has no optimizer"
        if self.offloading.moments is not None:
            self.offloading.moments.wait()
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            state = self.optimizer.state[parameter]
            if not state:
                # On the device, where the fused kernel reads it.
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            for moment in ("exp_avg", "exp_avg_sq", "step"):
                yield f"{moment}.{name.removeprefix(NAME_PREFIX)}", state[moment]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Collective. The elementwise sum over data-parallel ranks, on the device of `values`."""
        return self._reduced(values, dist.ReduceOp.SUM, self.data_group)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Collective. The elementwise maximum over data-parallel ranks, on the device of `values`."""
        return self._reduced(values, dist.ReduceOp.MAX, self.data_group)

    def names_over_ranks(self, names: Iterable[str]) -> list[str]:
        """Collective. The sorted union of the names of all ranks, also of ranks that share the same rows."""
        found: list[list[str]] = [[] for _ in range(self.layout.num_ranks)]
        dist.all_gather_object(found, sorted(names))
        return sorted({name for each in found for name in each})

    def _columns(self, batch: TokenBatch, request: ForwardRequest, *, with_adapters: bool) -> list[Tensor]:
        """The requested columns, [N] each on the host."""
        self.fetch_parameters()
        micro_batches = self._micro_batches_of(batch)
        outputs: list[list[Tensor]] = []
        for number, rows in enumerate(micro_batches, 1):
            ACTIVITY.report_activity("micro-batches", number, len(micro_batches))
            micro_batch = batch.micro_batch(rows, self.device, self.sequence_ranks)
            with adapters_in_inference(self.adapted_layers, with_adapters=with_adapters):
                found = self.model(partial(TokenModel.columns, micro_batch=micro_batch, request=request))
            outputs.append([each for each in found if each is not None])
        MEMORY.sample()
        if self.optimizer is None:
            # Without a backward pass FSDP2 leaves the root's parameters gathered, but generation needs their memory.
            self.offload_state()
        return [
            micro_batching.in_batch_order([each[i].cpu() for each in outputs], micro_batches, batch.response_lengths)
            for i in range(len(outputs[0]) if outputs else 1)
        ]

    def _accumulate(
        self, batch: TokenBatch, request: ForwardRequest, loss: Callable[[MicroBatch, Sequence[Tensor | None]], Tensor]
    ) -> None:
        """The common part of `forward_backward` and `fit_values`."""
        self.fetch_parameters()
        micro_batches = self._micro_batches_of(batch)
        if self.model.router is not None:
            self.routing.begin(self._uses(batch, micro_batches))
        for number, rows in enumerate(micro_batches, 1):
            ACTIVITY.report_activity("micro-batches", number, len(micro_batches))
            is_last = number == len(micro_batches)
            if self.settings.defers_reduction:
                self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            elif self.layout.num_replicas > 1:
                # Replicas reduce their accumulated gradients once, with the last micro-batch.
                self.model.set_requires_all_reduce(is_last)  # type: ignore[operator]
            micro_batch = batch.micro_batch(rows, self.device, self.sequence_ranks)
            counts_LE, used_LE, probabilities_E, *columns = self.model(
                partial(TokenModel.routed_columns, micro_batch=micro_batch, request=request)
            )
            value = loss(micro_batch, columns)
            if counts_LE is not None:
                self.routing.count(counts_LE)
            if used_LE is not None:
                use = RouterUse(used_LE, probabilities_E)
                value = value + self.routing.loss(use) * self.layout.gradient_divisor
            value.backward()  # type: ignore[no-untyped-call]
            MEMORY.sample()
            if self.offloading.gradients is not None:
                self.offloading.gradients.after_micro_batch(is_first=number == 1, is_last=is_last)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        self.fetch_parameters()
        for name, tensor in named_tensors(self.model):
            yield name.removeprefix(NAME_PREFIX), tensor

    def _micro_batches_of(self, batch: TokenBatch) -> list[list[int]]:
        return micro_batching.micro_batches_of(
            batch, self.settings, self.layout, self.model.attention, partial(max_over_all_ranks, device=self.device)
        )

    @torch.no_grad()
    def _uses(self, batch: TokenBatch, micro_batches: Sequence[Sequence[int]]) -> Iterator[RouterUse]:
        """How the current routers distribute each micro-batch's tokens across experts, by passes without gradient."""
        for number, rows in enumerate(micro_batches, 1):
            ACTIVITY.report_activity("micro-batches", number, len(micro_batches))
            micro_batch = batch.micro_batch(rows, self.device, self.sequence_ranks)
            with adapters_in_inference(self.adapted_layers, with_adapters=True):
                use = self.model(partial(TokenModel.router_use, micro_batch=micro_batch))
            if not use:
                raise ConfigurationError(
                    f"spec.training.model.source: {type(self.language_model).__name__} returns no router logits for "
                    "the auxiliary loss; set output_router_logits to false in its config.json"
                )
            yield RouterUse(*use)

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
        # The first collective of a group allocates buffers on the device.
        self.before_use()
        on_device = values.detach().to(self.device, copy=True)
        dist.all_reduce(on_device, op=operation, group=group)
        return on_device.to(values.device)

    def _reshard(self) -> None:
        """Reshards the parameters of the root module, which FSDP2 leaves gathered after a pass."""
        self.model.reshard()  # type: ignore[operator]


def _as_distribution(columns: Sequence[Tensor | None]) -> TokenDistribution:
    logprobs_N, entropy_N, squares_N = columns
    assert logprobs_N is not None
    return TokenDistribution(logprobs_N, entropy_N, squares_N)


def _as_values(columns: Sequence[Tensor | None]) -> Tensor:
    [values_N] = columns
    assert values_N is not None
    return values_N

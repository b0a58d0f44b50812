"""The few numbers that no formula gives: what is reached of a GPU's stated speeds, and fixed costs.

A profile (`rljob plan --calibrate`) replaces them by what one machine has shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

_EFFICIENCIES = {
    "H100": 0.35,
    "H200": 0.35,
    "A100-40": 0.31,
    "A100-80": 0.31,
    "A100-80-PCIe": 0.31,
    "MI300X": 0.25,
    "B200": 0.25,
    "GB200": 0.25,
}
"""Of dense models whose micro-batches have thousands of tokens, from published runs (docs/planning.md lists them)."""

Share = Annotated[float, Field(ge=1e-6, le=1)]
Fixed = Annotated[float, Field(ge=0, le=1e6)]
"""Seconds."""
Bandwidth = Annotated[float, Field(ge=1e3, le=1e15)]
Bytes = Annotated[float, Field(ge=0, le=1e15)]


@dataclass(frozen=True)
class Constants:
    """Defaults are for vLLM 0.32 and FSDP2 on NVIDIA GPUs; the comment of each says where it is from."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    """A profile with another name is refused."""
    training_efficiency: Mapping[str, Share] = field(default_factory=lambda: dict(_EFFICIENCIES))
    """By kind of GPU: reached share of its FLOP/s in the products of training passes, recomputation counted."""
    forward_efficiency: Mapping[str, Share] = field(default_factory=dict)
    """The same of passes without backward; of training where a kind is missing."""
    default_efficiency: Share = 0.35
    """Of kinds that are not named above."""
    expert_efficiency_factor: Annotated[float, Field(ge=1e-6, le=100)] = 0.5
    """On the efficiencies, for mixtures of experts."""
    attention_efficiency: Share = 0.65
    """Of the products of queries and keys alone."""
    decode_bandwidth_efficiency: Share = 0.65
    """Reached share of the memory's bandwidth in decoding."""
    decode_compute_efficiency: Share = 0.5
    decode_step_seconds: Fixed = 8e-3
    """Fixed, of each token of a batch: scheduler, sampling, launches. 1.5 ms in servers, 8 ms seen in RL runs."""
    expert_decode_step_seconds: Fixed = 16e-3
    decode_sequence_seconds: Fixed = 2e-6
    """More for each sequence that is decoded."""
    tensor_parallel_seconds: Fixed = 12e-6
    """Latency of one exchange between the GPUs of an engine, two of which each layer makes."""
    link_efficiency: Share = 0.8
    """Of NVLink by NCCL 380 of 450 GB/s are seen (NVIDIA/nccl issue 1264); PCIe reaches a little less."""
    network_efficiency: Share = 0.9
    """Of gathers and reductions over many nodes' networks (calculon-ai/calculon, systems/a100_80g.json)."""
    separate_sync_bandwidth: Bandwidth = 8.5e9
    """Bytes per second into each GPU of a rollout that shares none with the actor (verl, verl/checkpoint_engine/README:
    8.25 to 9.44 GB/s over NCCL, NIXL and Mooncake)."""
    sync_tensor_seconds: Fixed = 3.7e-4
    """Of each tensor that an engine loads in a hand-over of weights, whatever its size: Qwen3-30B-A3B, which has 18,867
    by the hub's names, takes 7 s on one node (slime, hebiao064.github.io/rl-weight-sync)."""
    wake_seconds: Fixed = 0.0
    """Fixed, of each hand-over of weights: waking the rollout engine, and putting it to sleep again."""
    pass_seconds: Fixed = 0.0
    """Fixed, of each pass over a micro-batch."""
    update_seconds: Fixed = 0.0
    """Fixed, of each optimizer update."""
    step_seconds: Fixed = 3.0
    """Fixed, of each step: calls, logging, what is not in any phase."""
    allocator_factor: Annotated[float, Field(ge=1, le=10)] = 1.07
    """What torch's allocator reserves over what is allocated."""
    engine_context_bytes: Bytes = 1.8 * 2**30
    """CUDA context, libraries and workspace of a process with vLLM; with tensor parallelism as much again."""
    graph_bytes: Bytes = 0.6 * 2**30
    """Of vLLM's CUDA graphs: between 0.2 and 1.6 GiB, by model and number of sequences."""
    sleeping_engine_bytes: Bytes = 2.0 * 2**30
    """What vLLM keeps on the device while it sleeps."""
    process_bytes: Bytes = 0.0
    """Of a worker process on the host beside all tensors: libraries. Counts on CPUs, where memory is the host's."""
    spread: Annotated[float, Field(ge=0, le=0.9)] = 0.3
    """Half of the width of a range of seconds, as a share; a calibrated profile has less."""
    source: str = "defaults"
    """`defaults`, or the run that a profile was calibrated by."""

    def training_efficiency_of(self, kind: str, *, has_experts: bool = False) -> float:
        """Of passes with a backward pass on this kind of GPU."""
        reached = self.training_efficiency.get(kind, self.default_efficiency)
        return reached * (self.expert_efficiency_factor if has_experts else 1.0)

    def forward_efficiency_of(self, kind: str, *, has_experts: bool = False) -> float:
        """Of passes without."""
        both = {**self.training_efficiency, **self.forward_efficiency}
        return both.get(kind, self.default_efficiency) * (self.expert_efficiency_factor if has_experts else 1.0)

"""Numbers that no formula gives: the share of a GPU's stated speed that is reached in practice, and fixed costs.

A profile (`rljob plan --calibrate`) replaces some of them with values that are fitted to runs on one machine.
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
"""By GPU type, from published runs of dense models with thousands of tokens per micro-batch. They are listed in
docs/architecture/planner-formulas.md."""

Share = Annotated[float, Field(ge=1e-6, le=1)]
FixedSeconds = Annotated[float, Field(ge=0, le=1e6)]
"""Seconds."""
Bandwidth = Annotated[float, Field(ge=1e3, le=1e15)]
Bytes = Annotated[float, Field(ge=0, le=1e15)]


@dataclass(frozen=True)
class Constants:
    """The planner's constants. Defaults are for vLLM 0.32 and FSDP2 on NVIDIA GPUs. An efficiency is the share of the
    stated speed that is reached in practice."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    """A profile with an unknown name is rejected."""
    training_efficiency: Mapping[str, Share] = field(default_factory=lambda: dict(_EFFICIENCIES))
    """By GPU type: share of the GPU's FLOP/s that matrix products reach in passes with backward. Recomputed operations
    are counted as work."""
    forward_efficiency: Mapping[str, Share] = field(default_factory=dict)
    """The same for passes without backward. For a type that is missing here, `training_efficiency` is used."""
    default_efficiency: Share = 0.35
    """Used in both kinds of passes for GPU types that are not in `training_efficiency`."""
    expert_efficiency_factor: Annotated[float, Field(ge=1e-6, le=100)] = 0.5
    """The three efficiencies above are multiplied by this factor for mixtures of experts."""
    attention_efficiency: Share = 0.65
    """Share of the GPU's FLOP/s that the products of queries, keys and values reach."""
    decode_bandwidth_efficiency: Share = 0.65
    """Share of the memory bandwidth that decoding reaches."""
    decode_compute_efficiency: Share = 0.5
    """Share of the GPU's FLOP/s that decoding reaches."""
    decode_step_seconds: FixedSeconds = 8e-3
    """Fixed cost of decoding one token of every running sequence: scheduler, sampling, kernel launches. Servers report
    1.5 ms; RL runs have shown 8 ms."""
    expert_decode_step_seconds: FixedSeconds = 16e-3
    """The same for mixtures of experts."""
    decode_sequence_seconds: FixedSeconds = 2e-6
    """Additional cost per running sequence and decoded token."""
    tensor_parallel_seconds: FixedSeconds = 12e-6
    """Latency of one all-reduce between the GPUs of a tensor-parallel engine; each layer needs two."""
    link_efficiency: Share = 0.8
    """Share of the link's bandwidth: NCCL reaches 380 of NVLink's 450 GB/s (NVIDIA/nccl issue 1264); PCIe is a little
    lower."""
    network_efficiency: Share = 0.9
    """Share of the network's bandwidth in all-gathers and reduce-scatters over many nodes (calculon-ai/calculon,
    systems/a100_80g.json)."""
    separate_sync_bandwidth: Bandwidth = 8.5e9
    """Bytes per second into each GPU in a weight sync to a rollout on GPUs of its own (verl,
    verl/checkpoint_engine/README: 8.25 to 9.44 GB/s over NCCL, NIXL and Mooncake)."""
    sync_tensor_seconds: FixedSeconds = 3.7e-4
    """Cost of each tensor that the engine loads in a weight sync; it does not depend on the tensor's size. Source: a
    sync of the 18,867 tensors of Qwen3-30B-A3B takes 7 s on one node (slime, hebiao064.github.io/rl-weight-sync)."""
    wake_seconds: FixedSeconds = 0.0
    """Fixed cost per training step, counted as a part of the weight sync: the rollout engine wakes up. It goes to sleep
    in the pass or update that follows the generation, and is measured with that."""
    pass_seconds: FixedSeconds = 0.0
    """Fixed cost of a pass over one micro-batch."""
    update_seconds: FixedSeconds = 0.0
    """Fixed cost of an optimizer step."""
    step_seconds: FixedSeconds = 3.0
    """Fixed cost of a training step outside of its phases: calls, logging, data."""
    allocator_factor: Annotated[float, Field(ge=1, le=10)] = 1.07
    """Memory that torch's caching allocator reserves, divided by the memory that is allocated."""
    engine_context_bytes: Bytes = 1.8 * 2**30
    """CUDA context, libraries and workspace of a vLLM process; tensor parallelism doubles it."""
    graph_bytes: Bytes = 0.6 * 2**30
    """vLLM's CUDA graphs: 0.2 to 1.6 GiB, depending on the model and the number of sequences."""
    sleeping_engine_bytes: Bytes = 2.0 * 2**30
    """GPU memory that vLLM keeps while it sleeps."""
    process_bytes: Bytes = 0.0
    """Host memory of a worker process besides its tensors, such as libraries. Phases count it only on CPUs."""
    spread: Annotated[float, Field(ge=0, le=0.9)] = 0.3
    """Half of the width of a range of seconds, as a share of the likely value: 0.3 means 30 % to either side. In a
    profile it is smaller if the fit is good."""
    source: str = "defaults"
    """Where the constants come from: `defaults`, or the names of the runs to which the profile was fitted."""

    def training_efficiency_of(self, kind: str, *, has_experts: bool = False) -> float:
        """Efficiency of passes with backward on this GPU type."""
        reached = self.training_efficiency.get(kind, self.default_efficiency)
        return reached * (self.expert_efficiency_factor if has_experts else 1.0)

    def forward_efficiency_of(self, kind: str, *, has_experts: bool = False) -> float:
        """Efficiency of passes without backward on this GPU type."""
        both = {**self.training_efficiency, **self.forward_efficiency}
        return both.get(kind, self.default_efficiency) * (self.expert_efficiency_factor if has_experts else 1.0)

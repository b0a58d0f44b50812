"""What `rljob plan` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rljob_cli.cluster.client import ClusterOptions
from rljob_planner.job import LengthOptions


@dataclass(frozen=True)
class GpuOptions:
    """What a command says of GPUs."""

    cluster: str | None = None
    """`4x8xH100`."""
    from_cluster: ClusterOptions | None = None
    """None where no cluster is asked."""
    kinds: tuple[str, ...] = ()
    """`H100`, or `pool=H100`."""
    memory: str | None = None
    """A quantity, such as `80Gi`."""
    tflops: float | None = None
    bandwidth: float | None = None
    """Of the memory, GB/s."""

    @property
    def describes(self) -> bool:
        """Whether a kind is described that no table has."""
        return (self.memory, self.tflops, self.bandwidth) != (None, None, None)


@dataclass(frozen=True)
class PlanOptions:
    """Of one command."""

    file: Path | None = None
    """The job; or else there is a run, or there are several to calibrate by."""
    from_run: Path | None = None
    calibrate: tuple[Path, ...] = ()
    gpus: GpuOptions = field(default_factory=GpuOptions)
    lengths: LengthOptions = field(default_factory=LengthOptions)
    model_config: Path | None = None
    profile: Path | None = None
    """To plan by; with `calibrate` the one to write."""
    search: bool = False
    write: Path | None = None
    explain: bool = False
    as_json: bool = False

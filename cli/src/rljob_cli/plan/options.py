"""The options of `rljob plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rljob.cluster import ClusterOptions
from rljob_cli.errors import CliError
from rljob_planner.job_lengths import LengthOptions


@dataclass(frozen=True)
class GpuOptions:
    """The options that select the GPUs of a job."""

    cluster: str | None = None
    """Nodes x GPUs per node x GPU type: `4x8xH100`, `2x8xH200,4x8xA100-80`."""
    from_cluster: ClusterOptions | None = None
    """The Kubernetes cluster whose nodes are read; None without --from-cluster."""
    gpu_types: tuple[str, ...] = ()
    """The values of --gpu: `H100` for all pools, `main=H100` for one pool."""
    memory: str | None = None
    """Memory of a GPU type that rljob does not know, as a Kubernetes quantity: `80Gi`."""
    tflops: float | None = None
    """Peak dense BF16 speed of that type in TFLOP/s: 989."""
    bandwidth: float | None = None
    """Memory bandwidth of that type in GB/s: 3350."""

    @property
    def describe_a_gpu_type(self) -> bool:
        """Whether `memory`, `tflops` or `bandwidth` is given: they describe a GPU type that rljob does not know."""
        return (self.memory, self.tflops, self.bandwidth) != (None, None, None)


def cluster_to_read(selected: ClusterOptions, *, is_wanted: bool) -> ClusterOptions | None:
    """The cluster of --from-cluster; None without it. Raises CliError if --context or --kubeconfig is given
    without --from-cluster, because it would have no effect."""
    if not is_wanted and selected != ClusterOptions():
        raise CliError(f"{selected.flags().split()[0]}: selects the cluster of --from-cluster; add --from-cluster")
    return selected if is_wanted else None


@dataclass(frozen=True)
class PlanOptions:
    """The options of `rljob plan`. The command requires exactly one of the first three."""

    file: Path | None = None
    """The job file."""
    from_run: Path | None = None
    """The folder of a run to compare with its plan."""
    calibrate: tuple[Path, ...] = ()
    """Folders of runs to fit the planner's constants to."""
    gpus: GpuOptions = field(default_factory=GpuOptions)
    lengths: LengthOptions = field(default_factory=LengthOptions)
    """Average lengths of prompts and responses."""
    model_config: Path | None = None
    """The policy's `config.json`; None to find it by `model.source`."""
    offline: bool = False
    """Whether models are found without requests to the Hugging Face hub."""
    profile: Path | None = None
    """The profile to plan with; with `calibrate`, the profile to write."""
    search: bool = False
    write: Path | None = None
    """With `search`: the new file for the job that the search finds."""
    explain: bool = False
    as_json: bool = False

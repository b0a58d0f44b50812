"""Arguments and options of `rljob plan`. Every command imports this module, so it imports little itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Titles of the panels that group options in the help.
_GPU_PANEL = "Which GPUs"
_FACTS_PANEL = "What you know about the job"
_FROM_CLUSTER_PANEL = "Cluster for --from-cluster"

JobToPlan = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="The job file (YAML). Required without --from-run or --calibrate."),
]
FromRun = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Instead of FILE: compare a run with its plan and suggest changes."),
]
Calibrate = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="Instead of FILE: fit the planner's constants to a run on this machine, and write them to a profile. "
        "Can be repeated.",
    ),
]

NodesToPlanFor = Annotated[
    str | None,
    typer.Option(
        metavar="NODES",
        help="Plan for these nodes: nodes x GPUs x GPU type, such as 4x8xH100, or 2x8xH200,4x8xA100-80.",
        rich_help_panel=_GPU_PANEL,
    ),
]
FromCluster = Annotated[
    bool,
    typer.Option("--from-cluster", help="Plan for the nodes of the Kubernetes cluster.", rich_help_panel=_GPU_PANEL),
]
GpuTypes = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="TYPE",
        help="GPU type of all pools, or POOL=TYPE for one pool; cpu means this machine's CPUs. Can be repeated.",
        rich_help_panel=_GPU_PANEL,
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(help="Memory of a GPU type that rljob does not know, such as 80Gi.", rich_help_panel=_GPU_PANEL),
]
GpuTflops = Annotated[
    float | None,
    typer.Option(help="Peak dense BF16 TFLOP/s of a GPU type that rljob does not know.", rich_help_panel=_GPU_PANEL),
]
GpuBandwidth = Annotated[
    float | None,
    typer.Option(help="Memory bandwidth in GB/s of a GPU type that rljob does not know.", rich_help_panel=_GPU_PANEL),
]
MeanPrompt = Annotated[
    float | None,
    typer.Option(
        help="Average prompt length in tokens; with training.environment including its messages.",
        show_default="half of the limit",
        rich_help_panel=_FACTS_PANEL,
    ),
]
MeanResponse = Annotated[
    float | None,
    typer.Option(
        help="Average response length in tokens (sampled tokens). It changes the estimates most.",
        show_default="half of rollout.maxNewTokens",
        rich_help_panel=_FACTS_PANEL,
    ),
]
ModelConfig = Annotated[
    Path | None,
    typer.Option(help="Path of the policy's config.json, if rljob does not find it.", rich_help_panel=_FACTS_PANEL),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Profile to plan with; with --calibrate, the profile to write.",
        show_default="~/.config/rljob/profiles/TYPE.json, if it exists",
        rich_help_panel=_FACTS_PANEL,
    ),
]
Explain = Annotated[bool, typer.Option("--explain", help="Show every formula with its numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan of a job file as JSON.")]
Search = Annotated[
    bool, typer.Option("--search", help="Find the best pools and the best placement of the roles on these GPUs.")
]
Write = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the job that --search finds to a new file, with the comments of FILE. Requires --search.",
    ),
]
PlanContext = Annotated[
    str | None,
    typer.Option(
        help="Context of the kubeconfig.", show_default="the current context", rich_help_panel=_FROM_CLUSTER_PANEL
    ),
]
PlanKubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="Path of the kubeconfig.",
        show_default="KUBECONFIG, ~/.kube/config, or this pod's service account",
        rich_help_panel=_FROM_CLUSTER_PANEL,
    ),
]

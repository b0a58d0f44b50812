"""The options of `rljob plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JobToPlan = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="The job file (YAML). Wanted unless --from-run or --calibrate is given."),
]
FromRun = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="In the place of FILE: show a run beside its plan, and what to change."),
]
Calibrate = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="In the place of FILE: fit the planner to this machine by a run, and write a profile. May be repeated.",
    ),
]

_GPUS = "Which GPUs"
_KNOWN = "What is known"
_KUBECONFIG = "Where --from-cluster looks"

Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="NODES",
        help="Plan for these nodes: nodes x GPUs x kind, such as 4x8xH100, or 2x8xH200,4x8xA100-80.",
        rich_help_panel=_GPUS,
    ),
]
FromCluster = Annotated[
    bool,
    typer.Option("--from-cluster", help="Plan for the nodes that the Kubernetes cluster has.", rich_help_panel=_GPUS),
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="KIND",
        help="The pools of the file have GPUs of this kind, or POOL=KIND for one pool; cpu stands for this machine's"
        " CPUs. May be repeated.",
        rich_help_panel=_GPUS,
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(help="A kind that rljob does not know has this memory, such as 80Gi.", rich_help_panel=_GPUS),
]
GpuTflops = Annotated[
    float | None, typer.Option(help="It reaches so many TFLOP/s in dense BFloat16.", rich_help_panel=_GPUS)
]
GpuBandwidth = Annotated[float | None, typer.Option(help="Its memory is read at so many GB/s.", rich_help_panel=_GPUS)]
MeanPrompt = Annotated[
    float | None,
    typer.Option(help="Prompts have so many tokens on average.", show_default="half the limit", rich_help_panel=_KNOWN),
]
MeanResponse = Annotated[
    float | None,
    typer.Option(
        help="Responses have so many tokens on average: the first thing to say.",
        show_default="half the limit",
        rich_help_panel=_KNOWN,
    ),
]
ModelConfig = Annotated[
    Path | None,
    typer.Option(help="The policy's config.json is here, where rljob does not find it.", rich_help_panel=_KNOWN),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The profile to plan by; with --calibrate, the one to write.",
        show_default="~/.config/rljob/profiles/KIND.json, where there is one",
        rich_help_panel=_KNOWN,
    ),
]
Explain = Annotated[bool, typer.Option("--explain", help="Show every formula, with numbers put in.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Search = Annotated[
    bool, typer.Option("--search", help="Look for the best pools and places of the roles on these GPUs.")
]
Write = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write what --search finds into a new file, with the comments of FILE. Needs --search.",
    ),
]
PlanContext = Annotated[
    str | None,
    typer.Option(
        help="The context of the kubeconfig to use.", show_default="its current one", rich_help_panel=_KUBECONFIG
    ),
]
PlanKubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="The kubeconfig to use.",
        show_default="those of KUBECONFIG, ~/.kube/config, or the service account of this pod",
        rich_help_panel=_KUBECONFIG,
    ),
]

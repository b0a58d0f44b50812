"""The commands' names, and those of their arguments and options that several have or that take several lines.

It loads nothing that only some commands need."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from rljob_api.constants import DRIVER_LOG_CONTAINER, RAY_CONTAINER
from rljob_api.names import near_names

if TYPE_CHECKING:
    # Typer has its own copy of click, and exports these types nowhere else; those of the package click do not match.
    from typer._click.core import Command
    from typer._click.core import Context as ClickContext

_CLUSTER = "Which cluster"
_GPUS = "Which GPUs"
_KNOWN = "What is known"
_NODES = "Where --from-cluster looks"


class OutputFormat(StrEnum):
    """How a job is printed for programs."""

    JSON = "json"
    YAML = "yaml"


class ListFormat(StrEnum):
    """How a list is printed, where not as a table of the usual columns."""

    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"


class Container(StrEnum):
    """Whose log."""

    DRIVER = DRIVER_LOG_CONTAINER
    """The training, in the head pod."""
    RAY = RAY_CONTAINER
    """Ray itself."""


JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="A job file (YAML).")]
JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a job on the cluster.")]
Context = Annotated[
    str | None,
    typer.Option(help="Of the kubeconfig.", show_default="its current one", rich_help_panel=_CLUSTER),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", show_default="that of the context", rich_help_panel=_CLUSTER),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        show_default="those of KUBECONFIG, ~/.kube/config, or the service account of this pod",
        rich_help_panel=_CLUSTER,
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is so, or when the job has ended.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show it until it has ended: 0 for Complete, 1 for Failed.")]

# Of `rljob run`.
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Workers per pool; else its size, at most the devices found."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")]
RunFolderOption = Annotated[Path | None, typer.Option(help="Where results go.", show_default="runs/<name>")]
Code = Annotated[
    Path | None,
    typer.Option(help="A further folder with Python for rewards; with --ray it goes along instead."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run on an existing Ray cluster (HOST:PORT, or auto for one on this machine), with the file's pools. "
        "The folder with the code goes along; the run folder must be on storage that all nodes see.",
    ),
]

# Of `rljob logs`.
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for the pod, then go on to its end.")]
Tail = Annotated[int | None, typer.Option(min=0, help="Lines from the end.", show_default="all")]
AttemptNumber = Annotated[
    int | None, typer.Option(min=1, help="Of this attempt.", show_default="the newest one that has pods")
]
PoolName = Annotated[str | None, typer.Option(help="A worker of this pool instead of the head.")]
WorkerIndex = Annotated[int, typer.Option(min=0, help="Which worker of the pool; with --storage, its rank.")]
ContainerName = Annotated[Container | None, typer.Option(show_default="driver in the head, ray in workers")]
Storage = Annotated[
    Path | None,
    typer.Option(help="Read what is kept in the job's claim, mounted here. Asks no cluster.", show_default=False),
]

# Of `rljob plan`.
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs; for a job file.")]
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
    typer.Option(help="The context of the kubeconfig to use.", show_default="its current one", rich_help_panel=_NODES),
]
PlanKubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="The kubeconfig to use.",
        show_default="those of KUBECONFIG, ~/.kube/config, or the service account of this pod",
        rich_help_panel=_NODES,
    ),
]


class Commands(TyperGroup):
    """The commands of `rljob`. Typer's own suggestions are similar names, too, that mean something else (`start` is not
    `status`)."""

    def resolve_command(self, ctx: ClickContext, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """As Typer does, with the command that a misspelled one may have meant."""
        if args and args[0] not in self.commands and (near := near_names(args[0], self.commands)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

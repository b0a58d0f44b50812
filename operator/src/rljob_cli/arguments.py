"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CLUSTER_PANEL = "Which cluster"

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="A job file (YAML).")]
JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a job on the cluster.")]
Context = Annotated[
    str | None,
    typer.Option(help="Of the kubeconfig.", show_default="its current one", rich_help_panel=CLUSTER_PANEL),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", show_default="that of the context", rich_help_panel=CLUSTER_PANEL),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        show_default="those of KUBECONFIG, ~/.kube/config, or the service account of this pod",
        rich_help_panel=CLUSTER_PANEL,
    ),
]

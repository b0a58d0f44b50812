"""The commands' names, and arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from rljob_api.names import near_names

if TYPE_CHECKING:
    # Typer has its own copy of click, and exports these types nowhere else; those of the package click do not match.
    from typer._click.core import Command
    from typer._click.core import Context as ClickContext

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


class Commands(TyperGroup):
    """The commands of `rljob`. Typer's own suggestions are similar names, too, that mean something else (`start` is not
    `status`)."""

    def resolve_command(self, ctx: ClickContext, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """As Typer does, with the command that a misspelled one may have meant."""
        if args and args[0] not in self.commands and (near := near_names(args[0], self.commands)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

"""The application to which `__main__`, `cluster_commands` and `result_commands` add their commands."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rljob_api.constants import API_GROUP, API_VERSION, CONTRACT_VERSION
from rljob_cli import arguments
from rljob_cli.arguments import Context, Kubeconfig, Namespace

app = typer.Typer(
    name="rljob",
    cls=arguments.Commands,
    suggest_commands=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def console(*, stderr: bool = False) -> Console:
    """A console that prints numbers and paths without colors."""
    return Console(highlight=False, stderr=stderr)


def _print_version(is_wanted: bool) -> None:
    """Prints the versions of this command, of the API, and of the contract between operator and trainer."""
    if is_wanted:
        try:
            package = version("rljob")
        except PackageNotFoundError:
            package = "(source tree)"
        contract = f"contract version {CONTRACT_VERSION} (documents between operator and trainer)"
        console().print(Text(f"rljob {package}, {API_GROUP}/{API_VERSION}, {contract}"), soft_wrap=True)
        raise typer.Exit


@app.callback()
def every_command(
    context_of_command: typer.Context,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Print versions and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Run reinforcement-learning post-training jobs from one file, on this machine or on a Kubernetes cluster."""
    arguments.apply_global_options(
        context_of_command, {"context": context, "namespace": namespace, "kubeconfig": kubeconfig}
    )

"""Arguments and options that several commands share, or whose definitions take several lines.

The module is imported by every command, so it must not import modules that only some commands need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup, TyperOption

from rljob.log_options import Container
from rljob_api.names import similar_names
from rljob_cli.completion import complete_job_names
from rljob_cli.errors import CliError

if TYPE_CHECKING:
    # Typer has its own copy of click, and exports these types only there. The types of the package click do not match.
    from typer._click.core import Command, Parameter
    from typer._click.core import Context as ClickContext

    from rljob_api.job_changes import Change

_DURATION = re.compile(r"(?:(\d{1,5})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,9})s)?")
# Titles of the panels that group options in the help.
_CLUSTER_PANEL = "Which cluster"


_INVALID = "an option, the kubeconfig or the request is invalid"
_OTHER_CODES = "3 there is no such job; 75 no response from the API server"
_JOB_CODES = f"2 {_INVALID}; {_OTHER_CODES}"
_WAIT = (
    "0 the request was sent (with --wait: {reached}); {ended}{codes}; 130 Ctrl-C. With several names: the largest of"
    " their codes"
)
_WAIT_ENDED = "1 with --wait: the job has finished instead; "
EXIT_CODES = {
    "init": "0 success; 2 the file cannot be written",
    "validate": "0 the file is valid; 2 it is invalid",
    "plan": (
        "0 the job fits into memory; 1 it does not; 2 the file or an option is invalid; 75 no response from the API"
        " server. With --search: 0 if the job fits after changes of pools and roles only, in a placement that the"
        " trainer can run; else 1. With --write: 0 if the written job fits, else 1"
    ),
    "run": (
        "0 the job is complete; 1 the training or the job's own code failed; 2 the file or an option is invalid;"
        " 75 a worker, a device or another resource was lost or is missing, and a retry may succeed; 130 stopped on"
        " request; 137 killed"
    ),
    "evaluate": (
        "0 all evaluations are done; 1 the job's own code failed; 2 the file, the checkpoint or an option is invalid;"
        " 75 a worker, a device or another resource was lost or is missing, and a retry may succeed; 130 stopped on"
        " request; 137 killed"
    ),
    "plot": "0 success; 2 the folder has no metrics",
    "view": (
        "0 the page was written; 2 the folder is not that of a run, or its files are damaged or of another version, or"
        f" the page cannot be written, or the pod cannot start, or {_INVALID}; {_OTHER_CODES}; 130 Ctrl-C"
    ),
    "submit": (
        "0 the job was created, changed, or exists with this spec (with --watch: it is Complete); 1 with --watch: the"
        " job is Failed; 2 the file, an option or the kubeconfig is invalid; 3 with --watch: the job was deleted; 75 no"
        " response from the API server; 130 with --watch: Ctrl-C"
    ),
    "status": (
        f"0 success (with --watch: the job is Complete); 1 with --watch: the job is Failed; {_JOB_CODES}; 130 Ctrl-C"
    ),
    "list": (
        "0 success; 2 an option or the kubeconfig is invalid; 75 no response from the API server; 130 with --watch:"
        " Ctrl-C"
    ),
    "wait": (
        "0 the job has the state; 1 it has finished without the state; 2 an option or the kubeconfig is invalid; 3"
        " there is no such job, or it was deleted; 75 no response from the API server; 124 after --timeout;"
        " 130 Ctrl-C"
    ),
    "logs": (
        "0 the log was printed; 1 the log was deleted with its pod (the command prints where copies are);"
        f" 2 there is no log yet, or {_INVALID}; {_OTHER_CODES}; 130 Ctrl-C"
    ),
    "explain": f"0 success; {_JOB_CODES}",
    "get-results": (
        "0 all chosen files were copied; 1 some could not be copied; 2 the pod cannot start, there is nothing to copy,"
        f" or {_INVALID}; {_OTHER_CODES}, or the connection broke again and again; 130 Ctrl-C"
    ),
    "dashboard": f"0 Ctrl-C, or the job has ended; 2 there is no running head pod, or {_INVALID}; {_OTHER_CODES}",
    "suspend": _WAIT.format(reached="the job is suspended", ended=_WAIT_ENDED, codes=_JOB_CODES),
    "resume": _WAIT.format(reached="the trainer runs", ended=_WAIT_ENDED, codes=_JOB_CODES),
    "stop": _WAIT.format(reached="the job has finished", ended="", codes=_JOB_CODES),
    "retry": _WAIT.format(reached="the trainer runs", ended=_WAIT_ENDED, codes=_JOB_CODES),
    "delete": _WAIT.format(reached="all its pods are deleted", ended="", codes=_JOB_CODES),
}
"""The exit codes of each command, for its help. In addition, for all commands: 1 the output cannot be written, 2 the
command line is invalid."""


class OutputFormat(StrEnum):
    """Format in which a job is printed."""

    JSON = "json"
    YAML = "yaml"


class ListFormat(StrEnum):
    """Format in which a list is printed; without it, a table with the usual columns."""

    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"


JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="A job file (YAML).")]
NewJobFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="File to write. The ending .yaml is added if it is missing.")
]
WithEnvironment = Annotated[
    bool,
    typer.Option(
        "--environment", help="Write a job with rollouts of several turns, and the Python file of its environment."
    ),
]
JobName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a job on the cluster.", autocompletion=complete_job_names)
]
JobNames = Annotated[
    list[str],
    typer.Argument(metavar="NAME", help="Names of jobs on the cluster.", autocompletion=complete_job_names),
]
NewName = Annotated[
    str | None,
    typer.Option("--name", help="Name of the job, instead of metadata.name.", show_default="metadata.name of FILE"),
]
SetValues = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a value of the file, such as spec.training.steps=10 or spec.pools[0].nodes=2; null removes it."
        " Values are YAML, so write {type: Off} with a space. Can be repeated.",
    ),
]
Context = Annotated[
    str | None,
    typer.Option(help="Context of the kubeconfig.", show_default="the current context", rich_help_panel=_CLUSTER_PANEL),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Kubernetes namespace.",
        show_default="namespace of the context",
        rich_help_panel=_CLUSTER_PANEL,
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="Path of the kubeconfig.",
        show_default="KUBECONFIG, ~/.kube/config, or this pod's service account",
        rich_help_panel=_CLUSTER_PANEL,
    ),
]
WaitSuspended = Annotated[
    bool, typer.Option("--wait", help="Wait until the job is suspended and all its pods are deleted, or it finishes.")
]
WaitRunning = Annotated[
    bool, typer.Option("--wait", help="Wait until the trainer of the new attempt runs steps, or the job finishes.")
]
WaitFinished = Annotated[bool, typer.Option("--wait", help="Wait until the job has finished.")]
WaitRetried = WaitRunning
Watch = Annotated[
    bool, typer.Option("--watch", help="Show changes until the job finishes. Exit code 0: Complete, 1: Failed.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Let the API server validate the job, and print what would change."),
]
Selector = Annotated[
    str | None, typer.Option("--selector", "-l", help="Only jobs with these labels, such as team=research,stage!=test.")
]
SortBy = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Sort by a column, such as age or reward; -reward for descending order."),
]
WatchList = Annotated[bool, typer.Option("--watch", "-w", help="Show changes until Ctrl-C.")]
WaitFor = Annotated[str, typer.Option("--for", metavar="STATE", help="The state to wait for (case-insensitive).")]
Timeout = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="Give up after this time, such as 90s, 10m or 2h, with exit code 124.",
        show_default="none",
    ),
]
Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="List the jobs of all namespaces.")]

# Options of `rljob run`.
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Workers per pool.", show_default="size of the pool, at most the number of devices"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the newest complete checkpoint.")]
RunFolderOption = Annotated[Path | None, typer.Option(help="Folder for results.", show_default="runs/<name>")]
Code = Annotated[
    Path | None,
    typer.Option(
        help="Additional folder with Python code, such as rewards. With --ray, this folder is copied to the Ray "
        "cluster, and the job file's folder is not."
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run on an existing Ray cluster (HOST:PORT, or auto for one on this machine), with the file's pools. "
        "The folder with the code is copied to the cluster; the run folder must be on storage that its nodes share.",
    ),
]
UsesBucket = Annotated[
    bool,
    typer.Option(
        "--bucket",
        help="Store checkpoints and results in the bucket of checkpoint.storage.s3, with the credentials in the "
        "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY). Without it they are stored in the run folder.",
    ),
]

# Options of `rljob view`.
RunFolder = Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of the run, such as runs/<name>.")]
RunToView = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder of the run, such as runs/<name>; the name of a job on the cluster, see --job; or s3://BUCKET/FOLDER.",
    ),
]
IsJob = Annotated[
    bool,
    typer.Option(
        "--job", help="RUN is the name of a job, even if there is a folder of this name. A path with / is a folder."
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(metavar="OTHER", help="Folder of another run: compare the specs, and draw both runs' curves."),
]
PageFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Page to write.",
        show_default="view.html in the run's folder; for a job in ~/.cache/rljob/view",
    ),
]
PageJson = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the page's data as JSON.")]
WatchRun = Annotated[bool, typer.Option("--watch", help="Write the page again when files change, until the run ends.")]

# Options of `rljob logs`.
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for the pod and print new lines as they come.")]
Tail = Annotated[int | None, typer.Option(min=0, help="Number of lines from the end.", show_default="all")]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION", help="Only lines that are not older than this, such as 10m or 1h30m.", show_default="all"
    ),
]
Previous = Annotated[bool, typer.Option("--previous", "-p", help="Print the log of the attempt before the newest one.")]
AttemptNumber = Annotated[
    int | None,
    typer.Option(min=1, help="Number of the attempt.", show_default="the newest attempt that has the chosen pod"),
]
PoolName = Annotated[
    str | None, typer.Option(help="Print the log of a worker pod of this pool, instead of the head pod's.")
]
WorkerIndex = Annotated[
    int,
    typer.Option(
        min=0,
        help="Number of the worker pod in the pool, from 0. With --storage: rank of the worker process (one per GPU).",
    ),
]
ContainerName = Annotated[
    Container | None,
    typer.Option(help="Container of the pod.", show_default="driver in the head, ray in workers"),
]
Storage = Annotated[
    Path | None,
    typer.Option(
        help="Print the copy of the log in the job's claim. Give the folder where the claim is mounted, such as /mnt. "
        "If the job has checkpoint.storage.subPath: a/b, give /mnt/a/b. Needs no cluster.",
        show_default=False,
    ),
]


def apply_global_options(context: typer.Context, given: Mapping[str, object]) -> None:
    """Makes options before the command (`rljob -n team list`) the defaults of the command's own options. Exits with a
    usage error if the command does not have them."""
    chosen = {name: value for name, value in given.items() if value is not None}
    group, invoked = context.command, context.invoked_subcommand
    if not chosen or invoked is None or not isinstance(group, TyperGroup):
        return
    command = group.commands.get(invoked)
    known = {parameter.name for parameter in command.params} if command is not None else set()
    for name in chosen:
        if command is not None and name not in known:
            context.fail(f"--{name}: the command {invoked} does not use a cluster; remove the option")
    context.default_map = {invoked: chosen}


def changes(name: str | None, values: list[str] | None) -> list[Change]:
    """The changes of `--set` and `--name`. Raises JobFileError."""
    if name is None and not values:
        return []
    from rljob_api.job_changes import read_change, renamed

    return [*map(read_change, values or ()), *([renamed(name)] if name is not None else [])]


def seconds(option: str, text: str | None) -> int | None:
    """The seconds of a duration such as `90s`, `10m` or `1h30m`; None for None. Raises CliError."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise CliError(f"{option}: {text!r} is not a duration; write for example 90s, 10m, 1h30m or 2d")
    return sum(int(number or 0) * unit for number, unit in zip(found.groups(), (86_400, 3600, 60, 1), strict=True))


class Commands(TyperGroup):
    """The commands of `rljob`.

    For a misspelled command, the error suggests only commands with a similar name. Typer's own suggestions include
    commands that mean something else (`status` for `start`). The help shows flags without a type: Typer prints
    `--resume <bool>`, although a flag takes no value. At its end, the help of a command lists the exit codes. The lines
    of a paragraph are joined.
    """

    def resolve_command(self, ctx: ClickContext, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Resolves a command like Typer; for an unknown command, the error suggests a similar one."""
        if args and args[0] not in self.commands and (near := similar_names(args[0], self.commands)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: ClickContext) -> list[str]:
        """The commands in the order of their exit codes."""
        return sorted(super().list_commands(ctx), key=list(EXIT_CODES).index)

    def get_params(self, ctx: ClickContext) -> list[Parameter]:
        """The options of `rljob` itself."""
        return _without_types_of_flags(super().get_params(ctx))

    def get_command(self, ctx: ClickContext, cmd_name: str) -> Command | None:
        """The command with this name; None if there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_types_of_flags(command.get_params(ctx))
            command.epilog = f"Exit codes: {EXIT_CODES[cmd_name]}."
            if command.help is not None:
                command.help = _with_joined_lines(command.help)
        return command


def _with_joined_lines(text: str) -> str:
    """The text with each paragraph in one line. Typer keeps the line breaks of a docstring, which do not fit the width
    of a terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(text).split("\n\n"))


def _without_types_of_flags(params: list[Parameter]) -> list[Parameter]:
    """Changes flags so that the help shows no type for them. Returns the same list."""
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag and param.metavar is None:
            param.metavar = ""
    return params

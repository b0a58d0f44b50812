"""The `rljob` command line. To start fast, each command imports its modules only when it runs."""

from __future__ import annotations

import errno
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rljob.errors import RLJobError
from rljob_api.constants import ExitCode
from rljob_api.errors import ContractError
from rljob_api.standard_streams import accept_all_characters, discard_output
from rljob_cli import arguments, plan_arguments
from rljob_cli import cluster_commands as cluster_commands  # adds its commands to the app
from rljob_cli import evaluate_command as evaluate_command  # adds its command to the app
from rljob_cli import result_commands as result_commands  # adds its commands to the app
from rljob_cli.application import app, console
from rljob_cli.arguments import JobFile
from rljob_cli.errors import CliError
from rljob_cli.settings import forget_zero_columns, request_completion

_PROGRAM = "rljob"
_COMPLETION_OPTIONS = ("--install-completion", "--show-completion")
_NO_FILES = ":4"
"""The last line of completions for kubectl: no file names are completed (ShellCompDirectiveNoFileComp of cobra)."""


@app.command("init")
def init_command(file: arguments.NewJobFile = Path("job.yaml"), environment: arguments.WithEnvironment = False) -> None:
    """Write an example job file with comments."""
    from rljob_cli import init

    files = init.write_example(file, with_environment=environment)
    written, name = " and ".join(map(str, files)), shlex.quote(str(files[0]))
    console().print(Text(f"wrote {written}; next: rljob validate {name}, then rljob run {name}"), soft_wrap=True)


@app.command("validate")
def validate_command(
    file: JobFile,
    resolved: Annotated[
        bool,
        typer.Option("--resolved", help="Print the job with all defaults and recipe settings filled in."),
    ] = False,
    name: arguments.NewName = None,
    values: arguments.SetValues = None,
) -> None:
    """Check a job file and print its errors with their lines.

    Other rules are checked only if all names and types are right. A file with warnings is still valid for `rljob run`:
    warnings are about a job that would fail on every Kubernetes cluster, and fields that are ignored there or risky.

    With --resolved, standard output contains only the resolved job file; messages go to standard error.
    """
    from rljob_cli import validate

    job = validate.validate_file(file, arguments.changes(name, values), console(stderr=resolved))
    if job is None:
        raise typer.Exit(ExitCode.CONFIGURATION)
    if resolved:
        validate.print_resolved(job, console())


@app.command("plan")
def plan_command(
    file: plan_arguments.JobToPlan = None,
    from_run: plan_arguments.FromRun = None,
    calibrate: plan_arguments.Calibrate = None,
    cluster: plan_arguments.NodesToPlanFor = None,
    from_cluster: plan_arguments.FromCluster = False,
    gpu_types: plan_arguments.GpuTypes = None,
    gpu_memory: plan_arguments.GpuMemory = None,
    gpu_tflops: plan_arguments.GpuTflops = None,
    gpu_bandwidth: plan_arguments.GpuBandwidth = None,
    mean_prompt: plan_arguments.MeanPrompt = None,
    mean_response: plan_arguments.MeanResponse = None,
    model_config: plan_arguments.ModelConfig = None,
    profile: plan_arguments.Profile = None,
    is_search: plan_arguments.Search = False,
    write: plan_arguments.Write = None,
    is_explained: plan_arguments.Explain = False,
    as_json: plan_arguments.AsJson = False,
    context: plan_arguments.PlanContext = None,
    kubeconfig: plan_arguments.PlanKubeconfig = None,
) -> None:
    """Estimate memory and step time of a job before it uses a GPU, and find the best pools for its roles.

    Pass a job file, or a run's folder with --from-run or --calibrate.

    The GPU type comes from an option, else from the pools' nodeSelector or affinity, else from this machine.

    Examples:

    rljob plan job.yaml --gpu H100 --mean-response 800

    rljob plan job.yaml --cluster 4x8xH100 --search --write better.yaml

    rljob plan --from-run runs/x

    A search changes only pools and roles of the job. If nothing fits, it also changes other settings, and names them.
    """
    from rljob.cluster import ClusterOptions
    from rljob_cli.plan.command import plan
    from rljob_cli.plan.options import GpuOptions, PlanOptions, cluster_to_read
    from rljob_planner.job_lengths import LengthOptions

    read_from = cluster_to_read(ClusterOptions(context, None, kubeconfig), is_wanted=from_cluster)
    options = PlanOptions(
        file=file,
        from_run=from_run,
        calibrate=tuple(calibrate or ()),
        gpus=GpuOptions(cluster, read_from, tuple(gpu_types or ()), gpu_memory, gpu_tflops, gpu_bandwidth),
        lengths=LengthOptions(mean_prompt, mean_response),
        model_config=model_config,
        profile=profile,
        search=is_search,
        write=write,
        explain=is_explained,
        as_json=as_json,
    )
    raise typer.Exit(plan(options, console()))


@app.command("run")
def run_command(
    file: JobFile,
    workers: arguments.Workers = None,
    resume: arguments.Resume = False,
    run_folder: arguments.RunFolderOption = None,
    code: arguments.Code = None,
    ray: arguments.RayAddress = None,
    bucket: arguments.UsesBucket = False,
    name: arguments.NewName = None,
    values: arguments.SetValues = None,
) -> None:
    """Run a job on this machine, or on an existing Ray cluster; for Kubernetes see `rljob submit`."""
    from rljob_cli.local.run import run
    from rljob_cli.local.run_options import RunOptions

    raise typer.Exit(
        run(
            RunOptions(file, workers, resume, run_folder, code, ray, arguments.changes(name, values), bucket),
            console(),
        )
    )


@app.command("plot")
def plot_command(run_folder: arguments.RunFolder) -> None:
    """Draw the plots of a run again."""
    from rljob_cli.local.run import plot

    raise typer.Exit(plot(run_folder))


def main(program: str = _PROGRAM) -> None:
    """Runs the command. Errors that the user can fix are printed to standard error without a traceback. `program`: name
    of the command in its help."""
    accept_all_characters()
    forget_zero_columns()
    try:
        if program != _PROGRAM and (given := [each for each in sys.argv[1:] if each in _COMPLETION_OPTIONS]):
            raise CliError(
                f"{given[0]}: kubectl completes the names of its plugins' arguments itself: install `kubectl completion"
                " SHELL`, and have kubectl_complete-rljob in PATH, beside kubectl-rljob"
            )
        app(prog_name=program)
    except RLJobError as error:
        console(stderr=True).print(Text(f"error: {error}"), soft_wrap=True)
        raise SystemExit(error.exit_code) from None
    except ContractError as error:
        console(stderr=True).print(Text(str(error)), soft_wrap=True)
        raise SystemExit(ExitCode.CONFIGURATION) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            if error.filename is None:
                raise
            # Such as a name that is too long, or a folder that may not be entered.
            text = f"error: {error.filename}: cannot be used ({error.strerror}); check the path and its permissions"
            console(stderr=True).print(Text(text), soft_wrap=True)
            raise SystemExit(ExitCode.CONFIGURATION) from None
        discard_output(sys.stdout)
        console(stderr=True).print(Text(f"error: cannot write the output ({error.strerror})"), soft_wrap=True)
        raise SystemExit(ExitCode.APPLICATION) from None


def main_of_kubectl() -> None:
    """Runs the command as a plugin of kubectl: `kubectl rljob ...`."""
    main("kubectl rljob")


def complete_for_kubectl() -> None:
    """Prints completions of the words that follow `kubectl rljob`, the last of which is incomplete. kubectl (1.26 and
    later) starts the program `kubectl_complete-rljob` for this."""
    *complete, incomplete = sys.argv[1:] or [""]
    request_completion(f"{shlex.join([_PROGRAM, *complete])} {incomplete}")
    with suppress(SystemExit):
        main()
    print(_NO_FILES)


if __name__ == "__main__":
    main()

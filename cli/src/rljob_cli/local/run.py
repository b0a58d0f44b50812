"""`rljob run`: runs a job file on this machine or on an existing Ray cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rljob.plain_text import time_text
from rljob_api.constants import (
    CONTRACT_VERSION,
    ENV_ATTEMPT,
    ENV_CHECKPOINT_FOLDER,
    ENV_DEVICE,
    ENV_JOB_FOLDER,
    ENV_RUN_FOLDER,
    ENV_RUN_STATE_FILE,
    ENV_SHIPPED_CODE,
    ENV_SPEC,
    ExitCode,
)
from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.job_file import load_job_file_to_run
from rljob_api.run_state import RunPhase, RunState
from rljob_api.standard_streams import discard_output
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pod_environment import OWNED_ENV_PREFIXES, EnvSource
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_bucket.paths import job_folder
from rljob_cli.devices import find_devices
from rljob_cli.errors import CliError, RunFolderError
from rljob_cli.local.adapted_job import LocalPlan, plan_for_machine, plan_for_ray_cluster
from rljob_cli.local.evaluation_job import evaluation_job
from rljob_cli.local.evaluation_table import evaluation_table
from rljob_cli.local.run_folder import RunFolder
from rljob_cli.local.run_options import RunOptions
from rljob_cli.local.trainer_process import TrainerProcess
from rljob_cli.local.view import page_after_run
from rljob_cli.settings import inherited_environment, visible_cuda_devices

TRAINER_PACKAGE = "rljob_trainer"

_EXIT_CODE_TEXTS = {
    ExitCode.SUCCESS: "complete",
    ExitCode.APPLICATION: "the training or the job's own code failed; see the log above",
    ExitCode.CONFIGURATION: "the job's configuration is invalid; fix what the error above names",
    ExitCode.INFRASTRUCTURE: "a worker or device was lost, or a resource is missing; a retry may succeed",
}
SIGKILL_EXIT_CODE = 137
"""128 + 9: the exit code of a process that SIGKILL has killed."""
_UNUSED_MODULES = frozenset({"antigravity", "idlelib", "test", "this", "turtle", "turtledemo"})
"""Modules of the standard library that no library imports. A job may therefore have files with these names, such as a
folder `test`."""
_REFERENCE = re.compile(r"\$(?:\$|\((?P<name>[^)]*)\))")
"""Matches a reference to a variable in the value of a pod's variable, and `$$`, with the rules of Kubernetes
(`third_party/forked/golang/expansion`)."""


def run(options: RunOptions, console: Console) -> int:
    """Runs the job to its end. Returns the trainer's exit code, or 1 if it exits with 0 before the job is complete.

    Raises:
        JobFileError: the file is not a valid job.
        CliError: the job cannot run with these options, or on this machine.
        DocumentError: the job is too large to be passed to the trainer.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise CliError("the current folder was deleted; change to another folder and run the command again") from None
    job = load_job_file_to_run(options.file, options.changes)
    if options.code is not None and not options.code.is_dir():
        raise CliError(f"--code: {options.code} is not a folder; name the folder with the job's Python code")
    for imported_from in (options.file.absolute().parent, *([options.code.absolute()] if options.code else [])):
        _check_module_names(imported_from)
    if options.resume and job.spec.checkpoint.resume is Resume.NEVER:
        raise CliError("spec.checkpoint.resume: is Never, so the run cannot be resumed; change it to Auto")
    if options.evaluation is not None:
        job = evaluation_job(job, options.evaluation)
    plan = _local_plan(job, options)
    command = trainer_module_command(TRAINER_PACKAGE)
    folder = RunFolder(options.folder_of_run(job.metadata.name))
    with folder.locked() as lock:
        folder.check_resume(options.command(resume=not options.resume), resume=options.resume)
        if not options.uses_bucket and (bucket := folder.bucket()) is not None:
            raise CliError(f"{folder.path}: the checkpoints of this run are in {bucket}; add --bucket")
        attempt = folder.num_attempts() + 1
        environment = trainer_environment(options, job, plan, folder, attempt)
        show_plan(plan, folder, console)
        process = TrainerProcess(
            command,
            environment,
            lambda text: _say(f"\n{text}", console),
            lambda: what_a_stop_does(folder.run_state_of(attempt)),
        )

        def record_start() -> None:
            folder.write_job(job.model_copy(update={"spec": plan.spec}))
            s3 = None if plan.spec.checkpoint.storage is None else plan.spec.checkpoint.storage.s3
            facts = {} if s3 is None else {"bucket": str(job_folder(s3, job.metadata.namespace, job.metadata.name))}
            folder.record(attempt, started=time_text(datetime.now(UTC)), **facts)

        code = process.run(keep_open=(lock,), on_start=record_start)
        state = folder.run_state_of(attempt)
        if code == ExitCode.SUCCESS and (state is None or state.phase is not RunPhase.COMPLETE):
            _say("the trainer exited with code 0 before the job was complete", console)
            code = ExitCode.APPLICATION
        try:
            folder.record(attempt, ended=time_text(datetime.now(UTC)), exitCode=code)
        except RunFolderError as error:
            _say(f"note: {error}", console)
    _print_end(code, state, process, options, folder, console)
    if options.evaluation is not None:
        for line in evaluation_table(folder.path, plan.spec.training.evaluations):
            _print(line, console)
    return code


def plot(run_folder: Path) -> int:
    """`rljob plot`: draws the plots of a run again from its metrics, into `run_folder`/plots, in a process of the
    trainer. Returns its exit code.

    Raises:
        CliError: the trainer is not installed.
    """
    command = trainer_module_command(f"{TRAINER_PACKAGE}.observability.plots")
    return subprocess.run([*command, str(run_folder)], check=False).returncode


def _check_module_names(folder: Path) -> None:
    """Raises CliError if a module in the folder has the name of a standard library module that the trainer may need.
    Python searches this folder first, so the trainer or one of its libraries would import the wrong module and fail."""
    for name in sorted(sys.stdlib_module_names - _UNUSED_MODULES):
        new_name = f"my_{name.strip('_')}"
        advice_by_file = {
            folder / f"{name}.py": f"rename the file, for example to {new_name}.py",
            folder / name / "__init__.py": f"rename the folder, for example to {new_name}",
        }
        for file, advice in advice_by_file.items():
            if file.exists():
                raise CliError(f"{file}: hides Python's own module {name!r}, which the trainer needs; {advice}")


def _local_plan(job: RLJob, options: RunOptions) -> LocalPlan:
    if options.ray_address is None:
        return plan_for_machine(
            job, find_devices(visible_cuda_devices()), options.num_workers, uses_bucket=options.uses_bucket
        )
    if not options.ray_address.strip():
        raise CliError("--ray: the address is empty; use HOST:PORT or auto, or remove --ray to run on this machine")
    if options.num_workers is not None:
        raise CliError("--workers: a Ray cluster uses the pools of the file; remove --workers or --ray")
    return plan_for_ray_cluster(job, uses_bucket=options.uses_bucket)


def trainer_module_command(module: str) -> tuple[str, ...]:
    """The command that runs a module of the trainer in this Python.

    Raises:
        CliError: the trainer is not installed.
    """
    if find_spec(TRAINER_PACKAGE) is None:
        raise CliError(
            f"the trainer is not installed in this Python environment ({sys.prefix}); install rljob-trainer, "
            "or run `make install` in the repository"
        )
    return (sys.executable, "-m", module)


def trainer_environment(
    options: RunOptions, job: RLJob, plan: LocalPlan, folder: RunFolder, attempt: int
) -> dict[str, str]:
    """The trainer's environment: the variables of this process, the job's `env`, and the variables that tell the
    trainer its job and folders. Without --ray, RAY_ADDRESS is removed, because the run starts its own Ray.

    Raises:
        DocumentError: the job is too large.
    """
    environment = inherited_environment()
    inherited_address = environment.pop("RAY_ADDRESS", "")
    folders = {
        ENV_RUN_FOLDER: str(folder.path),
        ENV_CHECKPOINT_FOLDER: str(folder.checkpoints),
        ENV_JOB_FOLDER: str(options.file.absolute().parent),
    }
    environment.update(job_variables(job.spec, folders, environment))
    metadata = job.metadata
    trainer_job = TrainerJob(
        contract_version=CONTRACT_VERSION, name=metadata.name, namespace=metadata.namespace, spec=plan.spec
    )
    code = [folders[ENV_JOB_FOLDER], *([str(options.code.absolute())] if options.code else [])]
    inherited_path = environment.get("PYTHONPATH")
    environment |= {
        **folders,
        ENV_SPEC: dump_job(trainer_job),
        ENV_RUN_STATE_FILE: str(folder.run_state_file),
        ENV_ATTEMPT: str(attempt),
        "PYTHONPATH": os.pathsep.join([*code, *([inherited_path] if inherited_path else [])]),
    }
    if plan.devices is not None:
        environment[ENV_DEVICE] = plan.devices.type.value
    if options.ray_address is not None:
        environment |= {
            "RAY_ADDRESS": _cluster_address(options.ray_address, inherited_address),
            ENV_SHIPPED_CODE: code[-1],
        }
    return environment


def job_variables(spec: RLJobSpec, before: Mapping[str, str], exported: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job's `env` that have a `value`, with each `$(NAME)` expanded as the kubelet does it.

    NAME is an earlier variable of the list, or one of `before` (for example `$(RLJOB_RUN_FOLDER)/wandb`). An earlier
    variable from a Secret or ConfigMap has the value that the user has exported. With `envFrom`, any NAME with the
    source's prefix may be a key of the source, so NAME is also looked up among the exported variables. An unknown NAME
    is not replaced. `$$` becomes `$`.

    Args:
        before: variables that the operator sets in a pod before the job's `env`.
        exported: the environment of this process.

    Raises:
        CliError: a value refers to a variable from a Secret or ConfigMap that is not exported.
    """
    known, found, not_exported = dict(before), dict[str, str](), set[str]()
    for index, variable in enumerate(spec.env):
        if variable.value is not None:
            if missing := not_exported.intersection(match["name"] for match in _REFERENCE.finditer(variable.value)):
                name = sorted(missing)[0]
                raise CliError(
                    f"spec.env[{index}].value: $({name}) comes from a Secret or ConfigMap, which `rljob run` does not"
                    f" read, and {name} is not exported; export {name} with the value for this run"
                )
            names = {**_from_env_from(spec, exported), **known}
            known[variable.name] = found[variable.name] = _REFERENCE.sub(_replacement(names), variable.value)
        elif variable.name in exported:
            known[variable.name] = exported[variable.name]
        elif variable.value_from is not None and not _is_optional(variable.value_from):
            not_exported.add(variable.name)
    return found


def _from_env_from(spec: RLJobSpec, exported: Mapping[str, str]) -> dict[str, str]:
    """The exported variables that may be keys of an `envFrom` source. Variables that RLJob sets are excluded."""
    prefixes = tuple(source.prefix or "" for source in spec.env_from)
    return {
        name: value
        for name, value in exported.items()
        if name.startswith(prefixes) and not name.startswith(OWNED_ENV_PREFIXES)
    }


def _is_optional(source: EnvSource) -> bool:
    """Whether a pod starts even if the Secret or ConfigMap lacks the key. References to the variable are then not
    expanded."""
    reference = source.secret_key_ref or source.config_map_key_ref
    return reference is not None and reference.optional


def _replacement(names: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    def replaced(match: re.Match[str]) -> str:
        return "$" if match["name"] is None else names.get(match["name"], match[0])

    return replaced


def _cluster_address(option: str, inherited: str) -> str:
    """The address to connect to. `option`: the value of --ray. `inherited`: RAY_ADDRESS; empty if unset.

    `auto` means the cluster in RAY_ADDRESS (in a Ray job, this is the cluster that runs the Ray job). If RAY_ADDRESS is
    unset or the URL of a dashboard, Ray itself finds a cluster on this machine."""
    return inherited if option == "auto" and inherited and "://" not in inherited else option


def show_plan(plan: LocalPlan, folder: RunFolder, console: Console) -> None:
    """Prints the pools and workers of the run, notes about ignored and changed fields, and the run's folder."""
    where = "Ray cluster" if plan.devices is None else f"this machine: {plan.devices}"
    table = Table(title=where, title_justify="left")
    for name in ("pool", "roles"):
        table.add_column(name)
    for name in ("workers in job file", "workers here"):
        table.add_column(name, justify="right")
    for row in plan.pools:
        table.add_row(row.pool, ", ".join(row.roles), str(row.num_workers_in_file), str(row.num_workers))
    _print(table, console)
    for note in plan.notes:
        _say(f"note: {note}", console)
    _say(f"results: {folder.path}", console)


def explain_exit(code: int, state: RunState | None, *, was_killed_on_request: bool) -> str:
    """Explains an exit code in one line. `state`: the last run state of this attempt; None if it has written none."""
    if was_killed_on_request and code == SIGKILL_EXIT_CODE:
        return f"stopped immediately by a second request; {_what_is_lost(state)}"
    if code == ExitCode.INTERRUPTED:
        return (
            "stopped on request after a checkpoint"
            if _has_saved(state)
            else f"stopped on request; {_what_is_lost(state)}"
        )
    if code == SIGKILL_EXIT_CODE:
        return "the trainer was killed; usually because the machine ran out of memory"
    if code in list(ExitCode):
        return _EXIT_CODE_TEXTS[ExitCode(code)]
    if code > 128:
        return f"the trainer was killed by signal {code - 128}"
    return "the trainer exited unexpectedly; see the log above"


def what_a_stop_does(state: RunState | None) -> str:
    """What the trainer does after the first stop request. `state`: the run state of this attempt; None before it has
    written one."""
    if state is None or state.phase is RunPhase.STARTING:
        return "the training has not started, so the trainer exits without a new checkpoint"
    if state.progress.total_steps == 0:
        return "the evaluation ends without results"
    if state.progress.step >= state.progress.total_steps:
        return "all steps are done; the trainer finishes saving and exits"
    return "the trainer ends its step and saves a checkpoint"


def _has_saved(state: RunState | None) -> bool:
    """Whether this attempt has saved a checkpoint after its last completed step."""
    if state is None or state.checkpoint is None or state.checkpoint.step == state.resumed_from_step:
        return False
    return state.checkpoint.step >= state.progress.step


def _what_is_lost(state: RunState | None) -> str:
    if state is None or state.progress.step == (state.resumed_from_step or 0):
        return "this attempt completed no step, so nothing is lost"
    if state.checkpoint is not None and state.checkpoint.step == state.progress.step:
        return "all completed steps are in the newest checkpoint"
    if state.checkpoint is None:
        return f"there is no checkpoint yet, so {state.progress.step} completed steps are lost"
    return f"steps after the checkpoint of step {state.checkpoint.step} are lost"


def _print_end(
    code: int, state: RunState | None, process: TrainerProcess, options: RunOptions, folder: RunFolder, console: Console
) -> None:
    meaning = explain_exit(code, state, was_killed_on_request=process.was_killed_on_request)
    _say(f"exit code {code}: {meaning}", console)
    if state is not None:
        progress = state.progress
        reached = f"step {progress.step} of {progress.total_steps}"
        if not progress.total_steps:
            reached = "evaluated, no training" if code == ExitCode.SUCCESS else "not evaluated"
        if progress.eval_score is not None:
            reached += f", held-out score {progress.eval_score:.3f}"
        if state.checkpoint is not None:
            reached += f", newest checkpoint at step {state.checkpoint.step}"
        if state.best is not None:
            reached += f", best checkpoint at step {state.best.step} ({state.best.value:.3f})"
        _say(f"{reached}; see {folder.path}", console)
        for alarm in state.alarms or ():
            _say(f"alarm {alarm.reason} since step {alarm.since_step}: {alarm.message}", console)
    _say(page_after_run(folder.path), console)
    if code not in (ExitCode.SUCCESS, ExitCode.CONFIGURATION):
        _say(f"to continue: {options.command(resume=folder.has_results())}", console)


def _say(text: str, console: Console) -> None:
    _print(Text(text), console)


def _print(content: Text | Table, console: Console) -> None:
    """Prints a line or a table. A closed terminal or pipe, or a full disk, must not change how the run ends."""
    try:
        console.print(content, soft_wrap=isinstance(content, Text))
    except OSError:
        discard_output(sys.stdout)
    except RuntimeError as error:
        # A second Ctrl-C arrived while the message about the first was written. Rich or Python has this text in a
        # buffer and writes it with the next one.
        if "reentrant" not in str(error):
            raise
    except SystemExit:
        # If a pipe is closed, rich discards the output and raises SystemExit.
        return

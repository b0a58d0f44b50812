"""Checks whether two versions train the same: runs both on this machine and compares all metrics and checkpoints bit by
bit.

    python tools/replay.py BASE HEAD [--jobs quickstart ppo lora dapo] [--job FILE ...] [--workers N] [--keep FOLDER]
                           [--renamed OLD=NEW ...] [--ignore PATTERN ...]

BASE and HEAD are git revisions or folders. A revision gets a worktree in a temporary folder and runs with this Python;
a folder runs with its own `.venv` if it has one. The jobs are BASE's examples, made short. Runs use CPUs only.

The exit code is 0 if everything is equal, 1 if something differs or a run fails, 2 if the arguments are wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

EXCLUDED = ("wall_time", "timing_s/*", "perf/*", "memory/*")
"""Metrics that differ between any two runs."""
SHORT: Mapping[str, object] = {"steps": 6, "batchSize": 16}
EVERY_STEPS = 3
"""Interval of checkpoints and evaluations."""
EXAMPLES = {
    "quickstart": "quickstart.yaml",
    "ppo": "quickstart-ppo.yaml",
    "lora": "quickstart-lora.yaml",
    "dapo": "quickstart.yaml",
}
SOURCES = ("crds/src", "cli/src", "operator/src", "trainer/src")
RUN_SECONDS = 900

Value = float | str | torch.Tensor
"""A metric, a tensor of a checkpoint, or (as JSON) another part of a checkpoint."""


@dataclass(frozen=True)
class Results:
    """The results of a run by step. Names of checkpoint parts begin with `checkpoint `."""

    steps: Mapping[int, Mapping[str, Value]]


@dataclass(frozen=True)
class Allowed:
    """Differences that the command line allows."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """The name in HEAD by the name in BASE."""
    ignored: Sequence[str] = ()
    """Names or patterns such as `actor/*`."""

    def is_ignored(self, name: str) -> bool:
        """Whether differences of `name` are ignored."""
        return any(fnmatchcase(name, pattern) for pattern in (*EXCLUDED, *self.ignored))


@dataclass(frozen=True)
class Difference:
    """A difference of one name at one step."""

    step: int
    name: str
    what: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}: {self.what}"


class ReplayError(Exception):
    """The comparison cannot be made."""


def differences(base: Results, head: Results, allowed: Allowed) -> list[Difference]:
    """All differences, the earliest step first; within a step, metrics come before the checkpoint."""
    found = []
    for step in sorted({*base.steps, *head.steps}):
        old = {allowed.renamed.get(name, name): value for name, value in base.steps.get(step, {}).items()}
        new = head.steps.get(step, {})
        names = [*old, *(name for name in new if name not in old)]
        for name in sorted(names, key=lambda name: name.startswith("checkpoint ")):
            if allowed.is_ignored(name):
                continue
            what = _difference(old.get(name), new.get(name))
            if what:
                found.append(Difference(step, name, what))
    return found


def _difference(old: Value | None, new: Value | None) -> str:
    """A description of the difference; empty if the values are equal."""
    if old is None or new is None:
        return "only in HEAD" if old is None else "only in BASE"
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return _tensor_difference(old, new)
    if isinstance(old, float) and isinstance(new, float):
        is_equal = old == new or (math.isnan(old) and math.isnan(new))
        return "" if is_equal else f"{old!r} in BASE, {new!r} in HEAD, by {abs(new - old):.3g}"
    return "" if type(old) is type(new) and old == new else f"{_short(old)} in BASE, {_short(new)} in HEAD"


def _tensor_difference(old: torch.Tensor, new: torch.Tensor) -> str:
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return f"{old.dtype} {tuple(old.shape)} in BASE, {new.dtype} {tuple(new.shape)} in HEAD"
    is_other = (_bytes_of(old) != _bytes_of(new)).any(dim=1)
    if not is_other.any():
        return ""
    gaps = (new.double() - old.double()).abs().reshape(-1)[is_other]
    return f"{len(gaps):,} of {old.numel():,} numbers differ, by at most {gaps.max():.3g}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _short(value: Value) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_results(run_folder: Path) -> Results:
    """Reads metrics and checkpoints of a run folder."""
    steps: dict[int, dict[str, Value]] = {}
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        values = steps.setdefault(record.pop("step"), {})
        values |= {name: float(value) for name, value in record.items()}
    for folder in sorted((run_folder / "checkpoints").glob("step-*")):
        manifest = json.loads((folder / "manifest.json").read_text())["content"]
        values = steps.setdefault(manifest["step"], {})
        for name, state in manifest["extra"].items():
            values[f"checkpoint state {name}"] = json.dumps(state, sort_keys=True)
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                values[f"checkpoint {file.stem} {name}"] = tensor
    if not any(name.startswith("checkpoint rank") for values in steps.values() for name in values):
        raise ReplayError(f"{run_folder} has no checkpoint; give the job fewer steps between checkpoints")
    return Results(steps)


@dataclass(frozen=True)
class Tree:
    """A version of the project on this machine."""

    name: str
    folder: Path
    python: str
    commit: str | None
    """None for a folder, which may have uncommitted changes."""

    def environment(self) -> dict[str, str]:
        """The environment of its runs: its sources first, no GPU, one thread."""
        paths = os.pathsep.join(str(self.folder / source) for source in SOURCES)
        return {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def check_imports(self, folder: Path) -> None:
        """Raises ReplayError if a run in `folder` would import code of another tree."""
        program = (
            "import rljob_api, rljob_cli, rljob_trainer as t; print(rljob_api.__file__, rljob_cli.__file__, t.__file__)"
        )
        done = subprocess.run(
            [self.python, "-c", program], cwd=folder, env=self.environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise ReplayError(f"the code of {self.name} cannot be imported: {done.stderr.strip()}")
        files = [Path(text).resolve() for text in done.stdout.split()]
        print(f"{self.name}: rljob_trainer would be imported from {files[-1]}", flush=True)
        for file in files:
            if not file.is_relative_to(self.folder.resolve()):
                raise ReplayError(f"{self.name}: {file} would be imported, but it is not in {self.folder}")


@contextmanager
def tree_of(name: str, place: Path) -> Iterator[Tree]:
    """The tree of a folder or revision. The worktree of a revision is below `place` and exists within the context."""
    if Path(name).is_dir():
        folder = Path(name).absolute()
        own = folder / ".venv" / "bin" / "python"
        yield Tree(name, folder, str(own) if own.exists() else sys.executable, None)
        return
    found = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found.returncode:
        raise ReplayError(f"{name} is neither a folder nor a git revision of this repository")
    commit = found.stdout.strip()
    folder = Path(tempfile.mkdtemp(dir=place)) / "tree"
    added = git("worktree", "add", "--detach", "--quiet", str(folder), commit)
    if added.returncode:
        raise ReplayError(f"{name}: git cannot create a worktree: {added.stderr.strip()}")
    try:
        yield Tree(f"{name} ({commit[:9]})", folder, sys.executable, commit)
    finally:
        git("worktree", "remove", "--force", str(folder))


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs git in the repository of this file."""
    return subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)


def short_job(name: str, examples: Path) -> str:
    """The text of one of the four jobs."""
    yaml = YAML(typ="safe")
    document = yaml.load((examples / EXAMPLES[name]).read_text())
    training = document["spec"]["training"]
    training |= SHORT
    [evaluation] = training["evaluations"]
    evaluation |= {"everySteps": EVERY_STEPS, "numPrompts": 64}
    document["spec"]["checkpoint"] |= {"everySteps": EVERY_STEPS, "keep": 10}
    if name == "dapo":
        training["algorithm"] = {"type": "DAPO"}
    if name == "lora":
        # Only this job has a reference; it is the same model without its adapters.
        training["algorithm"]["kl"] = {"coefficient": 0.1}
    return json.dumps(document, indent=1)


def run_job(tree: Tree, name: str, text: str, options: Sequence[str], place: Path) -> Results:
    """Runs the job in `place`, or reads an existing complete run of the same commit, job and options."""
    folder = (place / tree.commit if tree.commit else Path(tempfile.mkdtemp(dir=place))) / name
    wanted = json.dumps([text, *options])
    record = folder / "finished.json"
    if not record.exists() or record.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "job.yaml").write_text(text)
        command = [tree.python, "-m", "rljob_cli", "run", "job.yaml", "--run-folder", "run", *options]
        code = code_of_run(command, folder, tree.environment())
        if code:
            end = "\n".join((folder / "output.log").read_text().splitlines()[-20:])
            raise RunFailed(f"{tree.name}: {name} ended with code {code}\n{end}")
        record.write_text(wanted)
    return read_results(folder / "run")


def code_of_run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Runs a command with its output in `output.log` and returns its exit code. Its processes end when this program is
    stopped."""
    with (folder / "output.log").open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(RUN_SECONDS)
        except BaseException:
            # At the second signal `rljob run` ends all of its processes at once.
            process.send_signal(signal.SIGINT)
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            process.wait()
            raise


class RunFailed(Exception):
    """A job did not complete."""


def compared(trees: Sequence[Tree], jobs: Mapping[str, str], options: argparse.Namespace, place: Path) -> bool:
    """Runs all jobs on both trees and prints the differences. Returns True if there are none."""
    renamed = dict(pair.split("=", 1) for pair in options.renamed)
    allowed = Allowed(renamed, options.ignore)
    workers = ["--workers", str(options.workers)] if options.workers else []
    is_equal = True
    for name, text in jobs.items():
        try:
            # In separate folders, so that comparing main with main makes two runs even if runs are kept.
            base, head = (
                run_job(tree, name, text, workers, place / role)
                for tree, role in zip(trees, ("base", "head"), strict=True)
            )
        except (RunFailed, subprocess.TimeoutExpired) as error:
            print(f"{name}: FAILED: {error}", flush=True)
            is_equal = False
            continue
        found = differences(base, head, allowed)
        is_equal = is_equal and not found
        if found:
            more = f"\n  and {len(found) - 1} further differences" if len(found) > 1 else ""
            print(f"{name}: DIFFERENT, first at {found[0]}{more}", flush=True)
        else:
            num = sum(not allowed.is_ignored(each) for values in base.steps.values() for each in values)
            print(
                f"{name}: equal ({num:,} metrics and tensors, steps {min(base.steps)} to {max(base.steps)})", flush=True
            )
    return is_equal


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("head")
    parser.add_argument("--jobs", nargs="+", choices=EXAMPLES, help="run only these of the four jobs")
    parser.add_argument("--job", nargs="+", type=Path, default=[], metavar="FILE", help="run these job files unchanged")
    parser.add_argument("--workers", type=int, help="number of workers, as for rljob run")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs; a run of the same commit is reused")
    parser.add_argument(
        "--renamed", nargs="+", default=[], metavar="OLD=NEW", help="a metric that has a new name in HEAD"
    )
    parser.add_argument(
        "--ignore", nargs="+", default=[], metavar="PATTERN", help="metrics that may differ, such as actor/*"
    )
    options = parser.parse_args(arguments)
    for pair in options.renamed:
        if "=" not in pair:
            parser.error(f"--renamed: write OLD=NEW (seen: {pair})")
    names = [*(options.jobs or ()), *(file.stem for file in options.job)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"--job, --jobs: two jobs have the same name (seen: {', '.join(twice)}); rename one of the files")
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers: must be at least 1 (seen: {options.workers})")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares the versions and returns the exit code."""
    options = parsed(arguments)
    print(f"not compared: {', '.join((*EXCLUDED, *options.ignore))}", flush=True)
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        place = (options.keep or temporary / "runs").absolute()
        try:
            for role in ("base", "head"):
                (place / role).mkdir(parents=True, exist_ok=True)
            trees = [stack.enter_context(tree_of(name, temporary)) for name in (options.base, options.head)]
            for tree in trees:
                tree.check_imports(place)
            names = options.jobs or ([] if options.job else list(EXAMPLES))
            jobs = {name: short_job(name, trees[0].folder / "examples") for name in names}
            jobs |= {file.stem: file.read_text(encoding="utf-8") for file in options.job}
            return 0 if compared(trees, jobs, options, place) else 1
        except (ReplayError, OSError, UnicodeDecodeError) as error:
            print(f"replay: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    # Turns SIGTERM into an exit, so that worktrees and processes are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())

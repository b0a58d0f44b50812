"""The repository keeps its own rules, and each check can fail."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rljob_testing import source_gates as gates
from rljob_testing.source_gates import Source

REPOSITORY = Path(__file__).parents[2]
PACKAGE_FOLDERS = [
    REPOSITORY / folder for folder in ("crds/src", "cli/src", "operator/src", "trainer/src", "e2e/cluster")
]
PROGRAM_FOLDERS = [REPOSITORY / folder for folder in ("tests", "e2e", "bench", "proof", "examples", "tools")]
PACKAGES = [source for folder in PACKAGE_FOLDERS for source in gates.sources_below(folder)]
PROGRAMS = [source for folder in PROGRAM_FOLDERS for source in gates.sources_below(folder)]
VLLM_MODULES = (
    *("vllm_adapters", "vllm_engine", "vllm_lora_support", "vllm_start", "vllm_tool_parsers", "vllm_weights"),
)
PATH_RULES = {
    "kopf": ["rljob_operator.handlers", "rljob_operator.__main__"],
    "kubernetes": ["rljob_operator.kube", "rljob.cluster", "rljob.kubeconfig", "rljob.websockets"],
    "mlflow": ["rljob_trainer.trackers.mlflow_run"],
    "wandb": ["rljob_trainer.trackers.wandb_run"],
    "ray": ["rljob_trainer.pools", "rljob_trainer.groups"],
    "vllm": [f"rljob_trainer.engines.rollout.{name}" for name in VLLM_MODULES],
}
FORBIDDEN_TEXT = {
    # Written so that this file does not match itself.
    "host of a package registry": "|".join(
        re.escape(host.replace("_", ".")) for host in ("pypi_org", "pythonhosted_org", "proxy_golang_org", "npmjs_org")
    ),
    "path of one machine": r"(?<![\w.$}~*-])/(root|work|home/\w+|Users/\w+)/",
}

Gate = Callable[[Iterable[Source]], list[str]]


def bad(text: str, module: str = "rljob_x.part") -> list[Source]:
    return [Source(Path(f"{module.replace('.', '/')}.py"), module, text)]


def misplaced(sources: Iterable[Source]) -> list[str]:
    return gates.misplaced_imports(sources, PATH_RULES)


GATES_FOR_ALL: list[Gate] = [gates.long_files, gates.long_functions, gates.vague_names, gates.repeated_constants]
GATES_FOR_PACKAGES: list[Gate] = [
    gates.undocumented,
    gates.environment_reads,
    gates.unsafe_code,
    gates.import_time_work,
    misplaced,
]


@pytest.mark.parametrize("gate", [*GATES_FOR_ALL, *GATES_FOR_PACKAGES], ids=lambda gate: gate.__name__)
def test_the_packages_pass_the_gate(gate: Gate) -> None:
    found = gate(PACKAGES)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("gate", GATES_FOR_ALL, ids=lambda gate: gate.__name__)
def test_tests_and_programs_pass_the_gate(gate: Gate) -> None:
    found = gate(PROGRAMS)
    assert not found, "\n".join(found)


def test_modules_have_no_import_cycles() -> None:
    found = gates.import_cycles(PACKAGES)
    assert not found, "\n".join(found)


def test_folders_are_small_and_import_chains_short() -> None:
    found = [*gates.crowded_folders(PACKAGES), *gates.long_import_chains(PACKAGES)]
    assert not found, "\n".join(found)


def test_paths_are_not_packages() -> None:
    folders = [REPOSITORY / name for name in ("crds", "cli", "operator", "trainer", "tests", "e2e")]
    assert [folder for folder in folders if (folder / "__init__.py").exists()] == []


def test_every_folder_of_tests_is_run() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    there = {f"tests/{path.parent.relative_to(REPOSITORY / 'tests')}" for path in REPOSITORY.glob("tests/**/test_*.py")}
    assert {folder for folder in there if not any(f"{folder}/".startswith(f"{each}/") for each in listed)} == set()
    assert len(listed) == len(set(listed))


def test_long_tests_are_marked_in_their_own_files() -> None:
    """Where only long tests run, other files are not even read (`tests/conftest.py`)."""
    marking = {path for path in REPOSITORY.glob("tests/**/*.py") if "mark.long" in path.read_text()}
    assert all(path.name.startswith("test_") for path in marking - {REPOSITORY / "tests" / "conftest.py"})


def test_tracked_files_name_no_registry_and_no_machine() -> None:
    # Git may list the files of a clone that belongs to another user.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
    files = [REPOSITORY / name for name in listing.decode().split("\0") if name]
    found = gates.forbidden_text((path for path in files if path.is_file()), FORBIDDEN_TEXT)
    assert not found, "\n".join(found)


GOOD_LINES = '"""Doc."""\n' + "x = 1\n" * 399
FUNCTION_OF_61_LINES = '"""Doc."""\n\n\ndef f() -> None:\n    """Doc."""\n' + "    x = 1\n" * 59


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        (gates.long_files, GOOD_LINES + "x = 1\n"),
        (gates.long_functions, FUNCTION_OF_61_LINES),
        (gates.repeated_constants, "A = 1\nB = 2\nA: int = 3\n"),
        (gates.undocumented, "x = 1\n"),
        (gates.undocumented, '"""Doc."""\ndef public() -> None: ...\n'),
        (gates.undocumented, '"""Doc."""\nclass Public: ...\n'),
        (gates.undocumented, '"""Doc."""\nclass Public:\n  """Doc."""\n  async def method(self) -> None: ...\n'),
        (gates.environment_reads, "import os\nx = os.environ['A']\n"),
        (gates.environment_reads, "import os\nx = os.getenv('A')\n"),
        (gates.environment_reads, "from os import environ\n"),
        (gates.unsafe_code, "import pickle\n"),
        (gates.unsafe_code, "def f():\n  from cloudpickle import loads\n"),
        (gates.unsafe_code, "import torch\nx = torch.load('f')\n"),
        (gates.unsafe_code, "x = eval('1')\n"),
        (gates.unsafe_code, "import subprocess\nsubprocess.run('ls', shell=True)\n"),
        (gates.import_time_work, "import torch\ntorch.manual_seed(0)\n"),
        (gates.import_time_work, "for x in (1, 2):\n  print(x)\n"),
        (misplaced, "import ray\n"),
        (misplaced, "def f():\n  from ray.util import placement_group\n"),
        (misplaced, "from vllm import LLM\n"),
        (misplaced, "from kubernetes.aio import client\n"),
    ],
)
def test_each_gate_finds_a_bad_source(gate: Gate, text: str) -> None:
    assert len(gate(bad(text))) >= 1


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        (gates.long_files, GOOD_LINES),
        (gates.long_functions, FUNCTION_OF_61_LINES.removesuffix("    x = 1\n")),
        (gates.undocumented, '"""Doc."""\ndef _private(): ...\nclass _Private:\n  def method(self): ...\n'),
        (gates.environment_reads, "import os\nx = os.getpid()\n"),
        (gates.unsafe_code, "model.eval()\nimport subprocess\nsubprocess.run(['ls'])\n"),
        (gates.import_time_work, "import torch\nX = tuple([1])\nif __name__ == '__main__':\n  main()\n"),
        (misplaced, "import raymond\nfrom rljob_x import ray\n"),
    ],
)
def test_no_gate_rejects_a_good_source(gate: Gate, text: str) -> None:
    assert gate(bad(text)) == []


@pytest.mark.parametrize("module", ["rljob_x.utils", "rljob_x.common.thing", "rljob_x.helpers"])
def test_a_vague_name_is_found(module: str) -> None:
    assert len(gates.vague_names(bad("", module))) == 1


def test_settings_may_read_the_environment_and_cluster_may_know_ray() -> None:
    assert gates.environment_reads(bad("import os\nx = os.environ\n", "rljob_x.settings")) == []
    assert misplaced(bad("import ray\n", "rljob_trainer.groups.ray_session")) == []
    assert len(misplaced(bad("import ray\n", "rljob_trainer.clusters"))) == 1


def test_cycles_are_found_through_relative_and_late_imports(tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from . import b\n")
    (package / "b.py").write_text("def f():\n    from p.c import x\n")
    (package / "c.py").write_text("import p.a\nx = 1\n")
    (package / "d.py").write_text("from p import a, b\n")
    assert gates.import_cycles(gates.sources_below(tmp_path)) == ["p.a <-> p.b <-> p.c"]


def test_a_long_chain_and_a_crowded_folder_are_found(tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for number in range(9):
        (package / f"m{number}.py").write_text(f"from p import m{number + 1}\n")
    (package / "m9.py").write_text("import other.m1\n")
    sources = gates.sources_below(tmp_path)
    assert [line.count(" > ") for line in gates.long_import_chains(sources)] == [9]
    assert gates.long_import_chains(sources[:-1]) == []
    assert gates.crowded_folders(sources) == []
    for number in range(21):
        (package / f"n{number}.py").write_text("")
    assert gates.crowded_folders(gates.sources_below(tmp_path)) == [f"{package}: 31 modules, at most 30"]


@pytest.mark.parametrize(
    "line",
    [
        "index = https://" + "pypi" + ".org/simple",
        "cd /" + "root/project",
        "cp x '/" + "home/ann/y'",
        "open('/" + "work/z/a')",
    ],
)
def test_forbidden_text_is_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "file.txt"
    path.write_text(f"fine\n{line}\n")
    assert len(gates.forbidden_text([path], FORBIDDEN_TEXT)) == 1


def test_ordinary_paths_and_binaries_are_not_forbidden(tmp_path: Path) -> None:
    text, binary = tmp_path / "text", tmp_path / "binary"
    text.write_text("~/{0}/x $HOME/{0}/ runs/{0}/a github.com/{1}/x /home{0}/\n".format("work", "root"))
    binary.write_bytes(b"\0/" + b"root/x\n")
    assert gates.forbidden_text([text, binary], FORBIDDEN_TEXT) == []

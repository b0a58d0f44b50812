"""The contracts of `.importlinter` hold, and the linter that checks them can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rljob_testing.settings import inherited_environment

REPOSITORY = Path(__file__).parents[2]


def lint_imports(folder: Path, *python_path: Path) -> subprocess.CompletedProcess[str]:
    environment = inherited_environment() | {"PYTHONPATH": ":".join(map(str, python_path))}
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_contract_holds() -> None:
    result = lint_imports(REPOSITORY, *(REPOSITORY / part / "src" for part in ("crds", "cli", "operator", "trainer")))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_a_broken_contract_is_reported(tmp_path: Path) -> None:
    for package, text in (("low", "import high.a\n"), ("high", "x = 1\n")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "a.py").write_text(text)
    (tmp_path / ".importlinter").write_text(
        "[importlinter]\nroot_packages =\n    low\n    high\n"
        "[importlinter:contract:layers]\nname = layers\ntype = layers\nlayers =\n    high\n    low\n"
    )
    result = lint_imports(tmp_path, tmp_path)
    assert result.returncode == 1
    assert "low.a -> high.a" in result.stdout

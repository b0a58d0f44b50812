"""Installs packages that the test environment does not contain, from the pins in proof/other_packages."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from rljob_proof.runs import REPOSITORY

PINS = REPOSITORY / "proof" / "other_packages"
INSTALLED = REPOSITORY / ".cache" / "proof"
UV = REPOSITORY / ".cache" / "bootstrap" / "bin" / "uv"


def folder_with(name: str) -> Path:
    """A folder for the import path with the packages of `name`.txt, which fit to those of this environment."""
    folder = INSTALLED / name
    # setuptools, with which some packages are built, is in this environment.
    options = ["--target", str(folder), "--python", sys.executable, "--no-build-isolation"]
    _install(name, folder, options)
    return folder


def python_with(name: str) -> Path:
    """The Python of an environment of its own with the packages of `name`.txt."""
    folder = INSTALLED / name
    python = folder / "bin" / "python"
    _install(name, folder, ["--python", str(python)], make=["venv", "--quiet", "--python", sys.executable, str(folder)])
    return python


def _install(name: str, folder: Path, options: list[str], make: list[str] | None = None) -> None:
    pins = PINS / f"{name}.txt"
    mark = folder / ".installed"
    digest = hashlib.sha256(f"{sys.version}\n{pins.read_text()}".encode()).hexdigest()
    if mark.exists() and mark.read_text() == digest:
        return
    uv = str(UV) if UV.exists() else shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is missing; run `make install`")
    print(f"installing {name} into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if make is not None:
        subprocess.run([uv, *make], check=True)
    install = ["pip", "install", "--quiet", "--require-hashes", "--no-deps", *options, "-r", str(pins)]
    subprocess.run([uv, *install], check=True)
    mark.write_text(digest)

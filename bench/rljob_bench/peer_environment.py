"""Installs a peer into its own folder on top of this environment: only distributions that are missing here or have
another version than `peers/<name>.txt` pins.

So both sides run on the same Python and the same shared libraries, and the trainer's environment contains nothing of
the peer.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from rljob_bench.machine import REPOSITORY

BOOTSTRAP = REPOSITORY / ".cache" / "bootstrap" / "bin"


@dataclass(frozen=True)
class Peer:
    """A program with which ours is compared."""

    name: str
    """Name of its distribution and of the files in `bench/peers`."""
    shared: tuple[str, ...]
    """Distributions that must have the same version on both sides. Otherwise they would not work together, or the
    measurement would compare them."""
    size: str

    @property
    def pins(self) -> Path:
        """The file with versions and hashes."""
        return REPOSITORY / "bench" / "peers" / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        """The folder into which it is installed."""
        return REPOSITORY / ".cache" / "bench" / self.name

    @property
    def program(self) -> Path:
        """The program of its process."""
        return REPOSITORY / "bench" / "peers" / f"{self.name}_peer.py"


VERL = Peer("verl", ("ray", "torch", "numpy"), "150 MB")
TRL = Peer("trl", ("torch", "transformers", "numpy"), "10 MB")


class PeerMissingError(Exception):
    """The peer cannot be installed here; the message says why."""


def peer_packages(peer: Peer = VERL) -> Path:
    """The folder that must come first on the import path. It is created if it does not exist or does not match the
    pins. Raises PeerMissingError."""
    folder = peer.folder
    needed = "\n".join(_needed(peer))
    mark = folder / ".installed"
    digest = hashlib.sha256(f"{sys.version}\n{needed}".encode()).hexdigest()
    if mark.is_file() and mark.read_text() == digest:
        return folder
    print(f"{peer.name}: installing into {folder.relative_to(REPOSITORY)} (about {peer.size})", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    _install(needed, folder)
    mark.write_text(digest)
    return folder


def _needed(peer: Peer) -> Iterator[str]:
    """Pins, with their hashes, of distributions that this environment lacks or has at another version."""
    for block in re.split(r"\n(?=\S)", peer.pins.read_text()):
        requirement = Requirement(block.split("\\")[0].strip())
        if requirement.marker and not requirement.marker.evaluate():
            continue
        pinned = str(requirement.specifier).removeprefix("==")
        try:
            present = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            present = "none"
        if present == pinned:
            continue
        if requirement.name in peer.shared:
            raise PeerMissingError(
                f"the pins need {requirement.name} {pinned}, but {present} is installed; run `make install`, or "
                "`make bench-constraints` after other pins"
            )
        yield block


def _install(needed: str, into: Path) -> None:
    uv = BOOTSTRAP / "uv" if (BOOTSTRAP / "uv").exists() else shutil.which("uv")
    if uv is None:
        raise PeerMissingError("uv is missing; run `make install`")
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(needed)
        install = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            sys.executable,
            "--target",
            into,
            "--compile-bytecode",
        ]
        pinned = ["--no-deps", "--require-hashes", "--no-build-isolation", "-r", requirements]
        result = subprocess.run(
            [*map(str, install), *map(str, pinned)], env=_environment(), capture_output=True, text=True, check=False
        )
    if result.returncode:
        last_lines = " ".join(result.stderr.split())[-400:]
        raise PeerMissingError(f"the installation from the package index failed ({last_lines})")


def _environment() -> dict[str, str]:
    """uv does not read pip's configuration, but a machine may reach its package index only through that."""
    environment = dict(os.environ)
    if not environment.get("UV_DEFAULT_INDEX") and not environment.get("UV_INDEX_URL"):
        _take(environment, "UV_DEFAULT_INDEX", "PIP_INDEX_URL", "global.index-url")
    if not environment.get("SSL_CERT_FILE"):
        _take(environment, "SSL_CERT_FILE", "PIP_CERT", "global.cert")
    return environment


def _take(environment: dict[str, str], name: str, pip_name: str, setting: str) -> None:
    value = environment.get(pip_name) or _of_pip(setting)
    if value:
        environment[name] = value


def _of_pip(setting: str) -> str:
    pip = BOOTSTRAP / "pip"
    if not pip.exists():
        return ""
    return subprocess.run([pip, "config", "get", setting], capture_output=True, text=True, check=False).stdout.strip()

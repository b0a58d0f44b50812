"""Container images on a machine that may not reach a registry: used if present, otherwise pulled, otherwise built."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rljob_kind.errors import KindError
from rljob_kind.host import ensure_packages
from rljob_kind.processes import pipe, run, run_logged, succeeds
from rljob_kind.progress import Progress
from rljob_kind.settings import certificate_bundle, cluster_folder, package_index, proxy_variables

BASE_IMAGE = "debian:bookworm-slim"
BASE_SUITE = "bookworm"
PULL_SECONDS = 600.0
REGISTRY_ANSWER_SECONDS = 20.0
SECONDS_PER_DAY = 86400.0
UNNEEDED_IN_BASE = ("usr/share/doc", "usr/share/man", "usr/share/info", "var/cache/apt", "var/lib/apt/lists", "var/log")


def image_id(tag: str) -> str | None:
    """The ID of an image in the Docker daemon; None if it does not exist."""
    command = ["docker", "image", "inspect", "--format", "{{.Id}}", tag]
    return run(command).strip() if succeeds(command) else None


def present_or_pulled(tag: str, progress: Progress) -> bool:
    """Whether the daemon has the image, after an attempt to pull it if needed."""
    if image_id(tag) is not None:
        return True
    if not succeeds(["docker", "manifest", "inspect", tag], timeout_seconds=REGISTRY_ANSWER_SECONDS):
        return False
    with progress.stage(f"pull {tag}"):
        return succeeds(["docker", "pull", "--quiet", tag], timeout_seconds=PULL_SECONDS)


def ensure_base_image(progress: Progress) -> None:
    """Provides `debian:bookworm-slim`, the base of every Dockerfile here.

    If it cannot be pulled, it is built from Debian packages. Raises KindError if that is not possible either.
    """
    if present_or_pulled(BASE_IMAGE, progress):
        return
    if os.geteuid() != 0:
        raise KindError(f"{BASE_IMAGE} cannot be pulled, and building it with debootstrap needs root")
    with progress.stage(f"build {BASE_IMAGE}", "about 70 s"):
        ensure_packages({"debootstrap": "debootstrap"}, progress)
        with scratch_folder("base") as folder:
            _bootstrap(folder)
            import_image(folder, BASE_IMAGE, ['CMD ["bash"]'])


def build_image(
    dockerfile: Path,
    tag: str,
    context: Path,
    build_args: Mapping[str, str] | None = None,
    *,
    target: str | None = None,
) -> None:
    """Builds an image with BuildKit and the host's network.

    The machine's package index and certificate authorities are passed to the build as secrets, which leave nothing in
    the image. A RUN that installs packages mounts both and sources the first, which is empty if nothing is configured:

        RUN --mount=type=secret,id=package-index --mount=type=secret,id=certificates \
            set -a; . /run/secrets/package-index; set +a; pip install ...

    Raises CommandError with the end of the build's output. The complete output is in the cache folder under `logs`.
    """
    name = tag.partition(":")[0].replace("/", "_") + (f"-{target}" if target is not None else "")
    with scratch_folder("secrets") as folder:
        index = folder / "package-index"
        index.write_text(_package_index_text())
        command = ["docker", "build", "--network", "host", "--progress", "plain", "--file", str(dockerfile)]
        command += ["--tag", tag, "--secret", f"id=package-index,src={index}"]
        command += ["--secret", f"id=certificates,src={_certificates() or index}"]
        for argument, value in (build_args or {}).items():
            command += ["--build-arg", f"{argument}={value}"]
        for variable in proxy_variables():  # Docker knows these names and keeps their values out of the image.
            command += ["--build-arg", variable]
        command += ["--target", target] if target is not None else []
        run_logged([*command, str(context)], cluster_folder() / "logs" / f"build-{name}.log")


def remove_other_tags(repository: str, kept: str) -> None:
    """Removes the images of a repository (a name without a tag) except one. Images in use stay."""
    listing = run(["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository])
    for tag in listing.split():
        if tag != kept:
            succeeds(["docker", "image", "rm", tag])


def import_image(folder: Path, tag: str, changes: Sequence[str]) -> None:
    """Imports a folder as the only layer of an image. `changes` are Dockerfile instructions such as `USER 1000`."""
    options = [word for change in changes for word in ("--change", change)]
    pipe(["tar", "-C", str(folder), "--numeric-owner", "-c", "."], ["docker", "import", *options, "-", tag])


def content_hash(paths: Sequence[Path], *values: str) -> str:
    """Twelve hexadecimal digits that change with each value and file. A folder counts with all files below it except
    Python's caches. Raises KindError if a path does not exist."""
    digest = hashlib.sha256(json.dumps(values).encode())
    for path in paths:
        if not path.exists():
            raise KindError(f"{path} is missing, but an image is built from it; restore it from the repository")
        for file in sorted([path] if path.is_file() else filter(_counts, path.rglob("*"))):
            digest.update(f"{file.relative_to(path.parent)} {file.stat().st_mode & 0o111}\n".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _counts(path: Path) -> bool:
    made = any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
    return path.is_file() and not made


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A folder on the cache's file system, which has enough space and allows links to programs. It is deleted at the
    end."""
    parent = cluster_folder() / "scratch"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{purpose}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale_scratch() -> None:
    """Deletes scratch folders that a killed process left at least a day ago."""
    for folder in (cluster_folder() / "scratch").glob("*"):
        if time.time() - folder.stat().st_mtime > SECONDS_PER_DAY:
            shutil.rmtree(folder, ignore_errors=True)


def _bootstrap(folder: Path) -> None:
    """Installs a minimal Debian from this machine's mirror, with no more packages than the published image."""
    repositories = _debian_repositories()
    mirror = next((address for address, suite in repositories if suite == BASE_SUITE), None)
    command = ["debootstrap", "--variant=minbase", BASE_SUITE, str(folder), *([mirror] if mirror else [])]
    run_logged(command, cluster_folder() / "logs" / "debootstrap.log")
    if repositories:
        lines = [f"deb {address} {suite} main" for address, suite in repositories]
        (folder / "etc/apt/sources.list").write_text("\n".join(lines) + "\n")
    for name in UNNEEDED_IN_BASE:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("var/cache/apt/archives/partial", "var/lib/apt/lists/partial", "var/log/apt"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/dpkg/dpkg.cfg.d/without-documentation").write_text(
        "path-exclude /usr/share/doc/*\npath-exclude /usr/share/man/*\npath-exclude /usr/share/info/*\n"
        "path-include /usr/share/doc/*/copyright\n"
    )
    # Prevents services from starting while the image is built.
    policy = folder / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)


def _debian_repositories() -> list[tuple[str, str]]:
    """(address, suite) of the Debian archives from which this machine's apt reads the base image's release."""
    if shutil.which("apt-get") is None:
        return []
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    lines = [line.split() for line in run(command).splitlines()]
    suites = (BASE_SUITE, f"{BASE_SUITE}-updates", f"{BASE_SUITE}-security")
    found = {(words[0], words[1]) for words in lines if len(words) == 3 and words[1] in suites and words[2] == "main"}
    return sorted(found, key=lambda entry: suites.index(entry[1]))


def _package_index_text() -> str:
    """Shell assignments that configure pip and uv inside a build; empty if this machine needs none."""
    lines = []
    index = package_index() or _pip_setting("global.index-url")
    if index is not None:
        lines += [f"PIP_INDEX_URL='{index}'", f"UV_DEFAULT_INDEX='{index}'"]
    if _certificates() is not None:
        lines += [f"{name}=/run/secrets/certificates" for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")]
    return "".join(f"{line}\n" for line in lines)


def _certificates() -> Path | None:
    chosen = certificate_bundle()
    if chosen is None:
        setting = _pip_setting("global.cert")
        chosen = Path(setting) if setting and Path(setting).is_file() else None
    return chosen


def _pip_setting(name: str) -> str | None:
    for pip in ("pip", "pip3"):
        if shutil.which(pip) is not None:
            command = [pip, "config", "get", name]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            return result.stdout.strip() or None
    return None

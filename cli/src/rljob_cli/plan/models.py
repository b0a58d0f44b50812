"""Finds the shapes of a job's models (layers, widths, vocabulary) without loading their weights.

A model of the Hugging Face hub is looked up in this machine's cache, then in the planner's table of known models, then
on the hub itself. From the hub only the model's `config.json` is downloaded, a few kilobytes.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rljob.plain_text import one_line
from rljob_api.rule import LOCAL_SOURCE
from rljob_cli import settings
from rljob_cli.errors import CliError
from rljob_cli.local.evaluation_job import RUN_SCHEME, split_step
from rljob_planner.gguf_shape import shape_of_gguf
from rljob_planner.job_workload import ModelSource
from rljob_planner.known_models import known_model, similar_names
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import Role

if TYPE_CHECKING:
    import http.client

PACKAGE_SCHEME = "package://"
MODEL_CONFIG = "model-config"
"""Folder of a run with the configuration and tokenizer of its model."""
POLICY_FIELD = "spec.training.model.source"
HUB_TIMEOUT_SECONDS = 10.0
"""Timeout of the request to the hub for a `config.json`."""
_DENIED, _MISSING = ("denies access to it", "set HF_TOKEN, or "), ("has no config.json for it", "")
_HUB_ERRORS = {401: _DENIED, 403: _DENIED, 404: _MISSING, 410: _MISSING}
"""By HTTP status: what the hub does, for the message, and the first part of the advice."""
_MAX_CONFIG_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class FoundShape:
    """A model's shape, and where it was found, as printed: `from its config.json`."""

    shape: ModelShape
    origin: str


def shapes_of(
    sources: Mapping[Role, ModelSource], job_folder: Path, config_file: Path | None = None, *, offline: bool = False
) -> dict[Role, FoundShape]:
    """The shape of each role's model. `config_file` is the policy's `config.json`; every role with the policy's source
    uses it. `offline`: without requests to the hub.

    Raises CliError or PlanError if a shape cannot be found."""
    found: dict[tuple[str, str | None], FoundShape] = {}
    if config_file is not None:
        shape = _shape_of_file(config_file, f"--model-config {config_file}")
        found[sources[Role.ACTOR].source, sources[Role.ACTOR].revision] = FoundShape(shape, f"from {config_file}")
    for source in sources.values():
        if (source.source, source.revision) not in found:
            found[source.source, source.revision] = find_shape(source, job_folder, offline=offline)
    return {role: found[source.source, source.revision] for role, source in sources.items()}


def find_shape(source: ModelSource, job_folder: Path, *, offline: bool = False) -> FoundShape:
    """The shape of a model, by its `source` in the job file. Relative paths start at the job file's folder."""
    text = source.source
    if not _looks_local(text, job_folder):
        return _of_hub(source, offline=offline)
    if text.startswith(PACKAGE_SCHEME):
        path = _package_path(source)
    elif text.startswith(RUN_SCHEME):
        path = _config_folder_of_run(text, job_folder)
    else:
        path = job_folder / os.path.expanduser(text)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return FoundShape(_shape_of_gguf_file(path, source), f"from {path.name}")
    file = path / "config.json"
    if not os.path.isfile(file):
        raise CliError(
            f"{source.field}: {text!r} does not exist or has no config.json (looked for {file}); check the path"
            f"{_or_model_config(source)}"
        )
    return FoundShape(_shape_of_file(file, source.field), "from its config.json")


def _looks_local(text: str, job_folder: Path) -> bool:
    """Whether the source is a path instead of a model of the hub. `owner/name` is a path if this path exists. The
    trainer has the same rule."""
    is_path = re.match(LOCAL_SOURCE, text) is not None or len(PurePosixPath(text).parts) > 2
    return is_path or os.path.exists(job_folder / text)


def _or_model_config(source: ModelSource) -> str:
    """More advice, for the policy only: --model-config does not help for other models."""
    return ", or pass the model's config.json with --model-config FILE" if source.field == POLICY_FIELD else ""


def _package_path(source: ModelSource) -> Path:
    """The path of a file in an installed Python package. The package is located, not imported."""
    package, _, inner = source.source.removeprefix(PACKAGE_SCHEME).partition("/")
    if not package or not inner or ".." in PurePosixPath(inner).parts:
        raise CliError(f"{source.field}: must have the form package://PYTHON_PACKAGE/PATH (seen {source.source!r})")
    top, *nested = package.split(".")
    spec = importlib.util.find_spec(top) if top else None
    if spec is None or spec.submodule_search_locations is None:
        raise CliError(
            f"{source.field}: the Python package {top!r} is not installed here (seen {source.source!r}); install it"
            f"{_or_model_config(source)}"
        )
    candidates = [Path(folder, *nested, inner) for folder in spec.submodule_search_locations]
    return next((path for path in candidates if os.path.exists(path)), candidates[0])


def _config_folder_of_run(text: str, job_folder: Path) -> Path:
    """The folder with the configuration of the model that a run has trained. On a cluster the run folder is `run/` in
    the job's folder."""
    folder, _ = split_step(text)
    path = job_folder / os.path.expanduser(folder)
    return next((each / MODEL_CONFIG for each in (path, path / "run") if (each / MODEL_CONFIG).is_dir()), path)


def _of_hub(source: ModelSource, *, offline: bool) -> FoundShape:
    name = source.source
    if (file := _cached_config(name, source.revision)) is not None:
        return FoundShape(_shape_of_file(file, source.field, name), "from its config.json in this machine's cache")
    if (shape := known_model(name)) is not None:
        return FoundShape(shape, "known model")
    if offline:
        raise CliError(f"{source.field}: the shape of {name!r} is not known on this machine; see `rljob plan`")
    return FoundShape(shape_of_config(_hub_config(source), name), "from its config.json on the hub")


def _cached_config(name: str, revision: str | None) -> Path | None:
    """The `config.json` in this machine's hub cache, `models--OWNER--NAME/snapshots/COMMIT`; None if the
    file does not exist."""
    folder = settings.hub_cache_folder() / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    try:
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else (revision or "")
    except (OSError, UnicodeDecodeError):
        return None
    if not commit or "/" in commit:
        return None
    file = folder / "snapshots" / commit / "config.json"
    return file if file.is_file() else None


def _hub_config(source: ModelSource) -> dict[str, object]:
    """Downloads the model's `config.json` from the hub. Raises CliError if the hub is unreachable or off, or if it
    denies access or has no such file."""
    # Imported here, because the imports take 50 ms and few plans send a request to the hub.
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    name, address = source.source, settings.hub_address()
    near = similar_names(name)
    guess = f" (did you mean {' or '.join(near)}?)" if near else ""
    advice = _or_model_config(source).removeprefix(", or ") or "use a folder with the model's config.json instead"
    where = f"{source.field}: rljob does not know the model {name!r}{guess}, and"
    if address is None:
        raise CliError(f"{where} HF_HUB_OFFLINE is set, so it sends no request to the hub; {advice}")
    if not address.startswith(("https://", "http://")):
        raise CliError(f"HF_ENDPOINT: must begin with https:// or http:// (seen {address!r}); correct it")
    path = urllib.parse.quote(f"{name}/resolve/{source.revision or 'main'}/config.json")
    try:
        request = urllib.request.Request(f"{address}/{path}")
        if (token := settings.hub_token()) is not None:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_SECONDS) as response:
            content = _read_in_time(response)
    except urllib.error.HTTPError as error:
        why, first = _HUB_ERRORS.get(error.code, ("returns an error", "try again later, or "))
        raise CliError(f"{where} the hub {why} (HTTP {error.code}); {first}{advice}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = one_line(getattr(error, "reason", None) or error)
        raise CliError(f"{where} the hub cannot be reached ({reason}); {advice}") from None
    return _as_config(content, f"{address}/{path}")


def _read_in_time(response: http.client.HTTPResponse) -> bytes:
    """At most the first 4 MiB of the response. Raises TimeoutError after ten seconds, even if data still arrives."""
    end, content = time.monotonic() + HUB_TIMEOUT_SECONDS, b""
    while len(content) < _MAX_CONFIG_BYTES and (more := response.read1(_MAX_CONFIG_BYTES - len(content))):
        content += more
        if time.monotonic() > end:
            raise TimeoutError("timed out")
    return content


def _shape_of_file(file: Path, where: str, name: str | None = None) -> ModelShape:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_CONFIG_BYTES)
    except OSError as error:
        raise CliError(f"{where}: {file} cannot be read ({error.strerror}); check the path") from None
    return shape_of_config(_as_config(content, f"{where}: {file}"), name or file.parent.name or str(file))


def _as_config(content: bytes, where: str) -> dict[str, object]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CliError(f"{where}: is not valid JSON ({one_line(error)}); use a model's config.json") from None
    if not isinstance(config, dict):
        raise CliError(f"{where}: must be a JSON object (seen {type(config).__name__}); use a model's config.json")
    return config


def _shape_of_gguf_file(path: Path, source: ModelSource) -> ModelShape:
    """The shape of a GGUF file. Reads the header only, through a memory map."""
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # The map is not closed here, because a traceback may still refer to it. It is closed with the last reference.
        return shape_of_gguf(memoryview(content), path.stem)
    except (OSError, ValueError) as error:
        raise CliError(f"{source.field}: {path} cannot be read ({one_line(error)}); check the file") from None

"""`rljob plan`: the shapes of a job's models, wherever they can be learned without loading one.

A model of the hub is looked up in the cache of this machine, then in the table of well-known models, then on the hub
itself, of which only the few kilobytes of its `config.json` are read.
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

from rljob_api.rule import LOCAL_SOURCE
from rljob_cli import settings
from rljob_cli.errors import CliError
from rljob_cli.plain_text import one_line
from rljob_planner.gguf_shape import shape_of_gguf
from rljob_planner.job import ModelSource
from rljob_planner.known_models import known_model, similar_names
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape
from rljob_planner.workload import Role

if TYPE_CHECKING:
    import http.client

PACKAGE_SCHEME = "package://"
POLICY_FIELD = "spec.training.model.source"
HUB_SECONDS = 10.0
_REFUSED, _MISSING = ("does not let us read it", "set HF_TOKEN, or "), ("has no config.json of it", "")
_ANSWERS = {401: _REFUSED, 403: _REFUSED, 404: _MISSING, 410: _MISSING}
_MAX_CONFIG_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class FoundShape:
    """A shape, and where it is from, for people."""

    shape: ModelShape
    origin: str


def shapes_of(
    sources: Mapping[Role, ModelSource], job_folder: Path, config_file: Path | None = None
) -> dict[Role, FoundShape]:
    """The shape of each role's model; `config_file` is that of the policy, and of what has the policy's source.

    Raises CliError or PlanError where one cannot be learned."""
    found: dict[tuple[str, str | None], FoundShape] = {}
    if config_file is not None:
        shape = _shape_of_file(config_file, f"--model-config {config_file}")
        found[sources[Role.ACTOR].source, sources[Role.ACTOR].revision] = FoundShape(shape, f"of {config_file}")
    for source in sources.values():
        if (source.source, source.revision) not in found:
            found[source.source, source.revision] = find_shape(source, job_folder)
    return {role: found[source.source, source.revision] for role, source in sources.items()}


def find_shape(source: ModelSource, job_folder: Path) -> FoundShape:
    """The shape of a model by the text of its `source`; relative paths start at the job file's folder."""
    text = source.source
    if not _looks_local(text, job_folder):
        return _of_hub(source)
    path = _package_path(source) if text.startswith(PACKAGE_SCHEME) else job_folder / Path(text).expanduser()
    if path.suffix == ".gguf" and os.path.isfile(path):
        return FoundShape(_shape_of_gguf_file(path, source), f"of {path.name}")
    file = path / "config.json"
    if not os.path.isfile(file):
        raise CliError(
            f"{source.field}: {text!r} is not here, or holds no config.json (looked for {file}); check the path"
            f"{_or_config(source)}"
        )
    return FoundShape(_shape_of_file(file, source.field), "of its config.json")


def _looks_local(text: str, job_folder: Path) -> bool:
    """As the trainer decides it: `owner/name` is a path where something is there."""
    is_path = re.match(LOCAL_SOURCE, text) is not None or len(PurePosixPath(text).parts) > 2
    return is_path or os.path.exists(job_folder / text)


def _or_config(source: ModelSource) -> str:
    """What else one can do for the policy, and for no other model."""
    return ", or name its config.json with --model-config FILE" if source.field == POLICY_FIELD else ""


def _package_path(source: ModelSource) -> Path:
    """Where a file of an installed package is. The package is found, not imported."""
    package, _, inner = source.source.removeprefix(PACKAGE_SCHEME).partition("/")
    if not package or not inner or ".." in PurePosixPath(inner).parts:
        raise CliError(f"{source.field}: {source.source!r} is not package://<python package>/<path>; write it so")
    top, *nested = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        raise CliError(
            f"{source.field}: no Python package {top!r} is installed here ({source.source!r}); install it"
            f"{_or_config(source)}"
        )
    candidates = [Path(folder, *nested, inner) for folder in spec.submodule_search_locations]
    return next((path for path in candidates if path.exists()), candidates[0])


def _of_hub(source: ModelSource) -> FoundShape:
    name = source.source
    if (file := _cached_config(name, source.revision)) is not None:
        return FoundShape(_shape_of_file(file, source.field, name), "of its config.json in the cache of this machine")
    if (shape := known_model(name)) is not None:
        return FoundShape(shape, "known model")
    return FoundShape(shape_of_config(_hub_config(source), name), "of its config.json on the hub")


def _cached_config(name: str, revision: str | None) -> Path | None:
    """The `config.json` that was downloaded once (`models--OWNER--NAME/snapshots/COMMIT`)."""
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
    """From the hub over HTTP. Raises CliError where it does not answer, or has no such model."""
    # 50 ms, for what few plans need.
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    name, address = source.source, settings.hub_address()
    near = similar_names(name)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    advice = f"{guess}{_or_config(source).removeprefix(', or ') or 'name a folder with its config.json instead'}"
    where = f"{source.field}: the shape of {name!r} is not known here, and"
    if address is None:
        raise CliError(f"{where} HF_HUB_OFFLINE forbids asking the hub; {advice}")
    if not address.startswith(("https://", "http://")):
        raise CliError(f"HF_ENDPOINT: must begin with https:// (seen {address!r}); correct it")
    path = urllib.parse.quote(f"{name}/resolve/{source.revision or 'main'}/config.json")
    try:
        request = urllib.request.Request(f"{address}/{path}")
        if (token := settings.hub_token()) is not None:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            content = _read_in_time(answer)
    except urllib.error.HTTPError as error:
        why, first = _ANSWERS.get(error.code, ("does not answer as it should", "try again later, or "))
        raise CliError(f"{where} the hub {why} (HTTP {error.code}); {first}{advice}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = one_line(getattr(error, "reason", None) or error)
        raise CliError(f"{where} the hub does not answer ({reason}); {advice}") from None
    return _as_config(content, f"{address}/{path}")


def _read_in_time(answer: http.client.HTTPResponse) -> bytes:
    """What a config.json may have at most. Raises TimeoutError for one that comes drop by drop."""
    end, content = time.monotonic() + HUB_SECONDS, b""
    while len(content) < _MAX_CONFIG_BYTES and (more := answer.read1(_MAX_CONFIG_BYTES - len(content))):
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
        raise CliError(f"{where}: is no JSON ({one_line(error)}); name a model's config.json") from None
    if not isinstance(config, dict):
        raise CliError(f"{where}: holds no JSON object (seen {type(config).__name__}); name a model's config.json")
    return config


def _shape_of_gguf_file(path: Path, source: ModelSource) -> ModelShape:
    """Only the pages of the header are read."""
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Closed when nothing refers to it any more: an error on its way out does.
        return shape_of_gguf(memoryview(content), path.stem)
    except (OSError, ValueError) as error:
        raise CliError(f"{source.field}: {path} cannot be read ({one_line(error)}); check the file") from None

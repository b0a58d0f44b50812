"""Jobs as the API server has them, for programs."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from enum import StrEnum

from rich.console import Console
from ruamel.yaml import YAML

from rljob_api.standard_streams import write_utf8
from rljob_cli.cluster.objects import Json
from rljob_cli.cluster.stored_job import StoredJob


class OutputFormat(StrEnum):
    """For programs."""

    JSON = "json"
    YAML = "yaml"


def print_object(job: StoredJob, output: OutputFormat, console: Console) -> None:
    """The whole resource, without the bookkeeping of who wrote which field."""
    _print(_shown(job), output, console)


def print_list(jobs: Sequence[StoredJob], output: OutputFormat, console: Console) -> None:
    """A List of whole resources, as `kubectl get -o json` prints it."""
    _print({"apiVersion": "v1", "kind": "List", "items": [_shown(job) for job in jobs]}, output, console)


def _shown(job: StoredJob) -> Json:
    metadata = job.wire.get("metadata")
    assert isinstance(metadata, dict), "every object has metadata"
    return {**job.wire, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}


def _print(shown: Json, output: OutputFormat, console: Console) -> None:
    if output is OutputFormat.JSON:
        text = json.dumps(shown, indent=2, ensure_ascii=False) + "\n"
    else:
        writer = YAML(typ="safe", pure=True)
        writer.default_flow_style = False
        writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        writer.width = 120
        stream = io.StringIO()
        writer.dump(shown, stream)
        text = stream.getvalue()
    write_utf8(console.file, text)

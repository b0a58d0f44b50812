"""Reads the files of a model's folder, with errors that name a damaged file.

If a file is truncated, or contains a list instead of an object, transformers may raise any type of error
(AttributeError, TypeError, RecursionError), with a message that does not name the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob_trainer.errors import ConfigurationError, TrainerError, described, storage_checked

WHERE = "spec.training.model.source"
"""The field that the errors name."""
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""The file with all weights, and the index that names the files with the weights."""
OBJECT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
"""Files of a model that contain one JSON object each."""


@contextmanager
def reading_model(folder: Path, what: str, advice: str) -> Iterator[None]:
    """Converts every exception of a library that reads files of `folder` into a ConfigurationError. If a file of
    OBJECT_FILES is damaged, the error names this file. Otherwise it contains `what` (what failed), the library's
    message and `advice`.

    A TrainerError and a MemoryError pass unchanged. A failing disk raises ResourceError.
    """
    try:
        with storage_checked(f"{WHERE}: {folder}"):
            yield
    except (TrainerError, MemoryError):
        raise
    except Exception as error:
        for name in OBJECT_FILES:
            if (folder / name).is_file():
                read_json_object(folder / name)
        raise ConfigurationError(f"{WHERE}: {what} ({described(error)}); {advice}") from error


def read_json_object(path: Path) -> dict[str, object]:
    """Reads the JSON object in a file of a model. Raises ConfigurationError that names the file if it cannot be read or
    is damaged, ResourceError if the disk fails."""
    try:
        with storage_checked(f"{WHERE}: {path}"):
            found: object = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigurationError(f"{WHERE}: {path} cannot be read ({error.strerror}); check the folder") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{WHERE}: {path} is not valid JSON ({error}); it may be truncated: copy or download it again"
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"{WHERE}: {path} contains {json.dumps(found)[:40]}, not a JSON object {{...}}; copy or download it again"
        )
    return found

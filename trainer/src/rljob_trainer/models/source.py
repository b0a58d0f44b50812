"""Provides the model that a job names (folder, GGUF file or hub repository) as a Hugging Face folder on this
machine."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rljob_api.v1alpha1.model import Model
from rljob_trainer.errors import ConfigurationError, TrainerError, described, storage_checked
from rljob_trainer.models.model_files import WHERE
from rljob_trainer.observability.growth import OnGrowth, report_downloaded
from rljob_trainer.source_paths import local_path, looks_local

log = logging.getLogger(__name__)

CONVERSION_VERSION = 1
"""Part of the folder name of a converted model. Increase it when the conversion writes other content."""
FINGERPRINTED_SUFFIXES = frozenset({".json", ".model", ".safetensors", ".tiktoken", ".txt"})
"""Endings of the files that the fingerprint of a model includes."""
FINGERPRINTED_BYTES = 1024 * 1024
"""Bytes at the beginning of each weight file that the fingerprint includes."""


@dataclass(frozen=True)
class ModelLocation:
    """The location of a model, valid on every machine. The folder itself may have to be created on each machine."""

    model: Model
    """The model. A hub model has a commit as `revision`, so that all machines use the same version."""
    cache_folder: Path
    """The folder on each machine for converted models and for locks. Downloads go into the hub library's cache."""
    base_folder: Path
    """The folder where a relative path in `model` starts."""

    def folder(self, on_growth: OnGrowth = report_downloaded) -> Path:
        """Returns the model's folder on this machine; downloads or converts the model if necessary. Several processes
        may call this at the same time: one does the work, the others wait, and later calls use the result. During a
        download `on_growth` is called with the number of bytes in the cache. Raises the errors of `controller_model`,
        and ConfigurationError if weights are missing."""
        if looks_local(self.model.source, self.base_folder):
            return local_model_folder(self.model, self.cache_folder, self.base_folder)
        from rljob_trainer.models.download import download_once

        assert self.model.revision is not None, "controller_model must resolve the revision to a commit"
        locks = self.cache_folder / "models"
        locks.mkdir(parents=True, exist_ok=True)
        name = f"{self.model.source.replace('/', '--')}-{self.model.revision}"
        with _locked(locks / f"{name}.lock"):
            return download_once(self.model.source, self.model.revision, WHERE, locks / f"{name}.complete", on_growth)


def controller_model(model: Model, cache_folder: Path, base_folder: Path) -> tuple[Path, ModelLocation]:
    """Returns the folder with the files that the controller needs (configuration and tokenizer; a local model has also
    its weights), and the location from which workers get the model.

    Raises ConfigurationError if the model does not exist or cannot be used, ResourceError if the hub is unreachable and
    the model is not in the cache."""
    if looks_local(model.source, base_folder):
        return local_model_folder(model, cache_folder, base_folder), ModelLocation(model, cache_folder, base_folder)
    from rljob_trainer.models.download import SETTINGS_FILES, download_model

    folder = download_model(model.source, model.revision, WHERE, SETTINGS_FILES)
    pinned = model.model_copy(update={"revision": folder.name})
    return folder, ModelLocation(pinned, cache_folder, base_folder)


def local_model_folder(model: Model, cache_folder: Path, base_folder: Path) -> Path:
    """Returns the folder of a local model, with configuration, weights and tokenizer.

    A folder is used directly; a `.gguf` file is converted once into `cache_folder`. Relative paths start at
    `base_folder`. Raises ConfigurationError if there is no model, or if the job names a revision of it.
    """
    path = local_path(model.source, base_folder, WHERE)
    if model.revision is not None:
        raise ConfigurationError(
            f"spec.training.model.revision: {model.revision!r} is not possible for a local model ({model.source}); "
            "remove it"
        )
    if path.is_file() and path.suffix == ".gguf":
        return converted_gguf(path, cache_folder)
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"{WHERE}: {path} has no config.json; name a folder in Hugging Face's format or a .gguf file"
        )
    return path


def converted_gguf(gguf_file: Path, cache_folder: Path) -> Path:
    """Returns the model of a GGUF file as a folder with float32 weights. The first call converts the file; later calls
    for a file with this name and content return the same folder.

    Several processes may call this at the same time: one converts, the others wait. The folder appears complete or not
    at all.
    """
    digest = _digest(gguf_file)
    folder = cache_folder / "models" / f"{gguf_file.stem}-{digest[:16]}-v{CONVERSION_VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        from rljob_trainer.models.gguf_conversion import convert_gguf

        started = time.monotonic()
        log.info("converting %s into %s (once)", gguf_file.name, folder)
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with storage_checked(f"{WHERE}: converting {gguf_file} into {folder}"):
                convert_gguf(gguf_file, unfinished)
                os.replace(unfinished, folder)
        except (TrainerError, MemoryError):
            raise
        except Exception as error:
            # For a damaged file the reader may raise any error, such as IndexError and struct.error.
            raise ConfigurationError(
                f"{WHERE}: cannot convert {gguf_file} into {folder}: {described(error)}; check that the file is "
                "complete and that the folder is writable"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        log.info("converted %s in %.0f s", gguf_file.name, time.monotonic() - started)
    return folder


def fingerprint(folder: Path) -> str:
    """Returns a digest that usually differs for different models: of all settings and tokenizer files, and of the size
    and the first MiB of each weight file."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in FINGERPRINTED_SUFFIXES:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with storage_checked(f"{WHERE}: {path}"), path.open("rb") as file:
                digest.update(file.read(FINGERPRINTED_BYTES if path.suffix == ".safetensors" else -1))
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with storage_checked(f"{WHERE}: {path}"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(lock_file: Path) -> Iterator[None]:
    # The kernel releases the lock when the process that holds it ends, so a killed conversion does not block others.
    with lock_file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

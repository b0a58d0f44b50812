"""Models of the Hugging Face hub, by its library, into its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from rljob_trainer.errors import ConfigurationError, ResourceError, storage_failure
from rljob_trainer.models.model_files import WHERE, read_json_object
from rljob_trainer.observability.growth import GrowthTold, watched_growth

SETTINGS_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Configuration and tokenizer."""
ALL_FILES = (*SETTINGS_FILES, "*.safetensors")
"""No weights in pickled form: those run code when they are loaded."""


def download_once(repository: str, revision: str, where: str, marker: Path, told: GrowthTold) -> Path:
    """All files of a commit; the hub is asked until the first success, of which `marker` tells, and no more after it.
    `told`: of the bytes as they come.

    One caller at a time. Raises as `download_model`, and ConfigurationError where weights are missing."""
    if marker.exists():
        try:
            return Path(snapshot_download(repository, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            marker.unlink()
    with watched_growth(_cache_of(repository), told):
        folder = download_model(repository, revision, where, ALL_FILES)
    missing = [name for name in _weight_files(folder) if not (folder / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"{where}: {repository!r} at revision {revision!r} lacks {missing[0]}; weights must be in safetensors files"
        )
    marker.touch()
    return folder


def _cache_of(repository: str) -> Path:
    """Where the library downloads to."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def _weight_files(folder: Path) -> Sequence[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigurationError(
            f"{WHERE}: {index} has no weight_map (seen: {weight_map!r:.80}); choose another revision"
        )
    return sorted(set(map(str, weight_map.values())))


def download_model(repository: str, revision: str | None, where: str, files: Sequence[str]) -> Path:
    """The repository's files of one revision, in a folder that is named after its commit.

    Raises ConfigurationError, starting with `where`, if there is no such model, ResourceError if the hub cannot be
    reached and the model is not in the cache.
    """
    seen = f"{repository!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))
    except HFValidationError as error:
        raise ConfigurationError(f"{where}: {seen} is neither a path nor a repository's name ({error})") from error
    except GatedRepoError as error:
        raise ConfigurationError(
            f"{where}: access to {seen} has to be granted by its owner; ask for it and set HF_TOKEN in spec.env"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigurationError(f"{where}: {seen} not found; the repository has no such revision") from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"{where}: {seen} not found on the Hugging Face hub; check the name, or set HF_TOKEN if it is private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        is_of_network = isinstance(error, LocalEntryNotFoundError | HfHubHTTPError | TimeoutError | ConnectionError)
        if not is_of_network and (failure := storage_failure(error)):
            raise ResourceError(
                f"{where}: {seen} cannot be stored in the local cache or read from it ({failure}); check the disk"
            ) from error
        if constants.HF_HUB_OFFLINE:
            raise ConfigurationError(
                f"{where}: {seen} not found in the local cache, and HF_HUB_OFFLINE forbids the Hugging Face hub; "
                "name a folder, or unset it"
            ) from error
        raise ResourceError(
            f"{where}: {seen} not found in the local cache, and the Hugging Face hub cannot be reached "
            f"({str(error).splitlines()[0]}); check the network, or name a folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{where}: {seen} holds no config.json, so it is no model of transformers")
    return folder

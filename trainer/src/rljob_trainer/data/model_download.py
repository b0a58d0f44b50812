"""Models of the Hugging Face hub, by its library, into its own cache."""

from __future__ import annotations

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

from rljob_trainer.errors import ConfigurationError, ResourceError

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""No weights in pickled form: those run code when they are loaded."""


def download_model(repository: str, revision: str | None, where: str) -> Path:
    """The repository's files of one revision.

    Raises ConfigurationError, starting with `where`, if there is no such model, ResourceError if the hub cannot be
    reached and the model is not in the cache.
    """
    seen = f"{repository!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(FILES)))
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

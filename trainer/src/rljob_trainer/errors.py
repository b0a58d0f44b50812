"""The trainer's errors. Each carries one message, so that it survives pickling between processes.

A message reads *where: what is wrong (value seen); what to do*. Errors of a kind that the user can only fix by
changing the job are `ConfigurationError`; the trainer's exit code tells the operator not to retry them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FailedWorker:
    """The worker that an error came from: the first one, where others failed because of it."""

    role: str
    rank: int
    pod: str | None = None
    node: str | None = None
    """Of Kubernetes, as the pod is."""
    log_file: Path | None = None

    def __str__(self) -> str:
        return f"worker rank {self.rank} ({self.role}){self.place}"

    @property
    def place(self) -> str:
        """The pod and the node, for behind a name; nothing where there are none."""
        return (f", pod {self.pod}" if self.pod else "") + (f", node {self.node}" if self.node else "")


class TrainerError(Exception):
    """Base of all errors that the trainer raises on purpose."""

    worker: FailedWorker | None = None
    """Set by the controller on what comes from a worker."""


class ConfigurationError(TrainerError, ValueError):
    """The job can never work as written (exit code 2)."""


class DatasetError(ConfigurationError):
    """A dataset cannot be read, or a row of it cannot be used."""


class ChatTemplateError(ConfigurationError):
    """A model's chat template cannot be applied to a conversation; the text holds the template's own words."""


class RewardError(TrainerError):
    """The job's reward failed on a response, and the job's policy is to fail then."""


class BatchNotFullError(ConfigurationError):
    """Dynamic sampling has found too few groups to learn from, and the job's policy is to fail then; another attempt
    would draw the same."""


class AlgorithmFunctionError(TrainerError):
    """The job's own advantage or loss function failed, or gave what cannot be used."""


class CollectiveFunctionError(AlgorithmFunctionError):
    """Likewise, within a call in which ranks wait for each other: nothing more can be asked of the workers."""


class DataError(TrainerError, ValueError):
    """Columns of a batch do not fit together; a mistake in our own code or in a worker's method."""


class DispatchError(TrainerError, TypeError):
    """A worker method is called in a way that its registration does not allow."""


class ResourceError(TrainerError):
    """Devices, memory, ports or the network are missing (exit code 75: another try elsewhere may work)."""


class WorkerError(TrainerError):
    """A worker raised something that is none of our errors; the text holds its traceback."""


class WorkerDiedError(TrainerError):
    """A worker process is gone (exit code 75); the text names its rank and the cause."""


class DataLostError(WorkerDiedError):
    """Data in the object store is gone with the process or node that held it."""


class CallTimeoutError(TrainerError, TimeoutError):
    """A call of a worker method was not done in the time that the caller gave it."""


class NonFiniteUpdateError(TrainerError):
    """Several updates in a row had gradients that were not finite."""


MAX_DESCRIPTION = 500


def described(error: Exception) -> str:
    """A library's error in one line: `UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff ...`.

    The type is left out where the message says enough without it. What it was raised from is added where it says
    more: `datasets` raises "An error occurred while generating the dataset" from the error that names the fault."""
    text = " ".join(str(error).split())
    if type(error) not in (OSError, ValueError, RuntimeError, FileNotFoundError, PermissionError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error.__cause__, Exception) and str(error.__cause__) not in str(error):
        text += f", because of {described(error.__cause__)}"
    return text if len(text) <= MAX_DESCRIPTION else text[:MAX_DESCRIPTION] + "..."


STORAGE_ERRNOS = frozenset(
    (
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
        *(errno.ENOSPC, errno.EDQUOT),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    )
)
"""Of a disk or a file system that fails (ENOTCONN: of FUSE whose server has died), that is full, and of a process or
machine that has no room for another file."""
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")


def storage_failure(error: BaseException | None) -> str | None:
    """What failed, in one line, if the error, or one that it was raised from or while handling, says that the storage
    failed, is full or has no room for another open file. What was read is not at fault then: raise ResourceError.

    The libraries written in Rust (tokenizers, safetensors) raise errors without `errno`, whose messages have it:
    `Input/output error (os error 5)`."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        found = _RUST_ERRNO.search(str(error))
        number = error.errno if isinstance(error, OSError) else None
        if number in STORAGE_ERRNOS or (found and int(found[1]) in STORAGE_ERRNOS):
            return " ".join(str(error).split())[:MAX_DESCRIPTION]
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def storage_checked(where: str) -> Iterator[None]:
    """Turns an error within into a ResourceError, starting with `where`, if the storage has failed. Our own errors
    pass."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if failure := storage_failure(error):
            raise ResourceError(f"{where}: the disk or the file system fails ({failure}); check both") from error
        raise


@contextmanager
def about_field(field: str, said: str) -> Iterator[None]:
    """Configuration errors within, which name fields that begin with `said`, name those of `field`."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace(said, field)) from error

"""The trainer's errors. Each carries one message, so that it survives pickling between processes.

A message reads *where: what is wrong (value seen); what to do*. An error that the user can fix only by changing the job
is a `ConfigurationError`: the trainer then exits with code 2, and the operator does not retry.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rljob_api.constants import ErrorCause


@dataclass(frozen=True)
class FailedWorker:
    """The worker that caused an error. If other workers failed as a consequence, this is the first one."""

    role: str
    rank: int
    pod: str | None = None
    node: str | None = None
    """Name of the Kubernetes node."""
    log_file: Path | None = None

    def __str__(self) -> str:
        return f"worker rank {self.rank} ({self.role}){self.location}"

    @property
    def location(self) -> str:
        """Pod and node as a suffix for a name, such as `, pod a, node b`; empty outside Kubernetes."""
        return (f", pod {self.pod}" if self.pod else "") + (f", node {self.node}" if self.node else "")


class TrainerError(Exception):
    """Base of all errors that the trainer raises on purpose."""

    worker: FailedWorker | None = None
    """Set by the controller if the error comes from a worker."""
    known_cause: ErrorCause | None = None
    """A cause for which `rljob explain` has special advice. Set by the class, or by the code that finds the cause."""


class ConfigurationError(TrainerError, ValueError):
    """The job can never work as written (exit code 2)."""


class DatasetError(ConfigurationError):
    """A dataset cannot be read, or one of its rows is unusable."""


class ChatTemplateError(ConfigurationError):
    """A model's chat template cannot be applied to a conversation; the message contains the template's own error."""


class RewardError(TrainerError):
    """The job's reward failed on a response, and the reward's `onError` is `Fail`."""


class EnvironmentMessageError(TrainerError, ValueError):
    """An environment returned something that cannot be used as messages of a conversation."""


class BatchNotFullError(ConfigurationError):
    """Dynamic sampling found too few groups to train on, and `onMaxRounds` is `Fail`. A retry would draw the same
    prompts, so this is a configuration error."""


class AlgorithmFunctionError(TrainerError):
    """The user's own advantage or loss function raised an error or returned an unusable result."""


class CollectiveFunctionError(AlgorithmFunctionError):
    """The user's function failed inside a collective operation. The other ranks still wait in this operation, so the
    workers accept no further calls."""


class DataError(TrainerError, ValueError):
    """Columns of a batch do not fit together; a bug in the trainer or in a worker's method."""


class DispatchError(TrainerError, TypeError):
    """A worker method is registered incorrectly, or called in a way that its registration does not allow."""


class ResourceError(TrainerError):
    """Devices, memory, disk, ports or the network are unavailable (exit code 75: a retry on other nodes may work)."""


class DeviceMemoryError(ResourceError):
    """A device, such as a GPU, has too little memory."""

    known_cause = ErrorCause.DEVICE_MEMORY


class HostMemoryError(ResourceError):
    """A machine or container has too little memory."""

    known_cause = ErrorCause.HOST_MEMORY


class WorkerError(TrainerError):
    """A worker raised an exception that is not a TrainerError; the message contains its traceback."""


class WorkerDiedError(TrainerError):
    """A worker process died (exit code 75); the message names its rank and the cause."""


class DataLostError(WorkerDiedError):
    """Data in the object store is lost because the process or node that stored it died."""


class CallTimeoutError(TrainerError, TimeoutError):
    """A call of a worker method did not finish within the caller's timeout."""


class NonFiniteUpdateError(TrainerError):
    """Several updates in a row had gradients that were not finite."""


MAX_DESCRIPTION = 500
"""Maximum length of a library's error in a message, in characters."""


def described(error: Exception) -> str:
    """Formats a library's error in one line: `UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff ...`.

    The type is omitted for common types whose message is enough. The cause is appended if the message does not contain
    it: `datasets` raises "An error occurred while generating the dataset" from the error that names the problem."""
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
"""Error numbers of a storage problem. First line: the disk or file system fails (ENOTCONN: a FUSE server has died).
Second line: the disk or quota is full. Third line: the process or machine cannot open another file, or has no memory
left."""
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")


def storage_failure(error: BaseException | None) -> str | None:
    """Returns the problem in one line if the error, or an error that led to it, is a storage problem (STORAGE_ERRNOS),
    else None. After a storage problem the caller should raise ResourceError, because the content of the file is not at
    fault.

    Libraries written in Rust (tokenizers, safetensors) raise errors without `errno`; the number is in the message:
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
    """If an error of the block is a storage problem, converts it into a ResourceError that starts with `where`. Other
    errors pass unchanged, and so does any TrainerError."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if failure := storage_failure(error):
            raise ResourceError(
                f"{where}: the disk or file system failed ({failure}); check the disk, the mount and the free space"
            ) from error
        raise


@contextmanager
def about_field(field: str, policy_field: str) -> Iterator[None]:
    """In messages of configuration errors of the block, replaces `policy_field` by `field`: a check that is used for
    several models writes the policy's field into its message, whichever model it checks."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace(policy_field, field)) from error

"""The only module that reads or writes the process environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_api.constants import (
    ENV_ATTEMPT,
    ENV_CACHE,
    ENV_CHECKPOINT_FOLDER,
    ENV_DEVICE,
    ENV_GRACE_SECONDS,
    ENV_JOB_FOLDER,
    ENV_NODE_NAME,
    ENV_POD_NAME,
    ENV_POOL_NODES,
    ENV_RUN_FOLDER,
    ENV_RUN_STATE_FILE,
    ENV_SHIPPED_CODE,
    ENV_SPEC,
    ENV_START_NUMBER,
    RAY_USAGE_REPORTS,
    RAY_WORKER_NICENESS,
    RUN_STATE_FILE_NAME,
)
from rljob_trainer.errors import ConfigurationError

NUM_THREADS_VARIABLE = "OMP_NUM_THREADS"
SPIN_COUNT_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "100000"
"""How many rounds a thread spins before it sleeps while it waits for the next parallel loop: this number takes one to a
few milliseconds. A step of a small model has thousands of such loops, several per millisecond. Waking threads for each
loop (OMP_WAIT_POLICY=PASSIVE) made a step 25 % longer; never sleeping (ACTIVE) takes the cores away from all other
processes."""
COMPILER_CACHE_VARIABLES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables that set the folders of compiler caches, with the name of each folder in `compiled/` of rljob's cache
folder."""
PYTHON_PATH = "PYTHONPATH"
NSYS_SESSION_VARIABLE = "RLJOB_NSYS_SESSION"
"""The session's name in a worker process that was started under nsys."""
HUB_CACHE_VARIABLE = "HF_HUB_CACHE"
"""Sets the folder in which the Hugging Face library stores downloads."""
MAX_NUMBER = 2_147_483_647
"""Largest attempt number and start number: int32, as in the API."""
DEFAULT_GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Settings:
    """Settings of this run from environment variables; everything else is in the job."""

    spec_text: str
    """The job as JSON, see `rljob_api.contract_documents.load_job`."""
    run_folder: Path
    checkpoint_folder: Path
    run_state_file: Path
    job_folder: Path
    """Base of relative dataset paths."""
    attempt: int
    pool_nodes: Mapping[str, int]
    """Number of nodes by pool name, such as `{"train": 2}`, if this attempt runs on fewer nodes than the job specifies;
    else empty."""
    start_number: int
    """Grows with every start on the same checkpoint folder; a later start fences the earlier ones."""
    device_type: str | None
    """`cpu` or `cuda`; None: detected automatically."""
    ray_address: str | None
    """Address of an existing Ray cluster; None: a local one is started."""
    shipped_code: Path | None
    """A folder that is copied to the workers of a remote cluster as their working directory."""
    cache_folder: Path
    """See `cache_folder()`."""
    num_threads: int | None
    """CPU threads per worker process; None: each takes an equal share of its node's usable cores."""
    is_ray_job: bool
    """Whether the trainer was started through Ray's Jobs API. Ray sets OMP_NUM_THREADS to 1 for such a trainer if the
    variable is unset."""
    environment: Mapping[str, str]
    """All environment variables. Scoring processes get some of them."""


@dataclass(frozen=True)
class PodSettings:
    """Settings of the small programs that run next to the trainer in a pod (see `pod`)."""

    grace_seconds: float
    """How long a pod's stop hook may wait for the trainer to save and exit."""
    run_folder: Path | None
    ray_token: str | None
    attempt: int | None = None


def read_settings() -> Settings:
    """Reads the environment variables. Raises ConfigurationError if one is missing or invalid."""
    spec_text = os.environ.get(ENV_SPEC)
    if not spec_text:
        raise ConfigurationError(
            f"{ENV_SPEC}: not set; start the trainer with `rljob run`, or create an RLJob on a cluster"
        )
    run_folder = Path(os.environ.get(ENV_RUN_FOLDER, "run")).absolute()
    attempt = _number(ENV_ATTEMPT, 1)
    device_type = os.environ.get(ENV_DEVICE)
    if device_type not in (None, "cpu", "cuda"):
        raise ConfigurationError(f"{ENV_DEVICE}: must be cpu or cuda (seen: {device_type!r})")
    return Settings(
        spec_text=spec_text,
        run_folder=run_folder,
        checkpoint_folder=Path(os.environ.get(ENV_CHECKPOINT_FOLDER, str(run_folder / "checkpoints"))).absolute(),
        run_state_file=Path(os.environ.get(ENV_RUN_STATE_FILE, str(run_folder / RUN_STATE_FILE_NAME))).absolute(),
        job_folder=Path(os.environ.get(ENV_JOB_FOLDER, ".")).absolute(),
        attempt=attempt,
        pool_nodes=_pool_nodes(),
        start_number=_number(ENV_START_NUMBER, attempt),
        device_type=device_type,
        ray_address=os.environ.get("RAY_ADDRESS"),
        shipped_code=Path(os.environ[ENV_SHIPPED_CODE]) if ENV_SHIPPED_CODE in os.environ else None,
        cache_folder=cache_folder(),
        num_threads=_number(NUM_THREADS_VARIABLE, 0) or None,
        is_ray_job="RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ,
        environment=dict(os.environ),
    )


def _pool_nodes() -> Mapping[str, int]:
    text = os.environ.get(ENV_POOL_NODES, "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(type(nodes) is int and nodes > 0 for nodes in found.values()):
        raise ConfigurationError(
            f"{ENV_POOL_NODES}: must be a JSON object of pool names and node counts, such as "
            f'{{"train": 2}} (seen: {text!r})'
        )
    return found


def pod_and_node() -> tuple[str | None, str | None]:
    """Returns the names of this process's Kubernetes pod and node; None outside Kubernetes."""
    return os.environ.get(ENV_POD_NAME) or None, os.environ.get(ENV_NODE_NAME) or None


def run_folder_or_none() -> str | None:
    """Returns the value of the variable for the run folder, without checks; None if it is not set."""
    return os.environ.get(ENV_RUN_FOLDER) or None


def variable_or_none(name: str) -> str | None:
    """Returns the value of an environment variable that the job names, such as the key of a service; None if it is not
    set."""
    return os.environ.get(name) or None


def nsys_session() -> str | None:
    """Returns the name of this process's nsys session; None if the process was not started under nsys."""
    return os.environ.get(NSYS_SESSION_VARIABLE) or None


def run_state_target() -> tuple[Path, int] | None:
    """Returns the path of the run state file and the attempt; None if the path is not set. The caller uses both to
    report invalid variables, so an invalid attempt counts as 1."""
    path, attempt = os.environ.get(ENV_RUN_STATE_FILE), os.environ.get(ENV_ATTEMPT, "1")
    return (Path(path).absolute(), int(attempt) if _is_number(attempt) else 1) if path else None


def read_pod_settings() -> PodSettings:
    """Reads the environment. Never raises, because a pod's stop hook must not fail."""
    grace, run_folder = os.environ.get(ENV_GRACE_SECONDS, ""), os.environ.get(ENV_RUN_FOLDER)
    attempt = os.environ.get(ENV_ATTEMPT, "")
    return PodSettings(
        grace_seconds=float(grace) if _is_number(grace) else DEFAULT_GRACE_SECONDS,
        run_folder=Path(run_folder) if run_folder else None,
        ray_token=os.environ.get("RAY_AUTH_TOKEN"),
        attempt=int(attempt) if _is_number(attempt) else None,
    )


def cache_folder() -> Path:
    """Returns the folder with files that later runs on this machine use again: models and compiled code."""
    return Path(os.path.expanduser(_cache()))


def cpp_compiler() -> str:
    """Returns the C++ compiler that torch uses for CPU code."""
    return os.environ.get("CXX", "g++")


def variables_named(names: Iterable[str]) -> dict[str, str]:
    """Returns the variables among `names` that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def worker_environment(device_type: str, num_threads: int | None, *, compiles: bool = False) -> dict[str, str]:
    """Returns the variables that a worker process needs before it imports torch or vLLM. `compiles`: whether vLLM
    compiles the model."""
    threads = "" if num_threads is None else str(num_threads)
    variables = {
        NUM_THREADS_VARIABLE: threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # Large pages for large tensors on the host: writing to new memory takes half the time.
        "THP_MEM_ALLOC_ENABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        PYTHON_PATH: os.environ.get(PYTHON_PATH, ""),
        HUB_CACHE_VARIABLE: os.environ.get(HUB_CACHE_VARIABLE, ""),
    }
    if device_type == "cpu":
        variables |= {
            # vLLM's binding of threads to cores assumes that no other process uses the machine.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            SPIN_COUNT_VARIABLE: os.environ.get(SPIN_COUNT_VARIABLE, SPIN_COUNT),
        }
        if compiles:
            # Symptom: `Compiling model again due to a load failure` (vllm-cpu 0.32.0): on CPUs vLLM cannot load what
            # its own cache has stored. torch's cache keeps the compiled code anyway.
            variables["VLLM_USE_AOT_COMPILE"] = "0"
        else:
            # vLLM decorates small sampling functions with torch.compile even in eager mode. This would take 20 s at the
            # first call, and it would need a C++ compiler, which the machine may not have.
            variables["TORCHDYNAMO_DISABLE"] = "1"
    if compiles:
        variables |= {
            name: os.environ.get(name, f"{_cache()}/compiled/{folder}")
            for name, folder in COMPILER_CACHE_VARIABLES.items()
        }
        variables["CXX"] = os.environ.get("CXX", "")
    return {name: value for name, value in variables.items() if value}


def set_environment(variables: Mapping[str, str]) -> None:
    """Sets these variables in this process. Call this before importing the libraries that read them. The PYTHONPATH
    entries that the process already has stay and come first, because Ray puts the copy of the job's folder there."""
    present = _entries(os.environ.get(PYTHON_PATH, ""))
    added = [entry for entry in _entries(variables.get(PYTHON_PATH, "")) if entry not in present]
    # `~` is expanded here, because the home folder may differ between machines.
    variables = {
        name: os.path.expanduser(value) if name in COMPILER_CACHE_VARIABLES else value
        for name, value in variables.items()
    }
    python_path = os.pathsep.join([*present, *added])
    os.environ.update({**variables, **({PYTHON_PATH: python_path} if python_path else {})})
    index = max((sys.path.index(entry) for entry in present if entry in sys.path), default=0) + 1
    sys.path[index:index] = [entry for entry in added if entry not in sys.path]


def set_variable(name: str, value: str | None) -> None:
    """Sets a variable in this process; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def set_driver_environment() -> None:
    """Sets variables in the controller's process that libraries read when they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault(*RAY_USAGE_REPORTS)
    os.environ.setdefault(*RAY_WORKER_NICENESS)
    if ENV_CACHE in os.environ and "HF_HOME" not in os.environ:
        # A cache folder set by the user also holds downloads: in a pod it is the volume with enough space.
        os.environ.setdefault(HUB_CACHE_VARIABLE, str(cache_folder() / "hub"))


def export_rank(rank: int, world_size: int, local_rank: int, master_address: str, master_port: int) -> None:
    """Sets the variables that torch.distributed and vLLM's external launcher read."""
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(local_rank),
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
        }
    )


def _entries(path: str) -> list[str]:
    return [entry for entry in path.split(os.pathsep) if entry]


def _number(name: str, default: int) -> int:
    """Reads an integer from 1 to MAX_NUMBER; `default` if the variable is unset or empty. Raises ConfigurationError for
    any other value."""
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    if not _is_number(text):
        raise ConfigurationError(f"{name}: must be an integer from 1 to {MAX_NUMBER} (seen: {text!r})")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= MAX_NUMBER


def _cache() -> str:
    """Returns the cache folder as a string that may begin with `~`."""
    return os.environ.get(ENV_CACHE) or f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/rljob"

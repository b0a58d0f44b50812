"""The environment of the scoring processes, without the secrets of the cluster and the trainer."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rljob_api.constants import ENV_RUN_FOLDER

INHERITED_VARIABLES = (
    *("PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "PYTHONPATH", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", ENV_RUN_FOLDER),
)


def scorer_environment(
    environment: Mapping[str, str], job_variables: Collection[str], import_folders: Sequence[Path] = ()
) -> dict[str, str]:
    """The environment of the scoring processes.

    Only `INHERITED_VARIABLES` and `job_variables` (the names in the job's `spec.env`) are passed on, so that secrets of
    the cluster and the trainer (Ray token, logger and hub credentials) do not reach code that handles a model's output.
    A key that a reward needs must be in `spec.env`. `import_folders` are prepended to PYTHONPATH. Numerical libraries
    use one thread, because there are many processes.
    """
    kept = {name: environment[name] for name in (*INHERITED_VARIABLES, *job_variables) if name in environment}
    python_path = [*map(str, import_folders), *filter(None, [kept.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1"} | kept | {"PYTHONPATH": os.pathsep.join(python_path)}

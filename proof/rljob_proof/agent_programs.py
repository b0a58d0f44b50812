"""Runs programs with agents of other packages. Imports nothing that is slow, because each process of an agent imports
it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Protocol


class Session(Protocol):
    """What the agent's function gets."""

    base_url: str
    api_key: str
    model: str
    seed: int


def reward_of_program(session: Session, python: str, program: Path, arguments: list[str], episodes: str) -> float:
    """Runs a program that lets an agent make one rollout, and returns the `reward` in the JSON that it prints.

    The program gets the endpoint, the model and `arguments`; the key is in its variable SESSION_KEY. `python`: of an
    environment with the packages. `episodes`: a file to which the printed JSON is appended. Raises RuntimeError if the
    program fails."""
    # This PYTHONPATH is for another environment. Programs may need others of their environment, such as uv.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{Path(python).parent}:{environment['PATH']}", "SESSION_KEY": session.api_key}
    command = [python, str(program), session.base_url, session.model, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{program.name} failed: {ended.stderr[-2000:]}")
    with open(episodes, "a", encoding="utf-8") as file:
        file.write(ended.stdout)
    return float(json.loads(ended.stdout)["reward"])

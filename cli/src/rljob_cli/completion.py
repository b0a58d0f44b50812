"""Completes names of jobs in a shell, from the cluster."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import typer

_MAX_SECONDS = 0.8
"""Time limit for the names, so that a shell responds within about a second."""


def complete_job_names(context: typer.Context, incomplete: str) -> list[str]:
    """The names of jobs that begin with the typed text, in the namespace of the typed options. Nothing if the cluster
    cannot be used or does not respond at once."""
    found: list[str] = []
    given = context.params

    def read() -> None:
        from rljob.cluster import ClusterOptions, connect

        kubeconfig = given.get("kubeconfig")
        options = ClusterOptions(
            _text(given.get("context")),
            _text(given.get("namespace")),
            Path(str(kubeconfig)) if kubeconfig is not None else None,
        )
        # Whatever goes wrong: in the middle of a command line nobody reads a message.
        with suppress(Exception):
            found.extend(connect(options).job_names())

    import logging

    logging.disable(logging.CRITICAL)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_MAX_SECONDS)
    logging.disable(logging.NOTSET)
    typed = given.get("names") or ()
    others = set(map(str, typed)) if isinstance(typed, list | tuple) else set()
    return [name for name in list(found) if name.startswith(incomplete) and name not in others]


def _text(value: object) -> str | None:
    return None if value is None else str(value)

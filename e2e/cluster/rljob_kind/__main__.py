"""`python -m rljob_kind`: brings the cluster of the end-to-end tests up and down, and its parts one by one."""

from __future__ import annotations

import argparse
import sys

from rljob_kind.errors import KindError
from rljob_kind.host import ensure_host
from rljob_kind.images import ensure_base_image
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder


def main() -> int:
    """Runs one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rljob_kind", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("host", help="make Docker work on this machine")
    commands.add_parser("base-image", help="make debian:bookworm-slim available")
    arguments = parser.parse_args()
    progress = Progress(cluster_folder() / "timings" / f"{arguments.command}.json")
    try:
        ensure_host(progress)
        if arguments.command == "base-image":
            ensure_base_image(progress)
    except KindError as error:
        progress.say(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

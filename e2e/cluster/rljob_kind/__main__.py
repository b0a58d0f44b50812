"""`python -m rljob_kind`: creates and deletes the cluster of the end-to-end tests, as a whole or in parts."""

from __future__ import annotations

import argparse
import sys

from rljob_kind.cluster import GPU_NODE, delete_cluster, ensure_tools, is_running
from rljob_kind.errors import KindError
from rljob_kind.host import ensure_host, stop_daemon
from rljob_kind.images import ensure_base_image
from rljob_kind.installation import ensure_own_images, install
from rljob_kind.kuberay import bring_up
from rljob_kind.loading import load_image
from rljob_kind.locking import cluster_lock
from rljob_kind.processes import run
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder, kubeconfig_file, program_folder
from rljob_testing.cluster.go_programs import BuildError


def main() -> int:
    """Runs one command and returns the exit code."""
    arguments = _parser().parse_args()
    progress = Progress(cluster_folder() / "timings" / f"{arguments.command}.json")
    try:
        _run_command(arguments, progress)
    except (KindError, BuildError) as error:
        progress.say(f"FAILED: {error}")
        return 1
    return 0


def _run_command(arguments: argparse.Namespace, progress: Progress) -> None:
    match arguments.command:
        case "host":
            ensure_host(progress)
        case "base-image":
            ensure_host(progress)
            ensure_base_image(progress)
        case "up" | "install":
            with cluster_lock(progress):
                bring_up(progress)
                if arguments.command == "install":
                    install(ensure_own_images(progress), progress)
            progress.say(
                "done; for a shell: eval $(PYTHONPATH=e2e/cluster:tests/support .venv/bin/python -m rljob_kind env)"
            )
        case "down":
            with cluster_lock(progress):
                ensure_host(progress)
                ensure_tools(progress)
                delete_cluster(progress)
                if arguments.docker:
                    stop_daemon()
        case "load":
            for image in arguments.image:
                load_image(image, arguments.node, progress)
        case "status":
            print(
                run(["kubectl", "get", "nodes,pods", "--all-namespaces", "--output=wide"]) if is_running() else "down"
            )
        case "env":
            print(f"export KUBECONFIG={kubeconfig_file()} PATH={program_folder()}:$PATH")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rljob_kind", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("host", help="make Docker work on this machine")
    commands.add_parser("base-image", help="make debian:bookworm-slim available")
    commands.add_parser("up", help="make the cluster and KubeRay run")
    commands.add_parser("install", help="the same, with our images and the operator's chart")
    down = commands.add_parser("down", help="remove the cluster; images and programs stay")
    down.add_argument("--docker", action="store_true", help="also stop the Docker daemon if this program started it")
    load = commands.add_parser("load", help="bring images of the Docker daemon onto a node")
    load.add_argument("image", nargs="+")
    load.add_argument("--node", default=GPU_NODE)
    commands.add_parser("status", help="what runs")
    commands.add_parser("env", help="shell commands that point kubectl and helm at the cluster")
    return parser


if __name__ == "__main__":
    sys.exit(main())

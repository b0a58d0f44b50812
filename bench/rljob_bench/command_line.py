"""Options of all benchmark programs, and the start of their peers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from rljob_bench.machine import installed_versions
from rljob_bench.peer_environment import PeerMissingError, peer_packages
from rljob_bench.peer_process import PeerProcess, peer_process
from rljob_bench.report import Report
from rljob_trainer.groups.ray_session import ray_session

DEFAULT = "verl"
NUMPY = "verl, numpy mode"
MODES: Mapping[str, Mapping[str, str]] = {DEFAULT: {}, NUMPY: {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}}
"""Ways in which verl serializes a batch, and the environment variables that select them."""
OUR_VERSIONS = ("ray", "torch", "numpy")


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    is_quick: bool
    with_peer: bool
    json_path: Path | None
    address: str | None
    """Address of an existing Ray cluster."""


def read_options(description: str) -> Options:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="little data and few rounds, only to check the program")
    parser.add_argument("--without-peer", action="store_true", help="do not install or run verl")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster on this machine (default: start one)")
    chosen = parser.parse_args()
    return Options(chosen.quick, not chosen.without_peer, chosen.json, chosen.ray)


@contextmanager
def measuring(
    options: Options, program: str, modes: tuple[str, ...], num_cpus: int = 0
) -> Iterator[tuple[dict[str, PeerProcess], Report]]:
    """Starts Ray with this number of logical CPUs (0: no Ray), a peer process per mode, each with its own connection,
    and a report whose head is printed here. If verl is missing there are no peers, and the head says so."""
    report = Report(program, installed_versions(OUR_VERSIONS))
    if options.is_quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    running: dict[str, PeerProcess] = {}
    with ExitStack() as stack:
        packages = _packages(options, report)
        if num_cpus:
            stack.enter_context(ray_session(options.address, num_cpus, 0))
        # Imported here because Ray's environment variables decide whether a client needs a token.
        if packages is not None:
            for number, mode in enumerate(modes):
                log_file = packages.with_name(f"{packages.name}-{number}.log")
                running[mode] = stack.enter_context(peer_process(packages, log_file, MODES[mode]))
            report.versions.update({name: str(each) for name, each in running[modes[0]].ask("versions").items()})
        for peer in running.values() if num_cpus else ():
            peer.ask("connect", address=ray.get_runtime_context().gcs_address)
            stack.callback(peer.ask, "disconnect")
        report.print_head()
        yield running, report


def _packages(options: Options, report: Report) -> Path | None:
    try:
        if options.with_peer:
            return peer_packages()
        report.notes.append("verl is not measured: --without-peer")
    except PeerMissingError as error:
        report.notes.append(f"verl is not measured: {error}")
    return None

"""Head pods that send whatever harms the operator most, beside one job that behaves well.

    PYTHONPATH=bench:tests/support python -m rljob_bench.hostile_heads [--quick] [--before CHECKOUT] [--only KIND]

It runs on a real API server, with the operator as a process of its own. Measured are the memory of the operator's
process, its CPU time, and the longest time between two polls of the job that behaves well.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from rljob_bench.operators import (
    CRDS,
    REPOSITORY,
    cpu_seconds,
    create_all,
    our_operator,
    peak_mib,
    read_yaml,
    resident_mib,
)
from rljob_bench.report import OURS, Bar, Measurement, Report
from rljob_testing.cluster.api_server import ApiServer, create_namespace, running_apiserver
from rljob_testing.cluster.kubectl import wait_for
from rljob_testing.operator import scripts
from rljob_testing.operator.kuberay_stand_in import install_ray_cluster_resource, kuberay_stand_in
from rljob_testing.operator.ray_dashboard_stand_in import RayDashboardStandIn, ray_dashboard_stand_in
from rljob_testing.operator.testbed import cluster_job

NUM_HEADS, SECONDS, START_SECONDS = 50, 120.0, 120.0
SAMPLE_SECONDS = 0.1
MAX_MIB, MAX_INTERVAL_SECONDS = 200.0, 6.0
GOOD = "good"
MIB = 2**20
RESPONSE_BYTES = 8 * MIB - 4096
"""Just below the limit of older operators."""
HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
NODES, GROUPS, JOB, FILE, STOP = "nodes", "placement_groups", "job", "file", "stop"
"""Requests, by the last part of their path; JOB is a request for a Ray job."""

Write = Callable[[BaseHTTPRequestHandler], None]


def sized(body: bytes, headers: bytes = HEADERS) -> Write:
    """Sends a body with its length."""
    head = headers + b"Content-Length: %d\r\n\r\n" % len(body)

    def write(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(head)
        request.wfile.write(body)

    return write


def listing(entries: bytes) -> bytes:
    """A response of the state API."""
    return b'{"result": true, "msg": "", "data": {"result": {"result": [' + entries + b"]}}}"


def repeated(entry: bytes, num_bytes: int = RESPONSE_BYTES) -> bytes:
    """As many equal entries as fit into one response."""
    return b",".join([entry] * ((num_bytes - 200) // (len(entry) + 1)))


def many_nodes() -> bytes:
    """10,000 different nodes without a GPU, in the form in which Ray lists them."""
    nodes = []
    for number in range(10_000):
        node = {
            "node_id": f"{number:056d}",
            "node_ip": "10.0.0.1",
            "is_head_node": number == 0,
            "state": "ALIVE",
            "node_name": "10.0.0.1",
            "resources_total": {f"node:10.0.{number}.{each}": 1.0 for each in range(10)} | {"CPU": 4.0},
            "labels": {f"label-{number}-{each}": "x" for each in range(8)},
            "start_time_ms": 1,
        }
        nodes.append(json.dumps(node))
    return listing(",".join(nodes)[: 7 * MIB].rpartition(",{")[0].encode())


def never(_: BaseHTTPRequestHandler) -> None:
    """Sends nothing."""
    time.sleep(60)


def drip(request: BaseHTTPRequestHandler) -> None:
    """Sends one byte in 0.2 seconds, without end."""
    request.wfile.write(HEADERS + b"Content-Length: 1000\r\n\r\n")
    for _ in range(300):
        request.wfile.write(b" ")
        time.sleep(0.2)


def reset(request: BaseHTTPRequestHandler) -> None:
    """Resets the connection within the response."""
    request.wfile.write(HEADERS + b"Content-Length: 1000\r\n\r\n{")
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def redirect(request: BaseHTTPRequestHandler) -> None:
    """Redirects to the same address."""
    request.wfile.write(f"HTTP/1.1 307 X\r\nLocation: {request.path}\r\nContent-Length: 0\r\n\r\n".encode())


def endless(data: bytes, head: bytes) -> Write:
    """Sends a block of data until the client closes the connection."""

    def write(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(head)
        while True:
            request.wfile.write(data)

    return write


def chunks(body: bytes) -> Write:
    """Sends the first MiB in chunks of one byte."""
    data = b"".join(b"1\r\n%c\r\n" % each for each in body[:MIB])

    def write(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(HEADERS + b"Transfer-Encoding: chunked\r\n\r\n")
        request.wfile.write(data)

    return write


def long_run_state(request: BaseHTTPRequestHandler) -> None:
    """A run state that is different each time and as long as possible."""
    environment = {"RLJOB_ATTEMPT": "1"}
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
    metrics = {f"{random.random()}-{number}": random.random() for number in range(1200)}
    state = scripts.run_state(environment, "Running", random.randrange(4), now, metrics=metrics)
    sized(json.dumps(state).encode()[: 64 * 1024])(request)


def kinds() -> Mapping[str, tuple[tuple[str, ...], Write]]:
    """The kinds of hostile heads: which requests they answer in this way, and how. They answer all others like Ray."""
    text = b"x" * RESPONSE_BYTES
    message = b'{"status": "RUNNING", "driver_node_id": "head-node", "message": "' + text[:-200] + b'"}'
    wide = '{"status": "RUNNING", "message": "\U0001f600'.encode() + text[:-200] + b'"}'
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    return {
        "listing of 10,000 nodes": ((NODES,), sized(many_nodes())),
        "listing of empty objects": ((NODES,), sized(listing(repeated(b"{}")))),
        "listing of empty objects without a length": (
            (NODES,),
            endless(b"{}," * 20_000, HEADERS + b"\r\n" + listing(b"").removesuffix(b"]}}}")),
        ),
        "short listing of empty objects": ((NODES,), sized(listing(repeated(b'{"a":[{}]}', 65536)))),
        "job of empty objects": (
            (JOB,),
            sized(b'{"status": "RUNNING", "a": [' + repeated(b'{"a":[{}]}', 262144) + b"]}"),
        ),
        "listing of groups": ((GROUPS,), sized(listing(repeated(b'{"a":[{}]}')))),
        "deep nesting": ((NODES,), sized(b"[" * RESPONSE_BYTES)),
        "huge numbers": ((NODES,), sized(listing(repeated(b"7" * 4200)))),
        "8 MiB of text for the job": ((JOB,), sized(message)),
        "8 MiB of wide text": ((JOB,), sized(wide)),
        "endless run state": ((FILE,), endless(b"x" * 65536, HEADERS + b"\r\n")),
        "run state of 8 MiB": ((FILE,), sized(text)),
        "run state that changes": ((FILE,), long_run_state),
        "slow drip": ((NODES,), drip),
        "slow drip for the job": ((JOB, FILE), drip),
        "1 MiB of headers": ((NODES,), sized(b"{}", HEADERS + b"X-Large: 123456789\r\n" * 50_000)),
        "one header of 1 MiB": ((NODES,), sized(b"{}", HEADERS + b"X-Large: " + b"x" * MIB + b"\r\n")),
        "endless headers": ((NODES,), endless(b"X-Large: 123456789\r\n" * 1000, HEADERS)),
        "endless interim responses": ((NODES,), endless(b"HTTP/1.1 100 C\r\n\r\n" * 10_000, b"")),
        "endless other responses": ((NODES,), endless(ok * 10_000, b"")),
        "chunks of one byte": ((NODES,), chunks(text)),
        "compressed": ((NODES,), sized(gzip.compress(text), HEADERS + b"Content-Encoding: gzip\r\n")),
        "no response": ((NODES,), never),
        "no response for the job": ((JOB, FILE, STOP), never),
        "reset": ((NODES,), reset),
        "redirects": ((NODES,), redirect),
    }


def asked_for(request: BaseHTTPRequestHandler) -> str:
    """What a request asks for."""
    path = request.path.partition("?")[0].split("/")
    return JOB if path[-2] == "jobs" else path[-1]


def answering(requests: tuple[str, ...], write: Write) -> Callable[[BaseHTTPRequestHandler], bool]:
    """Answers some requests, and closes the connection then."""

    def answer(request: BaseHTTPRequestHandler) -> bool:
        if request.command == "POST" or asked_for(request) not in requests:
            return False
        request.close_connection = True
        with suppress(OSError):
            write(request)
        return True

    return answer


class PollTimes:
    """When a dashboard was asked."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def note(self, _: BaseHTTPRequestHandler) -> bool:
        """Notes a request; the stand-in answers it."""
        self._times.append(time.monotonic())
        return False

    def longest_interval(self, begin: float, end: float) -> tuple[float, float]:
        """The longest time without a request between two moments, in seconds, and when it began, in seconds after
        `begin`."""
        times = [begin, *(each for each in self._times if begin < each < end), end]
        return max((late - early, early - begin) for early, late in itertools.pairwise(times))


def trains(age: float, environment: dict[str, object]) -> scripts.RunMoment:
    """A step every five seconds, without end."""
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return scripts.RunMoment(run_state=scripts.run_state(environment, "Running", int(age / 5), now))


def measured(
    checkout: Path, hostile: Mapping[str, tuple[tuple[str, ...], Write]], num_heads: int, seconds: float
) -> tuple[float, float, float, float, float]:
    """The memory of the operator before the hostile heads exist and its peak in MiB, the share of a core that it uses,
    the longest time between two requests to the job that behaves well in seconds, and how long after the first
    poll of all hostile heads this time began. The job that behaves well has a namespace of its own."""
    with running_apiserver() as server, tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        server.http.post(CRDS, json=read_yaml(checkout / "crds" / "rljobs.yaml")).raise_for_status()
        install_ray_cluster_resource(server.http)
        path = "/apis/rljob.dev/v1alpha1/rljobs"
        wait_for(lambda: server.http.get(path).status_code == 200, "RLJobs are served", START_SECONDS, 0.2)
        namespace, hostile_namespace = create_namespace(server), create_namespace(server)
        jobs, hostile_path = (
            f"/apis/rljob.dev/v1alpha1/namespaces/{each}/rljobs" for each in (namespace, hostile_namespace)
        )
        with (
            kuberay_stand_in(server),
            ray_dashboard_stand_in(server) as dashboards,
            our_operator(server, Path(folder), dashboards.url_template, checkout) as process_id,
        ):
            times = PollTimes()
            good = dashboards.cluster(namespace, f"{GOOD}-1")
            good.life, good.answers_itself = trains, times.note
            create_all(server, jobs, [cluster_job(GOOD)])
            wait_for(lambda: has_progress(server, jobs), "the good job runs", START_SECONDS, 0.2)
            time.sleep(5)
            idle = resident_mib(process_id)
            hostile_wires = hostile_jobs(dashboards, hostile_namespace, hostile, num_heads)
            create_all(server, hostile_path, hostile_wires)
            heads = [dashboards.cluster(hostile_namespace, f"hostile-{each}-1") for each in range(num_heads)]
            wait_for(lambda: all(head.num_requests for head in heads), "all heads are polled", START_SECONDS, 0.2)
            # Before, the API server and this process are busy with the start of so many jobs.
            begin, cpu = time.monotonic(), cpu_seconds(process_id)
            time.sleep(seconds)
            end = time.monotonic()
            share, peak = (cpu_seconds(process_id) - cpu) / (end - begin), peak_mib(process_id)
    return idle, peak, share, *times.longest_interval(begin, end)


def hostile_jobs(
    dashboards: RayDashboardStandIn, namespace: str, hostile: Mapping[str, tuple[tuple[str, ...], Write]], number: int
) -> list[dict[str, object]]:
    """Jobs whose heads are of all kinds in turn."""
    found = []
    choices = list(hostile.values())
    for each in range(number):
        head = dashboards.cluster(namespace, f"hostile-{each}-1")
        head.life, head.answers_itself = trains, answering(*choices[each % len(choices)])
        found.append(cluster_job(f"hostile-{each}"))
    return found


def has_progress(server: ApiServer, jobs: str) -> bool:
    """Whether the good job has reported a step."""
    status = server.http.get(f"{jobs}/{GOOD}").raise_for_status().json().get("status", {})
    return bool(status.get("progress", {}).get("step"))


def measurement(
    checkouts: Mapping[str, Path], num_heads: int = NUM_HEADS, seconds: float = SECONDS, only: str = ""
) -> Measurement:
    """The table, with a row for each checkout. `only`: part of the name of the kinds of heads to use."""
    hostile = {name: kind for name, kind in kinds().items() if only in name}
    rows = {name: measured(checkout, hostile, num_heads, seconds) for name, checkout in checkouts.items()}
    header = ("memory before, MiB", "peak memory, MiB", "cores", "longest time between polls, s", "began after, s")
    bars = (
        Bar(f"memory below {MAX_MIB:.0f} MiB", rows[OURS][1], MAX_MIB),
        Bar(f"the good job is polled every {MAX_INTERVAL_SECONDS:g} s", rows[OURS][3], MAX_INTERVAL_SECONDS),
    )
    kind = only or f"all {len(hostile)} kinds"
    return Measurement(f"One job beside {num_heads} hostile heads ({kind}), {seconds:.0f} s", header, rows, bars)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few heads and some seconds, only to check the program")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="also measure this checkout's operator")
    parser.add_argument("--only", default="", metavar="KIND", help="only heads whose kind has this text in its name")
    parser.add_argument("--heads", type=int, default=NUM_HEADS, help="number of hostile heads")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration of each measurement")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    options = parser.parse_args()
    num_heads, seconds = (23, 20.0) if options.quick else (options.heads, options.seconds)
    report = Report("rljob_bench.hostile_heads", {})
    report.print_head()
    checkouts = {OURS: REPOSITORY} | ({"before": options.before.resolve()} if options.before else {})
    report.add(measurement(checkouts, num_heads, seconds, options.only))
    report.write(options.json)


if __name__ == "__main__":
    main()

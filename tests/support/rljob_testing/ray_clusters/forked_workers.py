"""Ray workers that are forked from a process with torch and transformers loaded, so that not every worker loads them.

A Ray node starts a worker as `python PATH ...`. On a node that this program starts, PATH is this file. It passes its
arguments and its output to the process with the libraries, which forks the worker, and then waits for the worker to
end. This file imports almost nothing, because it runs for every worker.

    python forked_workers.py start --head ...     `ray start`, and the process that forks workers

Environment variables that a library reads at its import have the values of this program, not of the worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

NAME_VARIABLE = "RLJOB_TEST_FORKED_WORKERS"
"""Environment variable with the name of an abstract Unix socket."""
READY = "ready to fork workers"
LIBRARIES = ("rljob_trainer.workers.factories", "transformers.models.qwen2.modeling_qwen2")
"""Without Ray, which at its import reads which job its process belongs to."""


def request_forked_worker() -> None:
    """Requests a forked copy of this worker process, and ends when it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{os.environ[NAME_VARIABLE]}")
        request = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [1, 2])
        connection.sendall(request)
        worker = int(connection.recv(32))
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(worker, number))
        # The socket is closed when the worker ends.
        connection.recv(1)


def serve(name: str) -> None:
    """Forks workers until the process that started this one ends."""
    import gc
    import importlib

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(64)
    gc.disable()
    for library in LIBRARIES:
        importlib.import_module(library)
    # Otherwise each garbage collection of a worker would search, and copy, all that was loaded here.
    gc.freeze()
    print(READY, flush=True)
    # The kernel reaps ended workers itself.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(1.0)
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(10.0)
        size, outputs, _, _ = socket.recv_fds(connection, 4, 2)
        arguments, environment, folder = json.loads(_received(connection, int.from_bytes(size, "big")))
        if (worker := os.fork()) == 0:
            listener.close()
            _become_worker(outputs, arguments, environment, folder)
        connection.sendall(str(worker).encode())
        connection.close()
        for output in outputs:
            os.close(output)


def _become_worker(outputs: list[int], arguments: list[str], environment: dict[str, str], folder: str) -> None:
    import gc
    import importlib.util
    import runpy

    assert "ray" not in sys.modules
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for output, number in zip(outputs, (1, 2), strict=True):
        os.dup2(output, number)
        os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    sys.argv = arguments
    found = importlib.util.find_spec("ray")
    assert found is not None
    [folder] = found.submodule_search_locations or []
    try:
        runpy.run_path(f"{folder}/_private/workers/default_worker.py", run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes > 0:
        parts.append(connection.recv(num_bytes))
        num_bytes -= len(parts[-1])
    return b"".join(parts)


def start_node(arguments: list[str]) -> None:
    """Runs `ray start` with this file as the worker program."""
    name = f"rljob-forked-workers-{os.getpid()}-{time.monotonic_ns()}"
    if os.fork() == 0:
        serve(name)
        os._exit(0)
    import ray.scripts.scripts
    from ray._private.parameter import RayParams

    os.environ[NAME_VARIABLE] = name
    of_ray = RayParams.__init__

    def ours(self: RayParams, *more: object, **named: object) -> None:
        # Ray's client protocol is not needed either.
        of_ray(self, *more, **{**named, "worker_path": __file__, "ray_client_server_port": None})

    RayParams.__init__ = ours
    sys.argv = ["ray", *arguments]
    ray.scripts.scripts.main()


if __name__ == "__main__":
    if NAME_VARIABLE in os.environ:
        request_forked_worker()
    else:
        start_node(sys.argv[1:])

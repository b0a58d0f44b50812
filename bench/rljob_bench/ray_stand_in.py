"""Stands in for KubeRay, kubelets and the Ray dashboards of very many clusters, as a process of its own.

    python -m rljob_bench.ray_stand_in PORT < connection.json

It creates the pods of each RayCluster and makes them ready, once. Its trainers do a step every `STEP_SECONDS`, without
end; those of jobs whose name begins with `short` complete after `SHORT_SECONDS`. It asks the API server for nothing but
one watch, so that its work hardly slows down what is measured. `rljob_testing.operator.kuberay_stand_in` can do more,
but looks at all objects after every change.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from rljob_testing.operator import scripts
from rljob_testing.operator.kuberay_stand_in import pod_manifest, pod_status, wanted_pods

STEP_SECONDS = 5.0
SHORT, SHORT_SECONDS = "short", 30.0
NUM_IN_FLIGHT = 16
CLUSTERS = "/apis/ray.io/v1/rayclusters"
MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}
LONGEST_LINE = 2**22
HEAD = "head-node"


class StandIn:
    """All clusters and their dashboards. `http`: a client for the API server."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._clusters: dict[tuple[str, str], dict[str, Any]] = {}
        self._runs: dict[tuple[str, str], dict[str, tuple[float, dict[str, object]]]] = {}
        """For each cluster, by submission id: start time and environment."""
        self._in_flight = asyncio.Semaphore(NUM_IN_FLIGHT)
        self._tasks: set[asyncio.Task[None]] = set()

    async def follow_clusters(self) -> None:
        """Watches RayClusters without end."""
        async with self._http.get(CLUSTERS) as answer:
            listed = await answer.json()
        for each in listed["items"]:
            self._on_event("ADDED", each)
        query = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": "7200"}
        async with self._http.get(CLUSTERS, params=query) as answer:
            async for line in answer.content:
                event = json.loads(line)
                self._on_event(event["type"], event["object"])
        raise RuntimeError("the watch of RayClusters ended")

    def _on_event(self, kind: str, cluster: dict[str, Any]) -> None:
        key = cluster["metadata"]["namespace"], cluster["metadata"]["name"]
        if kind == "DELETED":
            self._clusters.pop(key, None)
            self._runs.pop(key, None)
            self._start(self._delete_pods(*key))
        elif key not in self._clusters:
            self._clusters[key] = cluster
            self._start(self._create_pods(cluster))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _create_pods(self, cluster: dict[str, Any]) -> None:
        namespace, name = cluster["metadata"]["namespace"], cluster["metadata"]["name"]
        path = f"/api/v1/namespaces/{namespace}/pods"
        async with self._in_flight:
            for group, number, template in wanted_pods({"kind": "RayCluster", **cluster}):
                pod = pod_manifest(cluster, f"{name}-{group}-{number}", group, template)
                await self._send("POST", path, pod)
                status = pod_status(pod, scripts.READY)
                await self._send("PATCH", f"{path}/{name}-{group}-{number}/status", {"status": status})
            now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            conditions = [
                {"type": kind, "status": "True", "reason": "Stands", "message": "", "lastTransitionTime": now}
                for kind in ("HeadPodReady", "RayClusterProvisioned")
            ]
            path = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{name}/status"
            await self._send("PATCH", path, {"status": {"state": "ready", "conditions": conditions}})

    async def _delete_pods(self, namespace: str, name: str) -> None:
        query = f"?labelSelector=ray.io/cluster={name}&gracePeriodSeconds=0"
        async with self._in_flight:
            await self._send("DELETE", f"/api/v1/namespaces/{namespace}/pods{query}", None)

    async def _send(self, method: str, path: str, body: object) -> None:
        headers = MERGE_PATCH if method == "PATCH" else {}
        async with self._http.request(method, path, json=body, headers=headers) as answer:
            if answer.status >= 400:
                print(method, path, answer.status, (await answer.text())[:500], file=sys.stderr, flush=True)

    async def answer(self, request: web.Request) -> web.Response:
        """Responds to one request to a dashboard. Any token is accepted."""
        key = request.match_info["namespace"], request.match_info["cluster"]
        if "Authorization" not in request.headers:
            return web.Response(status=401, text="Unauthorized: Missing authentication token")
        runs = self._runs.setdefault(key, {})
        match request.match_info["rest"].split("/"):
            case ["api", "v0", "nodes"]:
                return _listing(self._nodes(key))
            case ["api", "v0", "placement_groups"]:
                return _listing([])
            case ["api", "v0", "logs", "file"]:
                return _run_state_file(key[1], runs, request.query["filename"])
            case ["api", "jobs", ""] if request.method == "POST":
                body = await request.json()
                job = body["submission_id"]
                runs[job] = time.monotonic(), body["runtime_env"]["env_vars"]
                return web.json_response({"job_id": job, "submission_id": job})
            case ["api", "jobs", job] if job in runs:
                moment = _moment(key[1], *runs[job])
                return web.json_response(
                    {
                        "type": "SUBMISSION",
                        "submission_id": job,
                        "status": moment.status,
                        "message": moment.message,
                        "driver_exit_code": moment.exit_code,
                        "driver_node_id": HEAD,
                    }
                )
        return web.Response(status=404, text="404: Not Found")

    def _nodes(self, key: tuple[str, str]) -> list[dict[str, object]]:
        found = [_node(HEAD, True, 0)]
        for group in self._clusters.get(key, {}).get("spec", {}).get("workerGroupSpecs", []):
            num_gpus = int(group["rayStartParams"]["num-gpus"])
            found += [_node(f"{group['groupName']}-{number}", False, num_gpus) for number in range(group["replicas"])]
        return found


def _moment(cluster: str, started: float, environment: dict[str, object]) -> scripts.RunMoment:
    age = time.monotonic() - started
    step = 1 + int(age / STEP_SECONDS)
    ends = cluster.startswith(SHORT) and age > SHORT_SECONDS
    now = f"{datetime.fromtimestamp(time.time() - age % STEP_SECONDS, UTC):%Y-%m-%dT%H:%M:%SZ}"
    progress = {"step": step, "totalSteps": 1000, "rewardMean": 0.5, "tokensPerSecond": 100.0, "etaSeconds": 1000}
    phase, more = ("Complete", {"exportUri": "file:///rljob/storage/run/export"}) if ends else ("Running", {})
    state = scripts.run_state(environment, phase, step, now, progress=progress | {"updatedAt": now}, **more)
    if ends:
        return scripts.RunMoment("SUCCEEDED", "Job finished successfully.", exit_code=0, run_state=state)
    return scripts.RunMoment(run_state=state)


def _run_state_file(cluster: str, runs: dict[str, tuple[float, dict[str, object]]], name: str) -> web.Response:
    for job, run in runs.items():
        if name == f"rljob-run-state-{job}.json":
            return web.json_response(_moment(cluster, *run).run_state)
    return web.Response(status=500, text=f"A file is not found at: /tmp/ray/session/logs/{name}")


def _node(node_id: str, is_head: bool, num_gpus: int) -> dict[str, object]:
    resources = {"CPU": 4.0} | ({"GPU": float(num_gpus)} if num_gpus else {})
    return {"node_id": node_id, "is_head_node": is_head, "state": "ALIVE", "resources_total": resources}


def _listing(items: list[dict[str, object]]) -> web.Response:
    result = {"total": len(items), "result": items}
    return web.json_response({"result": True, "msg": "", "data": {"result": result}})


async def serve(port: int, server: dict[str, str]) -> None:
    """Works until the process is ended. `server`: URL, token and certificate file of the API server."""
    context = ssl.create_default_context(cafile=server["certificate"])
    headers = {"Authorization": f"Bearer {server['token']}"}
    async with aiohttp.ClientSession(
        server["url"],
        headers=headers,
        connector=aiohttp.TCPConnector(ssl=context),
        timeout=aiohttp.ClientTimeout(),
        read_bufsize=LONGEST_LINE,
        trust_env=False,
    ) as http:
        stand_in = StandIn(http)
        application = web.Application(client_max_size=LONGEST_LINE)
        application.router.add_route("*", "/{namespace}/{cluster}/{rest:.*}", stand_in.answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await stand_in.follow_clusters()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), json.load(sys.stdin)))

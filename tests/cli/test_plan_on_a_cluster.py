"""`rljob plan --from-cluster` reads GPUs from the nodes of a real API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rljob_api.job_file import load_job_file
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]
AddNode = Callable[[str, str, str | None], None]

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: grpo}
spec:
  pools:
  - {name: main, nodes: 2, gpusPerNode: 8}
  training:
    steps: 100
    batchSize: 64
    model: {source: Qwen/Qwen3-4B, gradientCheckpointing: Always}
    dataset: {type: File, file: {path: rows.jsonl}}
    rewards: [{type: MathAnswer}]
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    """The job file."""
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return str(file)


@pytest.fixture
def add_node(apiserver: ApiServer) -> Iterator[AddNode]:
    """Adds a node with a number of GPUs and, if it is given, the label of their type. Removes the nodes in the end."""
    names: list[str] = []

    def add(name: str, gpus: str, product: str | None) -> None:
        labels = {} if product is None else {"nvidia.com/gpu.product": product}
        apiserver.http.post("/api/v1/nodes", json={"metadata": {"name": name, "labels": labels}}).raise_for_status()
        names.append(name)
        resources = {"cpu": "64", "nvidia.com/gpu": gpus}
        headers = {"Content-Type": "application/merge-patch+json"}
        status = {"capacity": resources, "allocatable": resources}
        apiserver.http.patch(
            f"/api/v1/nodes/{name}/status", headers=headers, json={"status": status}
        ).raise_for_status()

    yield add
    for name in names:
        apiserver.http.delete(f"/api/v1/nodes/{name}").raise_for_status()


@pytest.mark.usefixtures("job_cluster")
def test_gpus_are_counted_by_node_and_typed_by_label(rljob: Rljob, job: str, add_node: AddNode) -> None:
    add_node("gpu-a", "8", "NVIDIA-H100-80GB-HBM3")
    add_node("gpu-b", "8", "NVIDIA-H100-80GB-HBM3")
    add_node("gpu-c", "4", "NVIDIA-L4")
    code, output, errors = rljob("plan", job, "--from-cluster")
    assert (code, errors) == (0, "")
    assert output.startswith("grpo: 16 of 20 GPUs (nodes of context here: 2x8xH100,1x4xL4)\n")


@pytest.mark.usefixtures("job_cluster")
def test_a_written_job_selects_nodes_if_the_cluster_has_several_gpu_types(
    rljob: Rljob, job: str, add_node: AddNode, tmp_path: Path
) -> None:
    add_node("gpu-a", "8", "NVIDIA-H100-80GB-HBM3")
    add_node("gpu-b", "8", "NVIDIA-L4")
    target = tmp_path / "mapped.yaml"
    code, output, errors = rljob("plan", job, "--from-cluster", "--search", "--write", str(target))
    assert (code, errors) == (0, "")
    label = "nvidia.com/gpu.product"
    assert f'  - spec.pools[main].template.nodeSelector.{label}: unset -> "NVIDIA-H100-80GB-HBM3"\n' in output
    assert "several GPU types" not in output
    [pool] = load_job_file(target).spec.pools
    assert pool.template.node_selector == {label: "NVIDIA-H100-80GB-HBM3"}
    assert (pool.nodes, pool.gpus_per_node) == (1, 8)


@pytest.mark.usefixtures("job_cluster")
def test_nodes_without_a_label_need_the_gpu_option(rljob: Rljob, job: str, add_node: AddNode) -> None:
    add_node("gpu-a", "8", None)
    add_node("gpu-b", "8", None)
    code, _, errors = rljob("plan", job, "--from-cluster")
    assert (code, errors) == (2, Mentions("error: --from-cluster", "gpu-a", "nvidia.com/gpu.product", "--gpu"))
    assert rljob("plan", job, "--from-cluster", "--gpu", "H200")[1].startswith(
        "grpo: 16 GPUs (nodes of context here: 2x8xH200"
    )


@pytest.mark.usefixtures("job_cluster")
def test_a_cluster_without_gpus_is_an_error(rljob: Rljob, job: str) -> None:
    code, _, errors = rljob("plan", job, "--from-cluster")
    assert (code, errors) == (2, Mentions("error: --from-cluster", "nvidia.com/gpu", "--cluster", "4x8xH100"))


def test_without_permission_to_list_nodes_the_error_names_the_cluster_option(
    job_cluster: JobCluster, rljob: Rljob, job: str
) -> None:
    server, namespace = job_cluster.server, job_cluster.namespace
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    server.http.post(accounts, json={"metadata": {"name": "visitor"}}).raise_for_status()
    answer = server.http.post(f"{accounts}/visitor/token", json={"spec": {"expirationSeconds": 3600}})
    token = answer.raise_for_status().json()["status"]["token"]
    job_cluster.kubeconfig.write_text(server.kubeconfig(token=token, namespace=namespace))
    code, _, errors = rljob("plan", job, "--from-cluster")
    facts = ("error: context here", "nodes is forbidden: User", "ClusterRole", "--cluster 4x8xH100")
    assert (code, errors) == (2, Mentions(*facts))

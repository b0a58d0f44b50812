"""Clusters from text and from nodes of the API, and the GPU types of a job's pools on them."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.pools import Pool
from rljob_planner.clusters import (
    cluster_of_nodes,
    cluster_of_pools,
    cluster_of_text,
    cluster_text,
    gpus_of_pools,
)
from rljob_planner.errors import PlanError
from rljob_planner.gpus import NodeGroup, gpu_named

H100, H200, A100 = gpu_named("H100"), gpu_named("H200"), gpu_named("A100-80")
Node = dict[str, object]


def pool(name: str, nodes: int, gpus_per_node: int) -> Pool:
    return Pool(name=name, nodes=nodes, gpus_per_node=gpus_per_node)


def node(name: str, gpus: str | None, product: str | None = None, *, cordoned: bool = False) -> Node:
    labels = {} if product is None else {"nvidia.com/gpu.product": product}
    allocatable = {"cpu": "64"} | ({} if gpus is None else {"nvidia.com/gpu": gpus})
    spec = {"unschedulable": True} if cordoned else {}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {"allocatable": allocatable}}


def test_text_describes_groups_of_nodes() -> None:
    assert cluster_of_text("4x8xH100") == (NodeGroup(4, 8, H100),)
    assert cluster_of_text("2x8xH200, 4x8xa100-80") == (NodeGroup(2, 8, H200), NodeGroup(4, 8, A100))
    assert cluster_of_text("8xH100") == (NodeGroup(1, 8, H100),)
    assert cluster_of_text("1 x 4 x NVIDIA-H100-80GB-HBM3") == (NodeGroup(1, 4, H100),)


def test_cluster_text_can_be_read_again() -> None:
    text = "2x8xH200,4x8xA100-80"
    assert cluster_text(cluster_of_text(text)) == text


def test_a_missing_gpu_type_is_named() -> None:
    with pytest.raises(PlanError, match=r"^--cluster: must be nodes x .* \(seen '4x8'\); the GPU type is missing$"):
        cluster_of_text("4x8")


@pytest.mark.parametrize("text", ["H100", "4x8", "4*8*H100", "x8xH100", "4x-8xH100"])
def test_other_text_is_rejected(text: str) -> None:
    with pytest.raises(PlanError, match=r"^--cluster: must be nodes x GPUs per node x GPU type|unknown GPU type"):
        cluster_of_text(text)


@pytest.mark.parametrize("text", ["", "0x8xH100", "4x0xH100", ","])
def test_a_cluster_without_gpus_is_rejected(text: str) -> None:
    with pytest.raises(PlanError, match=r"^--cluster: the cluster has no GPU .*such as 4x8xH100"):
        cluster_of_text(text)


@pytest.mark.parametrize("text", ["1000000x8xH100", "1x999999999xH100", "90000x1xH100,90000x1xH200"])
def test_implausibly_many_gpus_are_rejected(text: str) -> None:
    with pytest.raises(PlanError, match=r"^--cluster: a cluster may have at most 100,000 GPUs"):
        cluster_of_text(text)
    with pytest.raises(PlanError, match=r"^--cluster: must be nodes x GPUs per node x GPU type"):
        cluster_of_text(f"{'9' * 5000}x{text}")


def test_nodes_with_equal_gpus_are_a_group() -> None:
    nodes = [
        node("a", "8", "NVIDIA-H100-80GB-HBM3"),
        node("b", "4", "NVIDIA-A100-SXM4-80GB"),
        node("c", "8", "NVIDIA-H100-80GB-HBM3"),
        node("d", None),
        node("e", "0"),
        node("f", "8", "NVIDIA-H100-80GB-HBM3", cordoned=True),
    ]
    assert cluster_of_nodes(nodes)[0] == (NodeGroup(2, 8, H100), NodeGroup(1, 4, A100))


@pytest.mark.parametrize("count", ["\u00b2", "\u0663", "9" * 5000, "-8", "8.0", ""])
def test_a_count_that_is_not_a_plain_number_counts_as_none(count: str) -> None:
    good = node("a", "8", "NVIDIA-H100-80GB-HBM3")
    assert cluster_of_nodes([good, node("b", count, "NVIDIA-H100-80GB-HBM3")])[0] == (NodeGroup(1, 8, H100),)


def test_shared_gpus_are_rejected_unless_their_type_is_given() -> None:
    nodes = [node("a", "8", "NVIDIA-H100-80GB-HBM3-SHARED")]
    with pytest.raises(PlanError, match=r"^--from-cluster: node a: unknown GPU type .*-SHARED"):
        cluster_of_nodes(nodes)
    assert cluster_of_nodes(nodes, default=H100)[0] == (NodeGroup(1, 8, H100),)


def test_nodes_without_a_known_label_have_the_given_type() -> None:
    nodes = [node("a", "8"), node("b", "8", "NVIDIA-T4")]
    assert cluster_of_nodes(nodes, default=H200)[0] == (NodeGroup(2, 8, H200),)
    with pytest.raises(PlanError, match=r"node a has GPUs but no label .*--gpu NAME"):
        cluster_of_nodes(nodes)
    with pytest.raises(PlanError, match=r"node b: unknown GPU type \(seen 'NVIDIA-T4'\)"):
        cluster_of_nodes(nodes[1:])


def test_gpu_resources_that_a_pool_requests_are_counted() -> None:
    amd: Node = {
        "metadata": {"name": "m", "labels": {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}},
        "status": {"allocatable": {"amd.com/gpu": "8"}},
    }
    assert cluster_of_nodes([amd], ("amd.com/gpu",))[0] == (NodeGroup(1, 8, gpu_named("MI300X")),)
    with pytest.raises(PlanError, match=r"no node has .*GPUs .*seen 1 nodes; looked for nvidia.com/gpu"):
        cluster_of_nodes([amd])


def test_pools_take_the_first_nodes_with_room() -> None:
    cluster = (NodeGroup(1, 8, H200), NodeGroup(2, 8, A100))
    found = gpus_of_pools([pool("train", 2, 8), pool("score", 1, 4), pool("more", 1, 4)], cluster, {})
    assert found == {"train": A100, "score": H200, "more": H200}


def test_a_pool_goes_to_its_required_gpu_type() -> None:
    cluster = (NodeGroup(1, 8, H200), NodeGroup(2, 8, A100))
    assert gpus_of_pools([pool("train", 1, 8)], cluster, {"train": [A100]}) == {"train": A100}
    # Of two types, the one with room.
    assert gpus_of_pools([pool("train", 2, 8)], cluster, {"train": [H200, A100]}) == {"train": A100}
    # Another pool, which could be on any nodes, leaves it room.
    one_each = (NodeGroup(1, 8, H200), NodeGroup(1, 8, A100))
    pools = [pool("train", 1, 8), pool("score", 1, 8)]
    assert gpus_of_pools(pools, one_each, {"score": [H200]}) == {"train": A100, "score": H200}
    assert gpus_of_pools(pools, one_each, {"train": [H200, A100], "score": [H200]}) == {"train": A100, "score": H200}


def test_a_pool_without_room_is_rejected_with_the_free_gpus() -> None:
    cluster = (NodeGroup(2, 8, H100),)
    with pytest.raises(PlanError, match=r"^spec.pools a: 3 x 8 GPUs do not fit into the cluster \(seen 2x8xH100\)"):
        gpus_of_pools([pool("a", 3, 8)], cluster, {})
    with pytest.raises(PlanError, match=r"^spec.pools b: 1 x 8 GPUs do .*\(seen 1x6xH100 left\)"):
        gpus_of_pools([pool("z", 1, 8), pool("a", 1, 2), pool("b", 1, 8)], cluster, {})
    with pytest.raises(PlanError, match=r"1 x 8 GPUs of H200 do not fit"):
        gpus_of_pools([pool("a", 1, 8)], cluster, {"a": [H200]})


def test_pods_may_share_a_node_but_never_span_two() -> None:
    assert gpus_of_pools([pool("a", 4, 2)], (NodeGroup(1, 8, H100),), {})
    with pytest.raises(PlanError, match=r"do not fit"):
        gpus_of_pools([pool("a", 1, 8)], (NodeGroup(2, 4, H100),), {})


def test_pools_alone_make_a_cluster() -> None:
    pools = [pool("a", 1, 8), pool("b", 2, 8), pool("c", 1, 4)]
    kinds = {"a": H100, "b": H100, "c": H200}
    assert cluster_of_pools(pools, kinds) == (NodeGroup(3, 8, H100), NodeGroup(1, 4, H200))


def test_a_gpu_type_has_a_label_if_all_its_nodes_share_it() -> None:
    nodes = [
        node("a", "8", "NVIDIA-H100-80GB-HBM3"),
        node("b", "8", "NVIDIA-H100-80GB-HBM3"),
        node("c", "8", "NVIDIA-A100-SXM4-80GB"),
        node("d", "8", "NVIDIA-A100-80GB"),
        node("e", "8", "NVIDIA-H200"),
        node("f", "8"),
        node("g", None),
    ]
    # Both other nodes are A100-80, with different labels; a node without a label counts as an H200.
    assert cluster_of_nodes(nodes, default=H200)[1] == {"H100": ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3")}

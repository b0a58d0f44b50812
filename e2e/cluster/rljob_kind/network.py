"""A pod network and DNS for nodes whose image does not contain them.

Every node assigns pod addresses from its own range and has routes to the ranges of the other nodes. That is what kind's
own plugin does; here Debian's plugins do it. NetworkPolicies are not enforced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rljob_kind.processes import run


def connect_nodes(nodes: Sequence[str]) -> None:
    """Writes each node's network configuration and its routes to the pods of other nodes. Both survive a restart of the
    node."""
    ranges = {node: _of_node(node, "{.spec.podCIDR}") for node in nodes}
    addresses = {node: _of_node(node, '{.status.addresses[?(@.type=="InternalIP")].address}') for node in nodes}
    for node in nodes:
        others = [other for other in nodes if other != node]
        routes = [f"route replace {ranges[other]} via {addresses[other]}\n" for other in others]
        _write(node, "/etc/pod-routes", "".join(routes))
        run(["docker", "exec", node, "systemctl", "restart", "pod-routes.service"])
        _write(node, "/etc/cni/net.d/10-pods.conflist", json.dumps(_network(ranges[node])))


def disable_dns_forwarding() -> None:
    """Removes the forwarding of queries from CoreDNS: pods cannot reach a node's DNS server, and a machine may be
    offline. With forwarding CoreDNS detects a loop and stops."""
    command = ["kubectl", "--namespace", "kube-system", "get", "configmap", "coredns", "--output", "json"]
    corefile = json.loads(run(command))["data"]["Corefile"]
    patch = json.dumps({"data": {"Corefile": without_forwarding(corefile)}})
    run(["kubectl", "--namespace", "kube-system", "patch", "configmap", "coredns", "--type=merge", "--patch", patch])
    run(["kubectl", "--namespace", "kube-system", "rollout", "restart", "deployment", "coredns"])


def without_forwarding(corefile: str) -> str:
    """A CoreDNS configuration without the plugins `forward` (a block or a line) and `loop`."""
    kept: list[str] = []
    in_block = False
    for line in corefile.splitlines():
        words = line.split()
        if in_block:
            in_block = words[:1] != ["}"]
        elif words[:1] == ["forward"]:
            in_block = words[-1] == "{"
        elif words != ["loop"]:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _network(pod_range: str) -> dict[str, object]:
    addresses = {"type": "host-local", "ranges": [[{"subnet": pod_range}]], "routes": [{"dst": "0.0.0.0/0"}]}
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {"type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _write(node: str, path: str, text: str) -> None:
    run(["docker", "exec", "--interactive", node, "tee", path], text=text)


def _of_node(node: str, path: str) -> str:
    return run(["kubectl", "get", "node", node, "--output", f"jsonpath={path}"])

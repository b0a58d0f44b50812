"""The cluster's DNS without external servers."""

from __future__ import annotations

from rljob_kind.network import without_forwarding

COREFILE = """.:53 {
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30 {
       disable success cluster.local
    }
    loop
    loadbalance
}
"""
WITHOUT = """.:53 {
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       ttl 30
    }
    prometheus :9153
    cache 30 {
       disable success cluster.local
    }
    loadbalance
}
"""


def test_plugins_that_query_external_servers_are_removed_and_others_stay() -> None:
    assert without_forwarding(COREFILE) == WITHOUT
    assert without_forwarding(WITHOUT) == WITHOUT


def test_a_port_forward_without_a_block_is_removed() -> None:
    assert without_forwarding(".:53 {\n    forward . 10.0.0.1\n    cache 30\n}\n") == ".:53 {\n    cache 30\n}\n"

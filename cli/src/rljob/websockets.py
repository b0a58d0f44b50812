"""Opens WebSockets of the API server: for programs in pods (`exec`), and for connections to their ports.

Of `kubernetes.stream` only two functions are used: its classes have no timeout and no limit for buffered bytes.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob.error_responses import error_of_response
from rljob.errors import ClusterUnreachableError
from rljob.plain_text import one_line

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration
    from websocket import WebSocket

_PROTOCOL = "v4.channel.k8s.io"
"""The first byte of each message is the number of a stream. All versions of Kubernetes know this protocol."""
TIMEOUT_SECONDS = 30.0
"""For the connection, and then for each message: a program in a pod writes at least every few seconds."""


def open_websocket(api: ApiClient, path: str, query: Sequence[tuple[str, str]], cluster: str, flags: str) -> WebSocket:
    """Opens a WebSocket. Raises ClusterError if the API server rejects it.

    Args:
        cluster: Name of the cluster, for messages.
        flags: Options that suggested commands need for this cluster.
    """
    from websocket import WebSocketBadStatusException, WebSocketException

    _, url, headers, *_ = api.param_serialize("GET", path, query_params=list(query), auth_settings=["BearerToken"])
    given = {name.lower(): value for name, value in headers.items()}
    given["sec-websocket-protocol"] = _PROTOCOL
    try:
        return _connected(api.configuration, url, given)
    except WebSocketBadStatusException as error:
        raise error_of_response(error.status_code, error.resp_body or b"", cluster, flags) from error
    except WebSocketException as error:
        raise ClusterUnreachableError(cluster, one_line(error)) from error


def _connected(configuration: Configuration, url: str, headers: dict[str, str]) -> WebSocket:
    """Does what `kubernetes.stream.ws_client.create_websocket` does, but with a timeout."""
    from kubernetes.stream.ws_client import get_websocket_url, websocket_proxycare
    from websocket import WebSocket

    tls: dict[str, object] = {"cert_reqs": ssl.CERT_NONE}
    if configuration.verify_ssl:
        tls = {"cert_reqs": ssl.CERT_REQUIRED}
        if configuration.assert_hostname is not None:
            tls["check_hostname"] = configuration.assert_hostname
    # Without `ca_certs`, the certificates of the system are trusted, as for the other requests.
    given = (
        ("ca_certs", configuration.ssl_ca_cert),
        ("certfile", configuration.cert_file),
        ("keyfile", configuration.key_file),
        ("server_hostname", configuration.tls_server_name),
    )
    tls |= {name: value for name, value in given if value}
    sent = [f"{name}: {headers[name]}" for name in ("authorization", "sec-websocket-protocol") if name in headers]
    options: dict[str, object] = {"header": sent, "timeout": TIMEOUT_SECONDS}
    if configuration.proxy or configuration.proxy_headers:
        websocket_proxycare(options, configuration, url, headers)  # type: ignore[no-untyped-call]
    socket = WebSocket(sslopt=tls, skip_utf8_validation=False)
    socket.connect(get_websocket_url(url), **options)  # type: ignore[no-untyped-call]
    return socket

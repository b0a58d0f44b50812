"""Opens WebSockets of the API server: for programs in pods (`exec`), and for connections to their ports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob.error_responses import error_of_response
from rljob.errors import ClusterUnreachableError
from rljob.plain_text import one_line

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from websocket import WebSocket

_PROTOCOL = "v4.channel.k8s.io"
"""The first byte of each message is the number of a stream. All versions of Kubernetes know this protocol."""
TIMEOUT_SECONDS = 30.0
"""For the connection, and then for each message."""


def open_websocket(api: ApiClient, path: str, query: Sequence[tuple[str, str]], cluster: str, flags: str) -> WebSocket:
    """Opens a WebSocket. Raises ClusterError if the API server rejects it.

    Args:
        cluster: Name of the cluster, for messages.
        flags: Options that suggested commands need for this cluster.
    """
    from kubernetes.stream.ws_client import create_websocket, get_websocket_url
    from websocket import WebSocketBadStatusException, WebSocketException, setdefaulttimeout

    _, url, headers, *_ = api.param_serialize("GET", path, query_params=list(query), auth_settings=["BearerToken"])
    given = {name.lower(): value for name, value in headers.items()}
    # The library has no argument for a timeout of the connection.
    setdefaulttimeout(TIMEOUT_SECONDS)
    given["sec-websocket-protocol"] = _PROTOCOL
    try:
        address = get_websocket_url(url)  # type: ignore[no-untyped-call]
        opened: WebSocket = create_websocket(api.configuration, address, given)  # type: ignore[no-untyped-call]
        return opened
    except WebSocketBadStatusException as error:
        raise error_of_response(error.status_code, error.resp_body or b"", cluster, flags) from error
    except WebSocketException as error:
        raise ClusterUnreachableError(cluster, one_line(error)) from error

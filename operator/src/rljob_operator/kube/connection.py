"""The connection to the API server: with the pod's service account, or outside a pod with a kubeconfig."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import incluster_config

from rljob_operator.errors import SettingsError

BEARER = "bearer "
DEFAULT_KUBECONFIG = "~/.kube/config"


@dataclass(frozen=True)
class Connection:
    """Address and credentials of the API server, for kopf's watches and for the operator's own requests."""

    configuration: Configuration

    @property
    def server(self) -> str:
        """The API server's URL."""
        return str(self.configuration.host)

    @property
    def ca_file(self) -> str | None:
        """Path of a file with the certificates to trust; None for those of the system."""
        return _text(self.configuration.ssl_ca_cert)

    @property
    def verifies_certificate(self) -> bool:
        """Whether the server's certificate is checked."""
        return bool(self.configuration.verify_ssl)

    @property
    def certificate_file(self) -> str | None:
        """Path of the client certificate; None if there is none."""
        return _text(self.configuration.cert_file)

    @property
    def private_key_file(self) -> str | None:
        """Path of the private key of the client certificate; None if there is none."""
        return _text(self.configuration.key_file)

    async def token(self) -> str | None:
        """The current bearer token (a pod's token is rotated while it runs); None if there is none."""
        found = await self.configuration.get_api_key_with_prefix("BearerToken")
        if not found:
            return None
        return found[len(BEARER) :].strip() if found.lower().startswith(BEARER) else found.strip()


async def load_connection(kubeconfig: str | None) -> Connection:
    """Loads the connection from the pod's service account, else from a kubeconfig (None: ~/.kube/config). Raises
    SettingsError."""
    configuration = Configuration()
    # Ignore proxy variables of the image: inside a cluster, the API server is not behind a proxy.
    configuration.client_session_kwargs = {"trust_env": False}
    try:
        config.load_incluster_config(  # type: ignore[no-untyped-call]
            client_configuration=configuration, try_refresh_token=False
        )
        configuration.refresh_api_key_hook = _read_token  # type: ignore[assignment]
    except config.ConfigException:
        try:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig or DEFAULT_KUBECONFIG, client_configuration=configuration
            )
        except (config.ConfigException, OSError) as error:
            raise SettingsError(
                f"API server: found neither a pod's service account nor a usable kubeconfig ({error}); set KUBECONFIG"
            ) from None
    return Connection(configuration)


def _read_token(configuration: Configuration) -> None:
    """Reads the token's file; the library calls this before each request. That is cheap, because the file is in memory.
    By itself, the library (37.0.2) reads the file once a minute by the node's clock: it could send an expired token for
    a minute, and for longer if this clock is set back."""
    with suppress(OSError):
        token = Path(incluster_config.SERVICE_TOKEN_FILENAME).read_text().strip()
        if token:
            configuration.api_key["BearerToken"] = f"{BEARER}{token}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None

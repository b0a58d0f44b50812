"""Renders, installs and reads the operator's Helm chart."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.settings import inherited_environment

CHART = Path(__file__).parents[4] / "charts" / "rljob-operator"
RELEASE = "rljob-operator"
NAMESPACE = "rljob-system"

Manifest = Mapping[str, object]


class HelmError(Exception):
    """Helm failed; the text is what it printed."""


@dataclass(frozen=True)
class Helm:
    """Runs Helm with its own cache and settings folders, and against a cluster if it has a kubeconfig."""

    program: Path
    folder: Path
    """Folder for Helm's caches and settings."""
    kubeconfig: Path | None = None

    def __call__(self, *arguments: str) -> str:
        """Runs a Helm command and returns what it prints. Raises HelmError."""
        environment = inherited_environment() | {
            f"HELM_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")
        }
        options = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig is not None else []
        result = subprocess.run(
            [str(self.program), *arguments, *options], env=environment, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise HelmError(result.stderr + result.stdout)
        return result.stdout

    def rendered(self, *settings: str, with_crd: bool = False) -> list[Manifest]:
        """The manifests that an installation with these `name=value` settings would create. It watches all namespaces
        unless a setting says otherwise. Raises HelmError.

        They lack the CustomResourceDefinition unless `with_crd`, because parsing it takes a second.
        """
        chosen = settings if with_crd else ("crds.install=false", *settings)
        text = self("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *_set(chosen))
        return [manifest for manifest in YAML(typ="safe").load_all(text) if manifest is not None]

    def install(self, *settings: str) -> None:
        """Installs the release, or upgrades it. It watches all namespaces unless a setting says otherwise. Raises
        HelmError."""
        self("upgrade", "--install", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *_set(settings))

    def uninstall(self) -> None:
        """Removes the release. Raises HelmError."""
        self("uninstall", RELEASE, f"--namespace={NAMESPACE}")


def with_cluster_access(helm: Helm, server: ApiServer) -> Helm:
    """A copy of this Helm with administrator access to a server."""
    kubeconfig = helm.folder / "kubeconfig"
    kubeconfig.write_text(server.kubeconfig())
    kubeconfig.chmod(0o600)
    return Helm(helm.program, helm.folder, kubeconfig)


def value_at(value: object, *path: str | int) -> object:
    """The value at a path of keys and indexes. Raises AssertionError if the path does not exist."""
    for part in path:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int):
            assert part < len(value), f"{part} is not in {value!r}"
            value = value[part]
        else:
            raise AssertionError(f"{part!r} is not in {value!r}")
    return value


def items_at(value: object, *path: str | int) -> list[Manifest]:
    """The list of objects at a path."""
    found = value_at(value, *path)
    assert isinstance(found, list)
    return found


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """The manifests of one kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def only_of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of a kind. Raises AssertionError unless there is exactly one."""
    found = of_kind(manifests, kind)
    assert len(found) == 1, f"{len(found)} manifests of kind {kind}, expected 1"
    return found[0]


def granted_rights(role: Manifest) -> Iterator[tuple[str, str, str]]:
    """Yields (API group, resource, verb) for everything that a Role or ClusterRole allows."""
    for rule in items_at(role, "rules"):
        for group in _texts(rule, "apiGroups"):
            for resource in _texts(rule, "resources"):
                for verb in _texts(rule, "verbs"):
                    yield group, resource, verb


def _texts(value: object, key: str) -> list[str]:
    found = value_at(value, key)
    assert isinstance(found, list)
    return [str(text) for text in found]


def _set(settings: tuple[str, ...]) -> list[str]:
    """The options for the settings. A setting that begins with `{` is a JSON object of values."""
    is_told = any("watch" in setting for setting in settings)
    chosen = settings if is_told else ("watchAllNamespaces=true", *settings)
    return [word for each in chosen for word in ("--set-json" if each.startswith("{") else "--set", each)]

"""The operator's settings, read from environment variables. Only this module reads the environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from pydantic import JsonValue

from rljob_api.constants import DASHBOARD_PORT
from rljob_api.v1alpha1.pools import OWNED_LABEL_PREFIXES as OWNED_PREFIXES
from rljob_operator.errors import SettingsError

PREFIX = "RLJOB_OPERATOR_"
KEY_FILE = "key"
PREVIOUS_KEY_FILE = "previous-key"
MIN_KEY_BYTES = 16
DEFAULT_DASHBOARD_URL = "http://{cluster}-head-svc.{namespace}.svc:8265"
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
LOG_LEVELS = ("debug", "info", "warning", "error")
PEER_FIELDS = ("ipBlock", "namespaceSelector", "podSelector")
RAY_PORTS = (6379, DASHBOARD_PORT, 10001)
"""Ports of Ray's control store, of its dashboard, and for Ray clients."""
NO_USER = "none"
"""Value of `RUN_AS_USER` with which pods of jobs get no user id."""


@dataclass(frozen=True)
class JobNetworkPolicy:
    """The installer's part of the network policies of jobs."""

    enabled: bool = True
    """Whether the operator creates network policies for jobs."""
    ingress: tuple[JsonValue, ...] = ()
    """Further ingress rules, as in a NetworkPolicy."""
    metrics_from: tuple[JsonValue, ...] = ()
    """NetworkPolicy peers that may connect to `metrics_port`."""
    metrics_port: int = 8080
    """The port on which Ray serves metrics in each pod."""
    restrict_egress: bool = False
    """Whether outgoing connections are restricted to the attempt's own pods, DNS and `egress`."""
    dns_to: tuple[JsonValue, ...] = ()
    """With `restrict_egress`: NetworkPolicy peers that are the DNS servers; empty for any address on port 53."""
    egress: tuple[JsonValue, ...] = ()
    """Further egress rules, as in a NetworkPolicy."""


@dataclass(frozen=True)
class Settings:
    """The validated settings."""

    namespaces: tuple[str, ...]
    """Namespaces whose jobs the operator runs; empty for all."""
    trainer_image: str | None
    """Image for jobs that specify none."""
    ray_version: str
    """Ray version for jobs that specify none."""
    image_pull_policy: str
    """Pull policy of all pods of jobs."""
    allowed_label_prefixes: tuple[str, ...]
    """Beginnings of the label keys that jobs may set in `spec.scheduling.labels`, such as `volcano.sh/`; empty for
    none."""
    service_account_names: tuple[str, ...]
    """Names that jobs may use as `spec.serviceAccountName`; empty for none."""
    run_as_user: int | None
    """User and file group of the pods of jobs; None to leave both to the cluster, as OpenShift requires."""
    job_network_policy: JobNetworkPolicy
    pod_labels: Mapping[str, str]
    """Labels of the operator's own pods; the network policies of jobs allow connections from pods with these labels."""
    token_keys_folder: Path
    """Folder with the file `key`, from which the tokens of Ray clusters are derived; while the key is being replaced
    also with the file `previous-key`."""
    dashboard_url: str
    """URL template of a cluster's Ray dashboard, with `{cluster}` and `{namespace}`."""
    pod_name: str
    """Name of the operator's own pod: its identity in leader election and in events."""
    pod_namespace: str
    leader_election: bool
    """Whether the operator works only while it holds the Lease `lease_name`."""
    lease_name: str
    kueue: bool
    """Whether the operator reads Kueue's workloads."""
    max_concurrent_reconciles: int
    """How many jobs are reconciled at the same time at most; jobs that wait for a response of Ray do not count."""
    log_level: str
    health_port: int
    metrics_port: int
    kubeconfig: str | None
    """Path of the kubeconfig, for an operator that does not run in a pod; None for ~/.kube/config."""


@dataclass(frozen=True)
class TokenKeys:
    """Keys from which tokens of Ray clusters are derived, the current one first."""

    keys: tuple[bytes, ...]

    @property
    def current(self) -> bytes:
        """The key for new clusters."""
        return self.keys[0]


def settings_from_environment() -> Settings:
    """This process's settings. Raises SettingsError."""
    return parse_settings(os.environ)


def parse_settings(environment: Mapping[str, str]) -> Settings:
    """Parses and validates the settings in an environment. Raises SettingsError, which names the variable."""
    read = _Reader(environment)
    return Settings(
        namespaces=read.namespaces("NAMESPACES"),
        trainer_image=read.text("TRAINER_IMAGE", "") or None,
        ray_version=read.text("RAY_VERSION"),
        image_pull_policy=read.choice("IMAGE_PULL_POLICY", PULL_POLICIES, "IfNotPresent"),
        allowed_label_prefixes=read.label_prefixes("ALLOWED_LABEL_PREFIXES"),
        service_account_names=read.object_names("SERVICE_ACCOUNT_NAMES"),
        run_as_user=read.user("RUN_AS_USER", 1000),
        job_network_policy=read.network_policy("JOB_NETWORK_POLICY"),
        pod_labels=read.labels("POD_LABELS"),
        token_keys_folder=Path(read.text("TOKEN_KEYS_FOLDER")),
        dashboard_url=read.url_template("DASHBOARD_URL", DEFAULT_DASHBOARD_URL),
        pod_name=read.text("POD_NAME"),
        pod_namespace=read.text("POD_NAMESPACE"),
        leader_election=read.choice("LEADER_ELECTION", ("true", "false"), "true") == "true",
        lease_name=read.text("LEASE_NAME", "rljob-operator"),
        kueue=read.choice("KUEUE", ("true", "false"), "false") == "true",
        max_concurrent_reconciles=read.integer("MAX_CONCURRENT_RECONCILES", 8, 1, 1024),
        log_level=read.choice("LOG_LEVEL", LOG_LEVELS, "info"),
        health_port=read.integer("HEALTH_PORT", 8080, 1, 65535),
        metrics_port=read.integer("METRICS_PORT", 9090, 1, 65535),
        kubeconfig=environment.get("KUBECONFIG") or None,
    )


def read_token_keys(folder: Path) -> TokenKeys:
    """Reads the keys from their files; an empty `previous-key` counts as none. Called before each use, because a
    mounted Secret can change while the operator is running. Raises SettingsError."""
    keys = []
    for name in (KEY_FILE, PREVIOUS_KEY_FILE):
        path = folder / name
        try:
            key = path.read_bytes().strip()
        except FileNotFoundError:
            if name == KEY_FILE:
                raise SettingsError(
                    f"{path}: file is missing; mount the Secret with the operator's key there"
                ) from None
            continue
        except OSError as error:
            raise SettingsError(f"{path}: cannot be read ({error.strerror}); check the mount of the Secret") from None
        if not key and name == PREVIOUS_KEY_FILE:
            continue
        if len(key) < MIN_KEY_BYTES:
            raise SettingsError(
                f"{path}: key is too short ({len(key)} bytes); use at least {MIN_KEY_BYTES} random bytes"
            )
        keys.append(key)
    return TokenKeys(tuple(keys))


class _Reader:
    """Reads and validates variables. `name` is the name of a variable without the prefix `RLJOB_OPERATOR_`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str, default: str | None = None) -> str:
        found = self._environment.get(PREFIX + name, "").strip() or default
        if found is None:
            raise SettingsError(f"{PREFIX}{name}: is not set; set this environment variable")
        return found

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        found = self.text(name, default)
        for value in allowed:
            if found.lower() == value.lower():
                return value
        raise SettingsError(f"{PREFIX}{name}: unknown value (seen: {found!r}); use one of {', '.join(allowed)}")

    def integer(self, name: str, default: int, lowest: int, highest: int) -> int:
        found = self.text(name, str(default))
        if not found.isascii() or not found.isdecimal() or not lowest <= int(found) <= highest:
            raise SettingsError(f"{PREFIX}{name}: must be an integer from {lowest} to {highest} (seen: {found!r})")
        return int(found)

    def parts(self, name: str) -> tuple[str, ...]:
        """The different parts of a comma-separated list; empty if the variable is not set."""
        return tuple(dict.fromkeys(part.strip() for part in self.text(name, "").split(",") if part.strip()))

    def namespaces(self, name: str) -> tuple[str, ...]:
        found = self.parts(name)
        for part in found:
            if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", part):
                raise SettingsError(
                    f"{PREFIX}{name}: not a namespace (seen: {part!r}); use comma-separated names, or leave it empty"
                    " for all namespaces"
                )
        return found

    def object_names(self, name: str) -> tuple[str, ...]:
        found = self.parts(name)
        for part in found:
            if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", part):
                raise SettingsError(f"{PREFIX}{name}: not a name (seen: {part!r}); use comma-separated names")
        return found

    def user(self, name: str, default: int) -> int | None:
        return None if self.text(name, str(default)) == NO_USER else self.integer(name, default, 1, 2**31 - 1)

    def network_policy(self, name: str) -> JobNetworkPolicy:
        fields = _JsonFields(PREFIX + name, self.text(name, "{}"))
        policy = JobNetworkPolicy(
            enabled=fields.flag("enabled", True),
            ingress=fields.rules("ingress", "from"),
            metrics_from=fields.peers("metricsFrom"),
            metrics_port=fields.port("metricsPort", JobNetworkPolicy.metrics_port),
            restrict_egress=fields.flag("restrictEgress", False),
            dns_to=fields.peers("dnsTo"),
            egress=fields.rules("egress", "to"),
        )
        fields.require_all_read()
        for field, rules in (("dnsTo", policy.dns_to), ("egress", policy.egress)):
            if rules and not policy.restrict_egress:
                fields.refuse(field, "has no effect", "set restrictEgress to true, or remove the rules")
        if policy.metrics_port in RAY_PORTS:
            fields.refuse(
                "metricsPort",
                f"a port on which Ray can be controlled (seen: {policy.metrics_port})",
                "use the port on which Ray serves metrics; for other ports, add a rule to ingress",
            )
        return policy

    def label_prefixes(self, name: str) -> tuple[str, ...]:
        found = self.parts(name)
        for part in found:
            if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/[-._A-Za-z0-9]{0,63}", part):
                raise SettingsError(
                    f"{PREFIX}{name}: not the beginning of a label key (seen: {part!r}); use a domain with a slash,"
                    " such as volcano.sh/, or leave it empty to allow no labels"
                )
            if part.startswith(OWNED_PREFIXES):
                raise SettingsError(
                    f"{PREFIX}{name}: labels that begin with {', '.join(OWNED_PREFIXES)} belong to the operator,"
                    f" KubeRay and Kueue (seen: {part!r}); remove this entry"
                )
        return found

    def labels(self, name: str) -> Mapping[str, str]:
        found = {}
        for part in self.text(name, "").split(","):
            if not part.strip():
                continue
            key, equals, value = part.strip().partition("=")
            if not equals or not key:
                raise SettingsError(f"{PREFIX}{name}: not a label (seen: {part!r}); use key=value,key=value")
            found[key] = value
        return found

    def url_template(self, name: str, default: str) -> str:
        found = self.text(name, default)
        try:
            example = found.format(cluster="example-cluster", namespace="example-namespace")
        except (KeyError, IndexError, ValueError):
            example = ""
        has_both = "example-cluster" in example and "example-namespace" in example
        if not re.match(r"https?://[^/]", example) or not has_both:
            raise SettingsError(
                f"{PREFIX}{name}: not a URL with {{cluster}} and {{namespace}} (seen: {found!r});"
                f" use for example {DEFAULT_DASHBOARD_URL}"
            )
        return found.rstrip("/")


class _JsonFields:
    """Reads and validates the fields of a JSON object in the variable `variable`: the network policy of jobs. Only the
    shape of rules and peers is checked here; the API server checks selectors, addresses and ports."""

    def __init__(self, variable: str, text: str) -> None:
        self._variable = variable
        self._unread: dict[str, JsonValue] = {}
        try:
            found = json.loads(text, object_pairs_hook=self._without_repetitions, parse_constant=self._refuse_constant)
        except ValueError as error:
            raise SettingsError(f"{variable}: not JSON ({error}); use a JSON object, or leave it empty") from None
        except RecursionError:
            raise SettingsError(f"{variable}: nested too deeply; use a JSON object, or leave it empty") from None
        if not isinstance(found, dict):
            raise SettingsError(f"{variable}: not a JSON object (seen: {text[:80]!r}); use {{...}}, or leave it empty")
        self._unread = found

    def refuse(self, field: str, wrong: str, advice: str) -> Never:
        """Raises SettingsError about a field."""
        raise SettingsError(f"{self._variable}: {field}: {wrong}; {advice}")

    def require_all_read(self) -> None:
        """Raises SettingsError if there is a field that no method has read."""
        for field in self._unread:
            self.refuse(field, "unknown field", "remove it, or correct its name")

    def flag(self, field: str, default: bool) -> bool:
        found = self._unread.pop(field, default)
        if not isinstance(found, bool):
            self.refuse(field, f"must be true or false (seen: {found!r})", "use one of them")
        return found

    def port(self, field: str, default: int) -> int:
        found = self._unread.pop(field, default)
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= 65535:
            self.refuse(field, f"not a port (seen: {found!r})", "use an integer from 1 to 65535")
        return found

    def peers(self, field: str) -> tuple[JsonValue, ...]:
        """A list of NetworkPolicyPeers."""
        found = self._list(field, self._unread.pop(field, None))
        self._check_peers(field, found)
        return found

    def rules(self, field: str, peers: str) -> tuple[JsonValue, ...]:
        """A list of ingress or egress rules. `peers`: the field of a rule with its peers, `from` or `to`."""
        found = self._list(field, self._unread.pop(field, None))
        for index, rule in enumerate(found):
            where = f"{field}[{index}]"
            allowed = self._object(where, rule, (peers, "ports"))
            found_peers = self._list(f"{where}.{peers}", allowed.get(peers))
            if peers in allowed and not found_peers:
                # In a NetworkPolicy, an empty list means the same as no list.
                self.refuse(
                    f"{where}.{peers}",
                    "an empty list allows every address",
                    "name peers, or remove the field if that is meant",
                )
            self._check_peers(f"{where}.{peers}", found_peers)
            self._list(f"{where}.ports", allowed.get("ports"))
        return found

    def _without_repetitions(self, fields: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        """An object of the JSON text."""
        found = dict(fields)
        if len(found) < len(fields):
            names = [name for name, _ in fields]
            repeated = next(name for name in names if names.count(name) > 1)
            self.refuse(repeated, "set more than once in one object", "remove all but one")
        return found

    def _refuse_constant(self, name: str) -> Never:
        raise SettingsError(f"{self._variable}: not JSON (seen: {name}); use numbers of JSON")

    def _check_peers(self, where: str, peers: tuple[JsonValue, ...]) -> None:
        for index, peer in enumerate(peers):
            selectors = self._object(f"{where}[{index}]", peer, PEER_FIELDS)
            if not selectors:
                self.refuse(f"{where}[{index}]", "selects nothing", f"set one of {', '.join(PEER_FIELDS)}")
            for name, selector in selectors.items():
                if not isinstance(selector, dict):
                    self.refuse(f"{where}[{index}].{name}", f"not an object (seen: {selector!r})", "use an object")

    def _list(self, where: str, value: JsonValue) -> tuple[JsonValue, ...]:
        """The entries of a list; empty for null."""
        if value is not None and not isinstance(value, list):
            self.refuse(where, f"not a list (seen: {value!r})", "use a list")
        return tuple(value or ())

    def _object(self, where: str, value: JsonValue, fields: tuple[str, ...]) -> dict[str, JsonValue]:
        """An object with only these fields."""
        if not isinstance(value, dict):
            self.refuse(where, f"not an object (seen: {value!r})", f"use an object with {', '.join(fields)}")
        for name in value:
            if name not in fields:
                self.refuse(f"{where}.{name}", "unknown field", f"use one of {', '.join(fields)}")
        return value

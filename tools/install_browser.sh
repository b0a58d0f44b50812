#!/usr/bin/env bash
# Installs Chromium for the tests of a run's page, if this machine does not have it.
set -euo pipefail

packages="chromium chromium-driver"
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "install: Debian packages for the tests of the page: $packages"
  apt-get update -qq
  # shellcheck disable=SC2086 - a list of words
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
else
  echo "install: the tests of the page need a browser (Debian's packages: $packages); install them and try again" >&2
  exit 1
fi

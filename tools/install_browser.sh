#!/usr/bin/env bash
# Installs Chromium for the tests of a run's page, if this machine has no browser that they can use (Debian, as root).
set -euo pipefail

for name in chromium chromium-browser google-chrome google-chrome-stable; do
  if command -v "$name" >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
  fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "install: Debian packages: chromium chromium-driver (for the tests of the page)"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
else
  echo "install: no Chromium with chromedriver; the tests of the page in a browser will say so" >&2
fi

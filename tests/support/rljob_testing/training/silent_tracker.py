"""A tracker's process that never reads a message."""

from __future__ import annotations

import sys
import time

if __name__ == "__main__":
    sys.stdout.write("started with http://user:password@server\n")
    sys.stdout.flush()
    time.sleep(3600)

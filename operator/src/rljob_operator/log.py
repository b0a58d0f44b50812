"""Log lines: one per record, key=value, with the job that they are about.

A caller names the job as `extra=about(key)`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

QUIET_LOGGERS = ("kopf", "httpx", "httpcore", "aiohttp", "asyncio")
SILENT_LOGGERS = ("kopf._core.reactor.running",)
"""kopf warns at each start that it takes no signals outside of the main thread, which is as it should be."""


def about(job: str) -> dict[str, str]:
    """The `extra` of a record about one job (`namespace/name`)."""
    return {"job": job}


def configure_logging(level: str) -> None:
    """Sends records to stderr. Libraries are heard from `warning` on, at level `debug` from `info` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.upper())
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if level == "debug" else logging.WARNING)
    for name in SILENT_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


class LineFormatter(logging.Formatter):
    """time=... level=... logger=... job=... msg="..." error="...": tracebacks are kept, in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        parts = [f"time={time}", f"level={record.levelname.lower()}", f"logger={record.name}"]
        job = record.__dict__.get("job")
        if isinstance(job, str):
            parts.append(f"job={job}")
        parts.append(f"msg={json.dumps(record.getMessage(), ensure_ascii=False)}")
        if record.exc_info:
            parts.append(f"error={json.dumps(self.formatException(record.exc_info), ensure_ascii=False)}")
        return " ".join(parts)

"""Formats each log record as one line of key=value pairs. `extra=about(job)` adds the job that a record is about."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

QUIET_LOGGERS = ("kopf", "httpx", "httpcore", "aiohttp", "asyncio")
"""Loggers of libraries, which would log too much at level `info`."""
ERRORS_ONLY_LOGGERS = ("kopf._core.reactor.running",)
"""Loggers whose warnings are dropped. At each start, kopf warns that it handles no signals, because it does not run in
the main thread. It need not: the operator handles the signals itself."""


def about(job: str) -> dict[str, str]:
    """The `extra` of a record about one job (`namespace/name`)."""
    return {"job": job}


def configure_logging(level: str) -> None:
    """Sends the operator's records of this level (such as `info`) and above to stderr. `QUIET_LOGGERS` log from
    `warning` up; at level `debug`, from `info` up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.upper())
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if level == "debug" else logging.WARNING)
    for name in ERRORS_ONLY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


class LineFormatter(logging.Formatter):
    """Formats a record as `time=... level=... logger=... job=... msg="..." error="..."`. `job` and `error` are omitted
    if the record has none. `error` is a traceback; its line breaks are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as one line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        parts = [f"time={time}", f"level={record.levelname.lower()}", f"logger={record.name}"]
        job = record.__dict__.get("job")
        if isinstance(job, str):
            parts.append(f"job={job}")
        parts.append(f"msg={json.dumps(record.getMessage(), ensure_ascii=False)}")
        if record.exc_info:
            parts.append(f"error={json.dumps(self.formatException(record.exc_info), ensure_ascii=False)}")
        return " ".join(parts)

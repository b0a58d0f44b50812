"""`python -m rljob_operator`: runs the operator until it receives SIGTERM or SIGINT.

Exit codes: 0 after one of these signals; 1 after a failure that a restart may fix (leadership was lost, a port is in
use, or the API server's storage was restored from a backup); 2 for invalid settings.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from rljob_operator.errors import OperatorError, SettingsError
from rljob_operator.handlers.operator_process import run_operator
from rljob_operator.log import configure_logging
from rljob_operator.settings import settings_from_environment

STOPPED, FAILED, INVALID_SETTINGS = 0, 1, 2

logger = logging.getLogger("rljob_operator")


def main() -> int:
    """Runs the operator; returns the exit code."""
    configure_logging("info")
    try:
        settings = settings_from_environment()
        configure_logging(settings.log_level)
        asyncio.run(run_operator(settings))
    except SettingsError as error:
        logger.error("%s", error)
        return INVALID_SETTINGS
    except (OperatorError, OSError) as error:
        logger.error("%s", error)
        return FAILED
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())

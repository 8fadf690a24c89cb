"""A program for test_staging: forks a process for each line on its input, which stages what the line says.

What they report comes back as lines too. One program, because importing torch takes longer than staging does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

import s3fs  # noqa: F401  for all children, once

from torchcache import stage, transfer


def report(**fields: Any) -> None:
    """One write, so that lines of several processes do not mix."""
    os.write(1, (json.dumps({"pid": os.getpid(), **fields}) + "\n").encode())


class Messages(logging.Handler):
    """Reports what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        report(message=record.getMessage())


def job(piece_bytes: int, url: str, cache_dir: str, options: dict[str, Any]) -> None:
    """Stages, and reports the folder or the error."""
    transfer.PIECE_BYTES = piece_bytes
    try:
        report(folder=str(stage(url, cache_dir, **options)))
    except Exception as error:
        report(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    logging.getLogger("torchcache").addHandler(Messages(logging.WARNING))
    for line in sys.stdin:
        if os.fork() == 0:
            job(**json.loads(line))
            os._exit(0)

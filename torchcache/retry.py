"""Trying again what a remote store may refuse for a moment."""

from __future__ import annotations

import errno
import logging
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from torchcache.errors import StagingError

ATTEMPTS = 5
FIRST_DELAY_S = 0.5  # doubled after each failure
MAX_DELAY_S = 30.0
# What no second attempt mends: the request is wrong, or forbidden, or what it asks for is not there.
PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ValueError, TypeError, NotImplementedError, ImportError, MemoryError),
)
LOCAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG}
# botocore's errors. Tried again all the same: the service that hands out an instance's role may be busy.
NO_CREDENTIALS = (
    " (set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws; "
    "for a public bucket give fsspec the option anon=true)"
)
RETRIED_STATUS = {408, 425, 429}  # the answers below 500 that mean: later

logger = logging.getLogger("torchcache")
jitter = random.SystemRandom()  # the global generator is training's, and a forked one would repeat its parent's pauses
Result = TypeVar("Result")


class Cancelled(Exception):
    """Another thread of the transfer has failed."""


def with_retries(what: str, call: Callable[[], Result], stop: threading.Event) -> Result:
    """The result of ``call``, which is tried up to ``ATTEMPTS`` times with growing, random pauses.

    Args:
        what: names the object in messages.
        call: the request.
        stop: ends the pauses.

    Raises:
        StagingError: after the last attempt, or at once where another one would not help.
        Cancelled: if ``stop`` is set.
    """
    attempt = 0
    while True:
        attempt += 1
        if stop.is_set():
            raise Cancelled
        try:
            return call()
        except Exception as error:  # each of fsspec's stores has errors of its own, with no common class
            if not is_transient(error):
                raise StagingError(f"{what} cannot be read: {describe(error)}") from error
            if attempt == ATTEMPTS:
                raise StagingError(
                    f"{what} could not be read in {ATTEMPTS} attempts, the last: {describe(error)}; "
                    f"what was fetched is kept, and another call goes on from there"
                ) from error
            logger.info("%s: attempt %d of %d failed: %s", what, attempt, ATTEMPTS, describe(error))
        # Full jitter: processes that fail together do not come back together.
        stop.wait(jitter.uniform(0, min(MAX_DELAY_S, FIRST_DELAY_S * 2**attempt)))


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.startswith("aiohttp") and cause is not None:
        return is_transient(cause)  # fsspec over HTTP says "not found" whatever went wrong
    if isinstance(error, PERMANENT):
        return False
    if isinstance(error, OSError) and error.errno in LOCAL:
        return False
    status = getattr(error, "status", None)
    return not isinstance(status, int) or status >= 500 or status in RETRIED_STATUS


def describe(error: BaseException) -> str:
    """The error's class and text, in one line, and what to do where that is not obvious."""
    remedy = NO_CREDENTIALS if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError") else ""
    return " ".join(f"{type(error).__name__}: {error}{remedy}".split())

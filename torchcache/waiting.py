"""Waiting for what others have claimed: until they publish, or are found to be dead or stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from torchcache import owner as owners
from torchcache.folder import OWNERS
from torchcache.store import Store

POLL_FIRST_S, POLL_LAST_S = 0.000_2, 0.02  # how often a waiting process looks at the log
PROBE_AFTER_S, PROBE_EVERY_S = 0.005, 0.2  # when it first asks whether the owner lives, and how often


class Activity:
    """What this process knows of other owners.

    Attributes:
        stopped: those that were found dead or stopped, and have published nothing since.
    """

    def __init__(self) -> None:
        self.stopped: frozenset[bytes] = frozenset()
        self._last: dict[bytes, float] = {}

    def note(self, published_by: Iterable[bytes]) -> None:
        """They have published something."""
        now = time.monotonic()
        for owner in published_by:
            self._last[owner] = now
            if owner in self.stopped:
                self.stopped -= {owner}

    def of(self, owner: bytes) -> float:
        """When it did so last, in the seconds of ``time.monotonic``; 0 if that is not known."""
        return self._last.get(owner, 0.0)


class Waiting:
    """Waits for other owners, for one call of ``Filler.fetch``, for which this object stands.

    Args:
        store: where they publish.
        activity: when they did so last.
        timeout_s: who lives and has published nothing for so many seconds is taken to be stopped.

    Attributes:
        thread: that has made the call.
    """

    def __init__(self, store: Store, activity: Activity, timeout_s: float) -> None:
        self.thread = threading.get_ident()
        self._store = store
        self._activity = activity
        self._timeout_s = timeout_s
        self._pause = POLL_FIRST_S
        self._started = self._next_probe = 0.0

    def wait(self, holders: set[bytes], known_until: int) -> None:
        """Waits until the log has grown, or one of the owners has been found dead or stopped.

        Args:
            holders: the owners.
            known_until: the number of the last transaction before it was seen that they hold what we want.
        """
        if not self._started:
            self._started = time.monotonic()
            self._next_probe = self._started + PROBE_AFTER_S
        while self._store.last_transaction() == known_until:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, POLL_LAST_S)
            if time.monotonic() >= self._next_probe:
                gone = {owner for owner in holders if self._is_gone(owner)}
                self._next_probe = time.monotonic() + PROBE_EVERY_S
                if gone:
                    self._activity.stopped |= gone
                    return

    def _is_gone(self, owner: bytes) -> bool:
        silent_s = time.monotonic() - max(self._started, self._activity.of(owner))
        return silent_s > self._timeout_s or not owners.is_alive(self._store.path / OWNERS, owner)

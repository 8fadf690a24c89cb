"""What went into a dataset's key, as a store remembers it for people to read: bounded, and without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from torchcache.errors import CorruptStoreError

MOST_PARTS, MOST_CHARACTERS = 500, 300
HIDDEN = "..."

_SECRET = re.compile(r"(.*_)?(key|token|secret|passwd|password|credential|signature)s?", re.IGNORECASE)
_USER_IN_URL = re.compile(r"//[^/@\s]+@")


def to_record(parts: Mapping[str, str] | None) -> bytes:
    """The record.

    Args:
        parts: by attribute path, the value or a digest of it (``Fingerprint.parts``); ``None``: the user gave the key.
    """
    if parts is None:
        return b"null"
    kept = list(parts.items())[:MOST_PARTS]
    return json.dumps({path[:MOST_CHARACTERS]: _shown(path, what) for path, what in kept}).encode()


def from_record(record: bytes) -> dict[str, str] | None:
    """What ``to_record`` was given, shortened.

    Raises:
        CorruptStoreError: if it is no such record.
    """
    try:
        found = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise CorruptStoreError(f"what went into the key cannot be read ({error})") from error
    if found is None:
        return None
    if not isinstance(found, dict) or not all(isinstance(what, str) for what in found.values()):
        raise CorruptStoreError("what went into the key is not a list of names and values")
    return found


def _shown(path: str, what: str) -> str:
    """The text of a part, but of a string where a name on the way to it says that it is a secret."""
    if what.startswith(("'", '"')) and any(map(_SECRET.fullmatch, re.split(r"[.\[\]'\"]+", path))):
        return HIDDEN
    return _USER_IN_URL.sub(f"//{HIDDEN}@", what)[:MOST_CHARACTERS]

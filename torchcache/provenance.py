"""What went into a dataset's key, as a store remembers it for people to read: bounded, and without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from torchcache.errors import CorruptStoreError

MOST_PARTS, MOST_CHARACTERS = 500, 300
MOST_BYTES = MOST_PARTS * 2 * MOST_CHARACTERS * 13  # a character takes up to 12 bytes of JSON
HIDDEN = "..."

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of api_key, client-secret, accessToken
_SECRET = re.compile(
    r".*(key|token|secret|passw(or)?d|passphrase|pwd|credential|signature|authorization)s?|auth|sas", re.IGNORECASE
)
_CONNECTION = re.compile(r"connection_?string", re.IGNORECASE)  # which holds an AccountKey, or a password
_NAMELESS = re.compile(r"\.__defaults__\[\d+\]")  # a default argument: it may be that of a password
_VALUE = re.compile(r"['\"(\d-]|bytes |bytearray |int of ")  # how a string, a number, or the digest of such begins
# The user's part of a URL, also if its end is cut off, and the query, which may hold a signature.
_USER_IN_URL = re.compile(r"//[^/\s]*(@|\.\.\.$)")
_QUERY_OF_URL = re.compile(r"(://[^\s?]*\?)\S*")


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
    if len(record) > MOST_BYTES:
        raise CorruptStoreError(f"what went into the key takes {len(record)} bytes; no more than {MOST_BYTES} can be")
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
    """The text of a part, but of a value where a name on the way to it says that it is a secret."""
    if _VALUE.match(what) and _is_secret(path, what):
        return HIDDEN
    return _QUERY_OF_URL.sub(rf"\1{HIDDEN}", _USER_IN_URL.sub(f"//{HIDDEN}@", what))[:MOST_CHARACTERS]


def _is_secret(path: str, what: str) -> bool:
    if any(map(_SECRET.fullmatch, _WORD.findall(path))) or _CONNECTION.search(path):
        return True
    return what[0] in "'\"" and _NAMELESS.search(path) is not None

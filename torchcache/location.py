"""Where the store of a dataset lies."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import platformdirs

CACHE_DIR_VARIABLE = "CACHE_DIR"
NAME_CHARACTERS = 64  # of a folder's name; file systems allow 255 bytes, encrypted ones 143


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of the stores: the one given, else ``$CACHE_DIR``, else the user's cache folder."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE) if cache_dir is None else cache_dir
    if not chosen:
        return Path(platformdirs.user_cache_dir("torchcache"))
    return Path(os.fsdecode(chosen)).expanduser().absolute()  # the job may change its folder


def store_name(name: str, key: str) -> str:
    """``<name>-<key>`` in characters that every file system takes; a key that has others is hashed."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "_", name).strip("._")[:NAME_CHARACTERS] or "dataset"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", key):
        key = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{plain}-{key}"

"""Where the store of a dataset lies, and where it may not."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from torchcache.errors import StoreUnavailableError

CACHE_DIR_VARIABLE = "CACHE_DIR"
_ROOTS = ("root", "root_dir", "data_root", "data_dir")  # what datasets call their folder
NAME_CHARACTERS = 64  # of a folder's name; file systems allow 255 bytes, encrypted ones 143


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of the stores: the one given, else ``$CACHE_DIR``, else the user's cache folder.

    A user without a home, as in many containers, has one among the temporary files.

    Raises:
        StoreUnavailableError: if that is somebody else's.
    """
    chosen = os.environ.get(CACHE_DIR_VARIABLE) if cache_dir is None else cache_dir
    if chosen:
        return Path(os.fsdecode(chosen)).expanduser().absolute()  # the job may change its folder
    try:
        return Path(platformdirs.user_cache_dir("torchcache"))
    except RuntimeError:  # no HOME, and no entry in the list of users
        return _temporary_folder()


def _temporary_folder() -> Path:
    found = Path(tempfile.gettempdir()) / f"torchcache-{os.geteuid()}"
    try:
        status = found.lstat()
    except OSError:  # not there yet
        return found
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(status.st_mode):
        raise StoreUnavailableError(
            f"{found} is not this user's own folder, and there is no home; choose a folder with CACHE_DIR or cache_dir="
        )
    return found


def store_name(name: str, key: str) -> str:
    """``<name>-<key>`` in characters that every file system takes; a key that has others is hashed."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "_", name).strip("._")[:NAME_CHARACTERS] or "dataset"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", key):
        key = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{plain}-{key}"


def dataset_folders(dataset: Any) -> Iterator[Path]:
    """The folders from which a dataset, and those that it wraps, say that they read."""
    attributes = getattr(dataset, "__dict__", {})
    for name in _ROOTS:
        value = attributes.get(name)
        if isinstance(value, (str, os.PathLike)) and value and os.path.isdir(value):
            yield Path(os.fsdecode(value)).resolve()
    several = attributes.get("datasets")
    for inner in (attributes.get("dataset"), *(several if isinstance(several, (list, tuple)) else ())):
        if inner is not None:
            yield from dataset_folders(inner)


def refuse_nesting(path: Path, dataset: Any) -> None:
    """Refuses a store inside the folder of its dataset, which might take it for data, and the reverse.

    Raises:
        ValueError: naming both.
    """
    place = path.resolve()
    for root in dataset_folders(dataset):
        if place.is_relative_to(root) or root.is_relative_to(place):
            raise ValueError(
                f"the store {path} and the dataset's own folder {root} lie one inside the other: files of one would "
                f"be taken for the other's; choose another folder with CACHE_DIR or cache_dir="
            )

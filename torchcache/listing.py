"""What a remote folder holds: one listing, and the names in it that are refused."""

from __future__ import annotations

import base64
import binascii
import datetime
import fnmatch
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchcache.errors import StagingError
from torchcache.retry import with_retries

# Where fsspec's stores tell one version of a file from another, the surest first.
VERSION_FIELDS = (
    *("ETag", "etag", "md5Hash", "generation", "version_id"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "modified", "created"),
)
SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Remote:
    """A file of the source.

    Attributes:
        relative: its path below the folder that is staged, with ``/``.
        path: its path as the file system knows it.
        size: in bytes; ``None`` where the store does not say.
        version: what changes with the content, and its name; ``None`` where the store has nothing of that kind.
        md5: of the content, hexadecimal, where the store gives it.
    """

    relative: str
    path: str
    size: int | None
    version: str | None
    md5: str | None

    def is_unchanged(self, info: Mapping[str, Any]) -> bool:
        """Whether nothing in a later answer of the store says that the content has changed."""
        field = (self.version or "").partition(" ")[0]  # an answer may lack what the listing has, and the reverse
        return info.get("size") == self.size and (not info.get(field) or _version(info, field) == self.version)


def protocols(fs: Any) -> set[str]:
    """The schemes that a file system answers to."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def open_filesystem(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, of this call alone, and the path in it.

    Raises:
        StagingError: if there is none, or its package is not installed.
    """
    from fsspec.core import url_to_fs  # here: it costs 50 ms, and training itself does not need it

    options = dict(storage_options)
    if url.startswith(("http://", "https://")):
        options = _plain_http(options)
    try:
        # fsspec keeps its file systems for the process, and their listings in them.
        fs, path = url_to_fs(url, **options, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise StagingError(
            f"{url} cannot be opened: {error}; s3:// needs pip install 'torchcache-dataset[s3]', https:// needs "
            f"aiohttp, and other stores the package of fsspec that speaks to them"
        ) from error
    return fs, str(path)


def _plain_http(options: dict[str, Any]) -> dict[str, Any]:
    """Files as they are stored, not compressed on the way, and no limit on how long a large one may take."""
    import aiohttp

    client = {
        "auto_decompress": False,
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60),
        **options.get("client_kwargs", {}),
    }
    headers = {"Accept-Encoding": "identity", **options.get("headers", {})}
    return {**options, "client_kwargs": client, "headers": headers}


def listing(fs: Any, path: str, url: str) -> dict[str, dict[str, Any]]:
    """What the store says of every file below ``path``, by relative path; by its own name, if it is a file itself.

    Raises:
        StagingError: if it cannot be listed, there is nothing, or a name is refused.
    """
    found = with_retries(url, lambda: fs.find(path, detail=True, **_strictly(fs)), threading.Event())
    fs.invalidate_cache()  # what is asked later, is asked
    root = path.rstrip("/")
    # An empty listing is an error, never a reason to remove what is there.
    files: list[tuple[str, dict[str, Any]]] = []
    for name, info in found.items():
        relative = root.rpartition("/")[2].partition("?")[0] if name.rstrip("/") == root else name[len(root) + 1 :]
        if name != root and name.endswith("/") and not info.get("size"):
            continue  # an object that stands for a folder
        if name != root and not name.startswith(root + "/"):
            raise StagingError(f"{url}: the listing has {name!r}, which does not lie in {root!r}")
        files.append((relative, {**info, "name": name}))
    if not files:
        raise StagingError(f"{url}: there is nothing; a prefix, a bucket or an endpoint_url may be misspelt")
    refuse_hostile(url, [relative for relative, _ in files])
    return dict(files)


def _strictly(fs: Any) -> dict[str, str]:
    """The option that makes fsspec's own walk fail where a folder cannot be listed; it would leave that out."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    find = type(fs)._find if isinstance(fs, AsyncFileSystem) else type(fs).find
    return {"on_error": "raise"} if find in (AsyncFileSystem._find, AbstractFileSystem.find) else {}


def refuse_hostile(url: str, names: Iterable[str]) -> None:
    """Refuses what would be written outside the folder, or twice to one place.

    Raises:
        StagingError: names the offenders.
    """
    seen: set[str] = set()
    hostile, double = [], []
    for name in names:
        if not is_safe(name):
            hostile.append(name)
        if name in seen:
            double.append(name)
        seen.add(name)
    if hostile:
        raise StagingError(
            f"{url}: refused {_some(hostile)}: a path is relative, without empty components, '.' or '..'; "
            f"rename the object, or stage a prefix that does not hold it"
        )
    if double:
        raise StagingError(f"{url}: refused {_some(double)}, which the listing holds more than once")
    folders = {parent for name in seen for parent in _parents(name)}
    if both := sorted(folders & seen):
        raise StagingError(
            f"{url}: refused {_some(both)}, which is a file and a folder; a file system has one or the other, so "
            f"rename the object, or stage a prefix that holds only one of them"
        )


def is_safe(name: str) -> bool:
    """Whether a relative path stays inside its folder."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


class Selection(NamedTuple):
    """Which files are wanted.

    Attributes:
        include: globs of relative paths, of which one must match, if there are any.
        exclude: globs of which none may match.
        shard: of the files in the order of their names every ``shard[1]``-th, from number ``shard[0]`` on.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shard: tuple[int, int] = (0, 1)

    def of(self, names: Iterable[str]) -> list[str]:
        kept = re.compile("|".join(map(fnmatch.translate, self.include)) if self.include else "")
        left_out = re.compile("|".join(map(fnmatch.translate, self.exclude)) if self.exclude else r"(?!)")
        first, step = self.shard
        return sorted(name for name in names if kept.match(name) and not left_out.match(name))[first::step]


def remotes(fs: Any, files: Mapping[str, dict[str, Any]], names: Sequence[str], workers: int) -> list[Remote]:
    """What is to be known of the files; those whose size the listing does not tell are asked for one by one."""

    def ask(name: str) -> dict[str, Any]:
        path = files[name]["name"]
        info: dict[str, Any] = with_retries(path, lambda: fs.info(path), threading.Event())
        return info

    unknown = [name for name in names if files[name].get("size") is None]
    with ThreadPoolExecutor(workers) as pool:
        answers = dict(zip(unknown, pool.map(ask, unknown), strict=True))
    return [remote(fs, name, files[name]["name"], answers.get(name, files[name])) for name in names]


def remote(fs: Any, relative: str, path: str, info: Mapping[str, Any]) -> Remote:
    """A file, from what fsspec says of it."""
    size = info.get("size")
    version = next((_version(info, field) for field in VERSION_FIELDS if info.get(field)), None)
    return Remote(relative, path, None if size is None else int(size), version, _md5(fs, info))


def _version(info: Mapping[str, Any], field: str) -> str:
    value = info[field]
    # A listing may give seconds where another question gives a date.
    return f"{field} {value.timestamp() if isinstance(value, datetime.datetime) else value}".replace('"', "")


def _md5(fs: Any, info: Mapping[str, Any]) -> str | None:
    etag = str(info.get("ETag", "")).strip('"')
    if "s3" in protocols(fs) and re.fullmatch("[0-9a-fA-F]{32}", etag):
        return etag.lower()  # with "-N" behind it, it is the sum of the sums of N parts
    encoded = info.get("md5Hash") or info.get("Content-MD5")
    try:
        return base64.b64decode(encoded, validate=True).hex() if encoded else None
    except (binascii.Error, ValueError):
        return None


def as_text(url: str | os.PathLike[str]) -> str:
    """The URL; a path of this machine is made absolute."""
    text = os.fspath(url)
    return text if "://" in text or "::" in text else os.path.abspath(os.path.expanduser(text))

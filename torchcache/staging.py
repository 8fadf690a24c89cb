"""``stage``: the files of an object store, on this node's disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from torchcache import location, progress
from torchcache.errors import StagingError
from torchcache.listing import Remote, Selection, as_text, listing, open_filesystem, remotes
from torchcache.manifest import Manifest, write_json
from torchcache.transfer import Transfer, part_name

BLOCK_BYTES = 4096  # in which file systems give space

logger = logging.getLogger("torchcache")


@dataclass(frozen=True)
class _Job:
    """What is to be staged, and where.

    Attributes:
        copy: the folder of the copy: the source's files, and nothing else.
        state: the folder beside it, of the lock, the records and the temporary files.
    """

    url: str
    copy: Path
    state: Path
    selection: Selection
    storage_options: Mapping[str, Any] = field(repr=False)  # may hold secrets
    workers: int
    progress: bool
    verify: bool


def stage(
    url: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    shard: tuple[int, int] = (0, 1),
    workers: int = 16,
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    verify: bool = True,
    offline: bool = False,
) -> Path:
    """Copies a folder, or one file, of an object store to this node's disk, and returns the folder of the copy.

    The copy lies in ``<cache folder>/staged``. A second call lists the source once and fetches what has changed since;
    what vanished from the source is removed. A call that was interrupted is continued by the next one. A file is in
    the copy when it is whole, not before. Any number of processes may call at the same time: one fetches, the
    others wait for it, and get its error if it fails.

    Args:
        url: what to copy: ``s3://bucket/prefix``, ``gs://…``, ``https://…``, ``file://…``, a path; all that fsspec
            has a package for.
        cache_dir: the cache folder; default ``$CACHE_DIR``, else the user's cache folder.
        include: globs of the relative paths to copy (``*`` matches ``/`` too); default all. Another selection is
            another copy.
        exclude: globs of those to leave out.
        shard: ``(k, n)``: only every n-th of the files, from number k on (from 0), in the order of their names: for
            nodes that each keep a part.
        workers: requests at the same time.
        progress: show a progress bar, on a terminal and in a notebook.
        storage_options: passed to fsspec, such as ``{"endpoint_url": "https://obs.example.com"}``.
        verify: compare what is fetched with the MD5 that the store gives, and large files that have none with the
            store's version of them afterwards. Lengths are compared always.
        offline: ask nothing of the source; the copy of an earlier call is returned as it is.

    Raises:
        StagingError: if the source cannot be read, holds names that are refused, changes meanwhile, or does not fit
            on the disk; and with ``offline`` if there is no whole copy.

    Example:
        >>> root = stage("s3://bucket/imagenet/train", storage_options={"endpoint_url": "https://obs.example.com"})
        >>> train = CachedDataset(ImageFolder(root, transform=to_tensor))
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: it is a number of requests at the same time, at least 1")
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard}: it is (number of the shard, from 0, and how many there are)")
    text, options = as_text(url), dict(storage_options or {})
    selection = Selection(_globs(include), _globs(exclude), (shard[0], shard[1]))
    copy = location.cache_folder(cache_dir) / "staged" / _name(text, options, selection)
    state = copy.with_name(copy.name + ".stage")
    job = _Job(text, copy, state, selection, options, workers, progress, verify)
    if offline:
        return _offline(job)
    try:
        for made in (copy, state / "parts"):
            made.mkdir(parents=True, exist_ok=True)
        _update_once(job)
    except OSError as error:
        if isinstance(error, StagingError):
            raise
        raise StagingError(f"{copy} cannot be written: {error}; mend that, or choose another cache_dir=") from error
    return copy


def _globs(globs: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if globs is None else (globs,) if isinstance(globs, str) else tuple(globs)


def _name(url: str, options: Mapping[str, Any], selection: Selection) -> str:
    """The name of the copy's folder: one for each source and selection."""
    endpoint = options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url")
    plain = url.rstrip("/")
    identity = json.dumps([plain, endpoint, *selection])
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return location.store_name(plain.partition("?")[0].rpartition("/")[2], digest)


def _offline(job: _Job) -> Path:
    manifest = Manifest(job.copy, job.state, job.url)
    if not manifest.whole:
        raise StagingError(f"{job.url}: there is no whole copy in {job.copy}; call once without offline=True")
    if missing := [name for name in manifest.entries if not manifest.is_there(name)]:
        raise StagingError(
            f"{job.url}: {missing[0]!r} is missing in {job.copy}, or has another size; call once without offline=True"
        )
    return job.copy


def _update_once(job: _Job) -> None:
    """Brings the copy up to date, unless another process has done it while this one waited.

    The kernel gives the lock to a waiting process if its holder dies. A holder that ends by itself leaves its outcome,
    and those who waited for it share it, a failure too; a process that comes later begins anew.
    """
    outcome = job.state / "outcome.json"
    before = _read_outcome(outcome)
    with _locked(job) as waited:
        after = _read_outcome(outcome)
        if waited and after != before:
            if after.get("error"):
                raise StagingError(f"the process that staged for this one failed: {after['error']}")
            return
        try:
            _update(job)
        except OSError as error:
            with contextlib.suppress(OSError):  # the disk may be full; those who wait will see for themselves
                write_json(outcome, {"token": secrets.token_hex(8), "error": str(error)})
            raise
        write_json(outcome, {"token": secrets.token_hex(8), "error": None})


@contextlib.contextmanager
def _locked(job: _Job) -> Iterator[bool]:
    """Excludes other processes; gives whether there was one to wait for."""
    lock = filelock.FileLock(job.state / "lock", fallback_to_soft=False, thread_local=False)
    waited = False
    try:
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            logger.warning("%s: another process stages it already; waiting for it", job.url)
            waited = True
            lock.acquire()
    except NotImplementedError as error:
        raise StagingError(f"{job.state}: no lock can be had here ({error}); choose another cache_dir=") from error
    try:
        yield waited
    finally:
        lock.release()


def _read_outcome(path: Path) -> dict[str, Any]:
    """What the last process that ended by itself has left; its token tells one from another."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _update(job: _Job) -> None:
    """Lists the source, fetches what is missing or has changed, and removes what vanished."""
    fs, path = open_filesystem(job.url, job.storage_options)
    names = job.selection.of(files := listing(fs, path, job.url))
    if not names:
        chosen = ", ".join(f"{name}={value}" for name, value in job.selection._asdict().items())
        raise StagingError(f"{job.url}: none of {len(files)} files is selected by {chosen}")
    sources = remotes(fs, files, names, job.workers)
    manifest = Manifest(job.copy, job.state, job.url)
    changed = [source for source in sources if not manifest.has(source)]
    gone = manifest.entries.keys() - set(names)
    if manifest.whole and not changed and not gone:
        return
    parts = job.state / "parts"
    _tidy(parts, changed)
    _check_space(job, changed, freed=sum(manifest.entries[name].size for name in gone))
    manifest.begin()
    manifest.remove(gone)
    with _bar(job, changed) as arrived:
        transfer = Transfer(*(fs, job.copy, parts), verify=job.verify, arrived=arrived, finished=manifest.add)
        transfer.run(changed, job.workers)
    manifest.finish()
    logger.info("%s: %d of %d files fetched to %s", job.url, len(changed), len(sources), job.copy)


def _tidy(parts: Path, sources: Sequence[Remote]) -> None:
    """Removes temporary files that cannot be gone on with."""
    wanted = {part_name(source) for source in sources if source.version is not None}
    for left in parts.iterdir():
        if left.with_suffix(".part").name not in wanted:
            left.unlink()


def _check_space(job: _Job, sources: Sequence[Remote], *, freed: int) -> None:
    """Refuses before the first byte what would end half-way, in bytes.

    Raises:
        StagingError: says what is needed, and what there is.
    """
    blocks = sum(-(-(source.size or 0) // BLOCK_BYTES) for source in sources)
    there = sum(path.stat().st_blocks * 512 for path in (job.state / "parts").iterdir())
    needed, free = blocks * BLOCK_BYTES - there, shutil.disk_usage(job.state).free + freed
    if needed > free:
        raise StagingError(
            f"{job.url} needs {needed / 1e9:.3f} GB more in {job.copy.parent}, and {free / 1e9:.3f} GB are free there: "
            f"make room, choose another cache_dir=, or select less with include= and exclude="
        )


@contextlib.contextmanager
def _bar(job: _Job, sources: Sequence[Remote]) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes, and what moves it, from any thread."""
    total, lock = sum(source.size or 0 for source in sources), threading.Lock()
    with progress.bar(show=job.progress, total=total, desc=job.copy.name, unit="B", unit_scale=True) as bar:

        def arrived(count: int) -> None:
            with lock:
                bar.update(count)

        yield arrived

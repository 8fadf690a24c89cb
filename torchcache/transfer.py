"""Fetching files: in pieces, side by side, each shown only when it is whole."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchcache.errors import StagingError
from torchcache.listing import Remote, protocols
from torchcache.retry import Cancelled, with_retries

PIECE_BYTES = 16 << 20  # of a large file; with 16 workers 256 MiB are in flight
READ_BYTES = 1 << 20  # at a time, for sums
DONE = b"\1"


class Part:
    """The temporary file of a remote one: filled by pieces in any order, checked, and moved to its place.

    It outlives the process. Which pieces are there stands beside it, a byte each, written after the piece is on disk.

    Args:
        source: the remote file.
        folder: where temporary files lie, on the file system of the destination.
        ranges: whether parts of a file can be asked for.
    """

    def __init__(self, source: Remote, folder: Path, *, ranges: bool) -> None:
        self.source = source
        size = source.size or 0
        self.in_pieces = ranges and size > PIECE_BYTES
        self.streamed = source.size is None or (size > PIECE_BYTES and not ranges)
        self.starts = list(range(0, size, PIECE_BYTES)) if self.in_pieces else [0]
        self.path = folder / part_name(source)
        self._pieces_path = self.path.with_suffix(".pieces")
        self._lock = threading.Lock()
        self._left = len(self.starts)
        self._file = self._pieces = -1

    def end(self, start: int) -> int:
        """Where the piece that begins at ``start`` ends."""
        size = self.source.size or 0
        return min(start + PIECE_BYTES, size) if self.in_pieces else size

    def missing(self) -> list[int]:
        """Where the pieces begin that are not on disk."""
        if not self.in_pieces or not self.path.exists() or not self._pieces_path.exists():
            return self.starts
        done = self._pieces_path.read_bytes()
        return [start for i, start in enumerate(self.starts) if done[i : i + 1] != DONE]

    def open(self) -> list[int]:
        """Makes room for it, and returns the pieces to fetch."""
        missing = self.missing()
        if len(missing) == len(self.starts):
            self._pieces_path.unlink(missing_ok=True)
        self._left = len(missing)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.path, flags if self.in_pieces else flags | os.O_TRUNC, 0o666)
        if self.in_pieces:
            self._pieces = os.open(self._pieces_path, flags, 0o666)
            os.posix_fallocate(self._file, 0, self.source.size or 0)
        return missing

    def write(self, start: int, data: bytes) -> None:
        """Stores a piece."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, start + len(data) - len(view))
            view = view[written:]
        if self.in_pieces:
            os.fdatasync(self._file)
            os.pwrite(self._pieces, DONE, self.starts.index(start))

    def count_down(self) -> bool:
        """Counts a piece that is there, and says whether it was the last one."""
        with self._lock:
            self._left -= 1
            return self._left <= 0

    def md5(self) -> str:
        """The sum of what is there, hexadecimal."""
        digest, offset = hashlib.md5(usedforsecurity=False), 0
        while data := os.pread(self._file, READ_BYTES, offset):
            digest.update(data)
            offset += len(data)
        return digest.hexdigest()

    def size(self) -> int:
        """Bytes that are there."""
        return os.fstat(self._file).st_size

    def publish(self, target: Path) -> None:
        """Moves the file to its place; from then on it is seen, whole."""
        os.fsync(self._file)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.path, target)
        self._pieces_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what is there: it is not to be used."""
        self.path.unlink(missing_ok=True)
        self._pieces_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the descriptors back; may be called again."""
        for descriptor in (self._file, self._pieces):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._pieces = -1


def part_name(source: Remote) -> str:
    """The name of a temporary file, of which another version of the remote file has another."""
    identity = repr((source.relative, source.size, source.version, PIECE_BYTES))
    return hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() + ".part"


class Transfer:
    """Fetches files of one file system.

    Args:
        fs: the file system.
        destination: the folder of the files.
        parts: the folder of the temporary ones.
        verify: whether what arrives is checked beyond its length.
        arrived: called with the bytes that came, from several threads.
        finished: called with each file that is in its place, from several threads.
    """

    def __init__(
        self,
        fs: Any,
        destination: Path,
        parts: Path,
        *,
        verify: bool,
        arrived: Callable[[int], None],
        finished: Callable[[Remote], None],
    ) -> None:
        self._fs, self._destination, self._parts, self._verify = fs, destination, parts, verify
        self._arrived, self._finished = arrived, finished
        self._stop = threading.Event()
        self._next = threading.Lock()
        self._open: set[Part] = set()

    def run(self, sources: Sequence[Remote], workers: int) -> None:
        """Fetches all files, the largest first.

        Raises:
            StagingError: the first failure; what arrived until then is kept.
        """
        ordered = sorted(sources, key=lambda source: (-(source.size or 0), source.relative))
        tasks = self._tasks(ordered)
        try:
            with ThreadPoolExecutor(workers, "torchcache-stage") as pool:
                threads = [pool.submit(self._work, tasks) for _ in range(workers)]
                try:
                    errors = [error for thread in threads if (error := thread.exception())]
                finally:  # an interrupt of this thread ends the others too
                    self._stop.set()
        finally:
            for part in self._open:
                part.close()
        for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
            raise error

    def _tasks(self, ordered: Sequence[Remote]) -> Iterator[tuple[Part, int | None]]:
        """Pieces in the order in which they are fetched; ``None``: all are there, the file is to be finished."""
        ranges = self._has_ranges(ordered[0]) if ordered else True
        for source in ordered:
            part = Part(source, self._parts, ranges=ranges)
            self._open.add(part)
            missing = part.open()
            self._arrived(sum(part.end(start) - start for start in part.starts if start not in missing))
            for start in missing:
                yield part, start
            if not missing:
                yield part, None

    def _has_ranges(self, largest: Remote) -> bool:
        """Whether parts of files can be had; only a web server may be without, and is asked if there is a need."""
        size = largest.size or 0
        if size <= PIECE_BYTES or not protocols(self._fs) & {"http", "https"}:
            return True

        def ask() -> bool:
            with self._fs.open(largest.path, "rb", size=size, block_size=1, cache_type="none") as file:
                file.seek(1)
                try:
                    return len(file.read(1)) == 1
                except ValueError:  # fsspec says so before it reads what would be the whole file
                    return False

        return with_retries(largest.path, ask, self._stop)

    def _work(self, tasks: Iterator[tuple[Part, int | None]]) -> None:
        """One thread: takes pieces until there are none."""
        try:
            while not self._stop.is_set():
                with self._next:
                    task = next(tasks, None)
                if task is None:
                    return
                self._do(*task)
        except BaseException as error:
            self._stop.set()
            if isinstance(error, OSError) and not isinstance(error, StagingError):
                raise StagingError(
                    f"{self._destination} cannot be written: {error}; what was fetched is kept: mend that, and call "
                    f"again"
                ) from error
            raise

    def _do(self, part: Part, start: int | None) -> None:
        if start is not None:
            self._arrived(self._fetch(part, start))
        if start is None or part.count_down():
            self._check(part)
            part.publish(self._destination / part.source.relative)
            part.close()
            self._open.discard(part)
            self._finished(part.source)

    def _fetch(self, part: Part, start: int) -> int:
        """Gets a piece and stores it. Returns its bytes."""
        source, fs = part.source, self._fs

        def whole(length: int, expected: int | None) -> None:
            if expected is not None and length != expected:
                raise OSError(f"{length} bytes came instead of {expected}")

        def get() -> bytes:
            limits = {"start": start, "end": part.end(start)} if self._is_ranged(part) else {}
            data: bytes = fs.cat_file(source.path, **limits)
            whole(len(data), part.end(start) - start)
            return data

        def get_streamed() -> int:
            fs.get_file(source.path, os.fspath(part.path))
            whole(part.size(), source.size)
            return part.size()

        if part.streamed:
            return with_retries(source.path, get_streamed, self._stop)
        data = with_retries(source.path, get, self._stop) if source.size else b""
        part.write(start, data)
        return len(data)

    def _is_ranged(self, part: Part) -> bool:
        """Whether its pieces are asked for by their limits, which does not show that the file has grown.

        s3fs asks for the size first where there are no limits: a second request for every file.
        """
        return part.in_pieces or "s3" in protocols(self._fs)

    def _check(self, part: Part) -> None:
        """Compares what is there with what the store says of it.

        Raises:
            StagingError: if it is something else.
        """
        source = part.source
        if not self._verify:
            return
        if source.md5 is None:
            if self._is_ranged(part) and not source.is_unchanged(self._info(source)):
                self._refuse(part, "it was changed while it was read")
            return
        if part.md5() == source.md5 or self._is_encrypted(source):
            return
        for start in part.starts:  # once more: what came may have been wrong, and not what is stored
            self._fetch(part, start)
        if part.md5() != source.md5:
            self._refuse(part, f"its MD5 is {part.md5()}, and {source.md5} by the listing (verify=False accepts it)")

    def _refuse(self, part: Part, why: str) -> None:
        part.discard()
        raise StagingError(f"{part.source.path}: {why}; if it was replaced meanwhile, call again")

    def _info(self, source: Remote) -> dict[str, Any]:
        info: dict[str, Any] = with_retries(source.path, lambda: self._fs.info(source.path), self._stop)
        return info

    def _is_encrypted(self, source: Remote) -> bool:
        """Whether S3 keeps the object under a key: its ETag looks like an MD5 and is none then."""
        if "s3" not in protocols(self._fs):
            return False
        bucket, _, key = source.path.partition("/")

        def head() -> dict[str, Any]:
            answer: dict[str, Any] = self._fs.call_s3("head_object", Bucket=bucket, Key=key, **self._fs.req_kw)
            return answer

        answer = with_retries(source.path, head, self._stop)
        return "SSECustomerAlgorithm" in answer or str(answer.get("ServerSideEncryption")).startswith("aws:kms")

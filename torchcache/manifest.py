"""What is written down of a staged copy, beside it.

``manifest.json`` is there if and only if the copy is whole. While it is being made or changed there is ``journal``
instead: a line for each file that is in its place. The copy itself holds nothing but the source's files, since some
datasets take every file or folder that they find for a sample or a class.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcache.listing import Remote, is_safe

FORMAT_VERSION = 1

logger = logging.getLogger("torchcache")


@dataclass(frozen=True)
class Entry:
    """A file that is in its place: its size on disk, and the version of the source that it is."""

    size: int
    version: str | None


class Manifest:
    """The record of one copy.

    Args:
        copy: the folder of the copy.
        state: the folder of the records.
        url: the source, for readers.

    Attributes:
        whole: the copy was finished, and not touched since.
        entries: the files that are in their places, by relative path.
    """

    def __init__(self, copy: Path, state: Path, url: str) -> None:
        self._copy, self._url = copy, url
        self._path, self._journal = state / "manifest.json", state / "journal"
        self._lock = threading.Lock()
        finished = self._read_manifest()
        self.whole = finished is not None
        self.entries = self._read_journal() if finished is None else finished

    def _read_manifest(self) -> dict[str, Entry] | None:
        try:
            content = json.loads(self._path.read_bytes())
            if content["format"] != FORMAT_VERSION:
                raise ValueError(f"format {content['format']}, not {FORMAT_VERSION}")
            return {name: _entry(name, fields) for name, fields in content["files"].items()}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be used: %s", self._path, error)
            return None

    def _read_journal(self) -> dict[str, Entry]:
        entries = {}
        try:
            for line in self._journal.read_bytes().splitlines():
                fields = json.loads(line)
                entries[fields["path"]] = _entry(fields["path"], fields)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            pass  # the last line, which a killed process did not finish
        return entries

    def has(self, source: Remote) -> bool:
        """Whether this version of a remote file is in its place."""
        entry = self.entries.get(source.relative)
        if entry is None or source.version is None or entry.version != source.version:
            return False
        return source.size in (None, entry.size) and self.is_there(source.relative)

    def is_there(self, relative: str) -> bool:
        """Whether the file that was recorded is there, in its size."""
        try:
            return (self._copy / relative).stat().st_size == self.entries[relative].size
        except OSError:
            return False

    def begin(self) -> None:
        """From here on the copy counts as unfinished."""
        lines = "".join(_line(name, entry) for name, entry in self.entries.items())
        write_atomic(self._journal, lines.encode())
        self._path.unlink(missing_ok=True)
        self.whole = False

    def add(self, source: Remote) -> None:
        """Records a file that is in its place; from any thread."""
        entry = Entry((self._copy / source.relative).stat().st_size, source.version)
        with self._lock:
            self.entries[source.relative] = entry
            with open(self._journal, "ab", buffering=0) as file:
                file.write(_line(source.relative, entry).encode())

    def remove(self, names: Iterable[str]) -> None:
        """Removes recorded files, and the folders that are empty without them."""
        for name in names:
            path = self._copy / name
            path.unlink(missing_ok=True)
            del self.entries[name]
            for folder in path.parents:
                if folder == self._copy or not folder.is_dir() or any(folder.iterdir()):
                    break
                folder.rmdir()

    def finish(self) -> None:
        """Records that the copy is whole."""
        files = {name: vars(entry) for name, entry in sorted(self.entries.items())}
        write_json(self._path, {"format": FORMAT_VERSION, "url": self._url, "files": files})
        self._journal.unlink(missing_ok=True)


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    """A record from a file; what it names may be removed one day, so that it has to lie inside."""
    size, version = fields["size"], fields["version"]
    if not is_safe(name) or not isinstance(size, int) or not isinstance(version, str | None):
        raise ValueError(f"no record of a file: {name!r}")
    return Entry(size, version)


def _line(name: str, entry: Entry) -> str:
    return json.dumps({"path": name, **vars(entry)}) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Writes a whole JSON file or none of it."""
    write_atomic(path, json.dumps(content).encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a whole file or none of it: a temporary sibling, on disk, then renamed."""
    temporary = path.with_suffix(".new")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

"""Staging: from an S3 server, whose requests are counted, and from a web server that misbehaves."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3_server
from helpers import as_root, mounted
from s3_server import S3Server
from web_server import WebServer

from torchcache import StagingError, errors, listing, retry, stage, transfer

PIECE_BYTES = 1000  # of large files, in these tests
FILES = {f"{number % 3}/{number}.bin": bytes([number]) * (10 + number) for number in range(6)}
LARGE = bytes(random.Random(0).randbytes(4500))  # five pieces
EXPECTED = {**FILES, "large.bin": LARGE}
URL = "s3://bucket/train"
SECRET = s3_server.KEYS["secret"]


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.001)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(server: S3Server) -> S3Server:
    """A server with a prefix of seven files, the marks of two folders, and another prefix."""
    server.reset()
    for name, data in EXPECTED.items():
        server.put("bucket", f"train/{name}", data)
    for other in ("train/", "train/0/", "train2/other.bin"):
        server.put("bucket", other, b"")
    return server


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """The same files in a folder."""
    for name, data in EXPECTED.items():
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(data)
    return tmp_path / "train"


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer({"data/large.bin": LARGE, "data/a/small.bin": b"small", "data/b/empty.bin": b""}) as server:
        yield server


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def staged(cache_dir: Path) -> dict[str, bytes]:
    """The files of the only copy, by relative path."""
    (copy,) = [path for path in (cache_dir / "staged").iterdir() if path.suffix != ".stage"]
    return content(copy)


def test_a_prefix_is_listed_once_and_copied_largest_first(cache_dir: Path, s3: S3Server) -> None:
    folder = stage(URL, storage_options=s3.storage_options, workers=1)
    assert folder.parent == cache_dir / "staged"
    assert content(folder) == EXPECTED
    methods, paths, limits = zip(*s3.requests, strict=True)
    assert set(methods) == {"GET"}
    assert paths[:6] == ("/bucket", *["/bucket/train/large.bin"] * 5)
    starts = range(0, 4500, PIECE_BYTES)
    assert limits[1:6] == tuple(f"bytes={start}-{min(start + PIECE_BYTES, 4500) - 1}" for start in starts)
    sizes = [len(FILES[path.removeprefix("/bucket/train/")]) for path in paths[6:]]
    assert sizes == sorted(map(len, FILES.values()), reverse=True)

    state = content(folder.with_name(folder.name + ".stage"))
    assert state.keys() == {"lock", "manifest.json", "outcome.json"}
    assert not any(SECRET.encode() in data for data in state.values())

    before = len(s3.requests)
    assert stage(URL + "/", cache_dir, storage_options=s3.storage_options) == folder
    assert [path for _, path, _ in s3.requests[before:]] == ["/bucket"], "a second call fetches nothing"


def test_missing_credentials_are_said_with_the_remedy(
    cache_dir: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(StagingError, match=r"NoCredentialsError: .*set AWS_ACCESS_KEY_ID"):
        stage(URL, storage_options={"endpoint_url": s3.endpoint_url, "client_kwargs": {"region_name": "us-east-1"}})
    assert not s3.requests


def test_what_changed_is_fetched_and_what_vanished_is_removed(cache_dir: Path, s3: S3Server) -> None:
    folder = stage(URL, storage_options=s3.storage_options)
    (folder / "mine.txt").write_text("not from the source")
    (folder / "0" / "3.bin").unlink()
    s3.put("bucket", "train/0/0.bin", b"of the same s")  # another size
    s3.put("bucket", "train/1/1.bin", b"z" * len(FILES["1/1.bin"]))  # the same
    s3.put("bucket", "train/new/file.bin", b"new")
    for gone in ("2/2.bin", "2/5.bin"):
        s3.delete("bucket", f"train/{gone}")
    before = s3.gets()
    assert stage(URL, storage_options=s3.storage_options) == folder
    assert s3.gets() - before == 4
    found = content(folder)
    assert found.pop("mine.txt") == b"not from the source"
    assert not (folder / "2").exists()
    changed = {"0/0.bin": b"of the same s", "1/1.bin": b"z" * 11, "new/file.bin": b"new"}
    assert found == {name: data for name, data in EXPECTED.items() if name[0] != "2"} | changed


def test_a_file_becomes_a_folder_and_the_reverse(cache_dir: Path, near: Path) -> None:
    stage(near)
    shutil.rmtree(near)
    (near / "large.bin").mkdir(parents=True)
    (near / "large.bin" / "inside").write_bytes(b"1")
    (near / "0").write_bytes(b"2")
    assert content(stage(near)) == {"large.bin/inside": b"1", "0": b"2"}


def test_one_object(cache_dir: Path, s3: S3Server) -> None:
    folder = stage(f"{URL}/large.bin", storage_options=s3.storage_options)
    assert content(folder) == {"large.bin": LARGE}
    assert folder.name.startswith("large.bin-")


def test_selections_are_copies_of_their_own(cache_dir: Path, near: Path) -> None:
    some = stage(near, include=["0/*", "large*"], exclude="*/3.bin")
    assert content(some) == {"0/0.bin": FILES["0/0.bin"], "large.bin": LARGE}
    whole = stage(near)
    assert whole != some and content(whole) == EXPECTED
    with pytest.raises(StagingError, match=r"none of 7 files is selected by include=\('\*\.jpg',\)"):
        stage(near, include="*.jpg")


def test_a_folder_of_this_machine(cache_dir: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(near.parent)
    assert content(stage("train")) == content(stage(near.as_uri())) == EXPECTED


def test_memory(cache_dir: Path) -> None:
    fsspec.filesystem("memory").pipe({"/staging/a": b"1", "/staging/b/c": LARGE})
    assert content(stage("memory://staging")) == {"a": b"1", "b/c": LARGE}
    fsspec.filesystem("memory").rm("/staging", recursive=True)


def test_offline(cache_dir: Path, s3: S3Server) -> None:
    with pytest.raises(StagingError, match="there is no whole copy"):
        stage(URL, storage_options=s3.storage_options, offline=True)
    folder = stage(URL, storage_options=s3.storage_options)
    before = len(s3.requests)
    assert stage(URL, storage_options=s3.storage_options, offline=True) == folder
    (folder / "0" / "0.bin").write_bytes(b"")
    with pytest.raises(StagingError, match=r"'0/0\.bin' is missing"):
        stage(URL, storage_options=s3.storage_options, offline=True)
    assert len(s3.requests) == before


def test_a_damaged_manifest_means_fetching_again(cache_dir: Path, near: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = stage(near)
    manifest = folder.with_name(f"{folder.name}.stage") / "manifest.json"
    good = json.loads(manifest.read_bytes())
    outside = cache_dir / "outside"
    outside.write_text("precious")
    hostile = {**good, "files": {**good["files"], "../../outside": {"size": 8, "version": "1"}}}
    for bad in (b"{", b"[]", json.dumps({**good, "format": 2}).encode(), json.dumps(hostile).encode()):
        manifest.write_bytes(bad)
        with pytest.raises(StagingError, match="no whole copy"):
            stage(near, offline=True)
        stage(near)
        assert json.loads(manifest.read_bytes()) == good
        assert "cannot be used" in caplog.text
        caplog.clear()
    assert outside.read_text() == "precious"


def test_silent_without_a_terminal(cache_dir: Path, near: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stage(near)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("progress", [True, False])
def test_the_bar_on_a_terminal(cache_dir: Path, near: Path, monkeypatch: pytest.MonkeyPatch, progress: bool) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 25, 100, 0, 0))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        stage(near, progress=progress)
        monkeypatch.undo()
        os.set_blocking(ours, False)
        try:
            shown = os.read(ours, 10_000)
        except BlockingIOError:
            shown = b""
    os.close(ours)
    assert (b"train-" in shown and b"100%" in shown) is progress


@pytest.mark.parametrize("key", ["../../etc/x", "/etc/x", "0"])
def test_hostile_keys_are_refused(cache_dir: Path, tmp_path: Path, s3: S3Server, key: str) -> None:
    s3.put("bucket", f"train/{key}", b"hostile")
    with pytest.raises(StagingError, match=f"refused {re.escape(repr(key))}"):
        stage(URL, storage_options=s3.storage_options)
    assert s3.gets() == 0
    assert staged(cache_dir) == {}


@pytest.mark.parametrize("name", ["../../etc/x", "a/../../x", "/etc/x", "a//b", "./x", "a/./b", "..", "a/", "", "a\0b"])
def test_names_that_do_not_stay_inside(name: str) -> None:
    with pytest.raises(StagingError, match=re.escape(f"refused {name!r}: a path is relative")):
        listing.refuse_hostile("url", ["good", name])


def test_names_that_cannot_be_together() -> None:
    with pytest.raises(StagingError, match="refused 'a/b', which is a file and a folder"):
        listing.refuse_hostile("url", ["a/c", "a/b", "a/b.c", "a/b/c/d"])
    with pytest.raises(StagingError, match="refused 'x', which the listing holds more than once"):
        listing.refuse_hostile("url", ["x", "y", "x"])
    with pytest.raises(StagingError, match="'/1', '/2', '/3' and 2 more"):
        listing.refuse_hostile("url", [f"/{i}" for i in range(1, 6)])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/none", "there is nothing"),
        ("s3://no-bucket", "bucket does not exist"),
        ("nothing://x", "Protocol not known"),
        ("/no/such/folder", "No such file"),
    ],
)
def test_sources_that_are_not_there(cache_dir: Path, s3: S3Server, url: str, message: str) -> None:
    with pytest.raises(StagingError, match=message):
        stage(url, storage_options=s3.storage_options if url.startswith("s3") else None)


def test_an_empty_listing_removes_nothing(cache_dir: Path, near: Path) -> None:
    stage(near)
    shutil.rmtree(near)
    near.mkdir()
    with pytest.raises(StagingError, match="there is nothing"):
        stage(near)
    assert content(stage(near, offline=True)) == EXPECTED


def test_space_is_looked_at_before_the_first_byte(cache_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    size = shutil.disk_usage(tmp_path).total + (1 << 30)
    try:
        for number in range(4):  # sparse files; one alone may be more than the file system takes
            with open(source / f"{number}.bin", "wb") as file:
                file.truncate(size)
    except OSError as error:
        pytest.skip(f"no file is larger than this disk: {error}")
    with pytest.raises(StagingError, match=r"needs [\d.]+ GB more in .*/staged, and [\d.]+ GB are free there: make"):
        stage(str(source))
    assert staged(cache_dir) == {}
    assert list((cache_dir / "staged").glob("*.stage/parts/*")) == []


@as_root
def test_a_disk_that_fills_up_meanwhile(cache_dir: Path, s3: S3Server) -> None:
    mounted(cache_dir, "size=1m")
    filler = cache_dir / "filler"

    def fill(environ: dict[str, Any]) -> None:
        if environ["PATH_INFO"].endswith("0.bin") and not filler.exists():
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass

    s3.intercept = fill
    try:
        with pytest.raises(StagingError, match=r"cannot be written.*No space left on device.*what was fetched is kept"):
            stage(URL, storage_options=s3.storage_options, workers=1)
        kept = staged(cache_dir)
        assert kept.keys() >= {"large.bin"} and "0/0.bin" not in kept
        assert all(EXPECTED[name] == data for name, data in kept.items())
        filler.unlink()
        s3.intercept = None
        assert content(stage(URL, storage_options=s3.storage_options)) == EXPECTED
    finally:
        subprocess.run(["umount", "-l", str(cache_dir)], check=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path, near: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match="cannot be written"):
        stage(near, tmp_path / "file")


def test_arguments() -> None:
    with pytest.raises(ValueError, match="workers=0"):
        stage("s3://bucket", workers=0)
    assert issubclass(StagingError, OSError)
    assert "StagingError" in errors.__all__


def corrupting(server: S3Server, name: str, times: int) -> None:
    """Makes the server give other bytes of the right number for a file, so many times."""
    left = [times]

    def intercept(environ: dict[str, Any]) -> tuple[str, bytes] | None:
        if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith(name) or not left[0]:
            return None
        left[0] -= 1
        first, last = map(int, environ["HTTP_RANGE"].removeprefix("bytes=").split("-"))
        return "206 Partial Content", b"?" * (last + 1 - first)

    server.intercept = intercept


def test_a_wrong_sum_is_fetched_once_more(cache_dir: Path, s3: S3Server) -> None:
    corrupting(s3, "large.bin", 1)
    assert content(stage(URL, storage_options=s3.storage_options)) == EXPECTED
    assert s3.gets() == len(FILES) + 5 + 5


def test_a_sum_that_stays_wrong_is_an_error(cache_dir: Path, s3: S3Server) -> None:
    name = "large.bin"
    corrupting(s3, name, 100)
    with pytest.raises(StagingError, match=f"{name}: its MD5 is .*, and {hashlib.md5(EXPECTED[name]).hexdigest()}"):
        stage(URL, storage_options=s3.storage_options)
    assert name not in staged(cache_dir)
    s3.intercept = None
    assert content(stage(URL, storage_options=s3.storage_options)) == EXPECTED


def test_without_verify_sums_are_not_looked_at(cache_dir: Path, s3: S3Server) -> None:
    corrupting(s3, "0/0.bin", 100)
    assert content(stage(URL, storage_options=s3.storage_options, verify=False))["0/0.bin"] == b"?" * 10


def test_tags_of_encrypted_objects_are_no_sums(cache_dir: Path, s3: S3Server) -> None:
    s3.put("bucket", "train/0/0.bin", FILES["0/0.bin"], encryption="aws:kms", etag="0" * 32)
    assert content(stage(URL, storage_options=s3.storage_options)) == EXPECTED
    assert [path for method, path, _ in s3.requests if method == "HEAD"] == ["/bucket/train/0/0.bin"]


def test_objects_that_were_uploaded_in_parts(cache_dir: Path, s3: S3Server) -> None:
    etag, options = "0" * 32 + "-3", {"storage_options": s3.storage_options, "include": "large.bin"}
    s3.put("bucket", "train/large.bin", LARGE, etag=etag)
    folder = stage(URL, **options)
    recorded = json.loads((folder.with_name(folder.name + ".stage") / "manifest.json").read_bytes())
    assert recorded["files"]["large.bin"]["version"] == f"ETag {etag}"

    def replace(environ: dict[str, Any]) -> None:
        if environ["REQUEST_METHOD"] == "HEAD":  # which comes after the last piece
            s3.put("bucket", "train/large.bin", b"x" * len(LARGE))

    s3.put("bucket", "train/large.bin", LARGE[::-1], etag="1" * 32 + "-3")
    s3.intercept = replace
    with pytest.raises(StagingError, match=r"large\.bin: it was changed while it was read; .* call again"):
        stage(URL, **options)
    assert content(folder) == {"large.bin": LARGE}  # whole, if old
    s3.intercept = None
    assert content(stage(URL, **options)) == {"large.bin": b"x" * len(LARGE)}


def test_a_store_that_is_busy(cache_dir: Path, s3: S3Server) -> None:
    answers = iter(["503 Slow Down", "500 Internal Server Error", "503 Service Unavailable"])
    s3.intercept = lambda environ: (status, b"") if (status := next(answers, None)) else None
    options = {**s3.storage_options, "config_kwargs": {"retries": {"max_attempts": 0}}}
    assert content(stage(URL, storage_options=options)) == EXPECTED


def test_a_store_that_forbids_is_asked_once(cache_dir: Path, s3: S3Server) -> None:
    denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    s3.intercept = lambda environ: ("403 Forbidden", denied) if environ["PATH_INFO"].endswith("3.bin") else None
    with pytest.raises(StagingError, match=r"bucket/train/0/3\.bin cannot be read: PermissionError"):
        stage(URL, storage_options=s3.storage_options)
    assert sum(path.endswith("3.bin") for _, path, _ in s3.requests) == 1


def test_a_web_server(cache_dir: Path, web: WebServer) -> None:
    folder = stage(f"{web.url}/data/")
    assert content(folder) == {"large.bin": LARGE, "a/small.bin": b"small", "b/empty.bin": b""}
    before = web.gets("data/large.bin")
    assert stage(f"{web.url}/data") == folder
    assert web.gets("data/large.bin") == before
    assert content(stage(f"{web.url}/data/large.bin")) == {"large.bin": LARGE}


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("fault", ["cut", "500", "short", "long"])
def test_faults_that_pass(cache_dir: Path, web: WebServer, fault: str, ranges: bool) -> None:
    web.ranges = ranges
    web.faults = {"data/large.bin": ["", fault, fault], "data/a/small.bin": [fault]}
    assert content(stage(f"{web.url}/data"))["large.bin"] == LARGE
    assert staged(cache_dir)["a/small.bin"] == b"small"
    assert web.gets("data/a/small.bin") == 2


@pytest.mark.parametrize("fault", ["cut!", "500!", "short!", "long!"])
def test_faults_that_stay(cache_dir: Path, web: WebServer, fault: str) -> None:
    web.faults = {"data/a/small.bin": [fault]}
    with pytest.raises(StagingError, match=r"data/a/small\.bin could not be read in 5 attempts, the last: .*kept"):
        stage(f"{web.url}/data", workers=1)
    assert staged(cache_dir) == {"large.bin": LARGE}
    assert web.gets("data/a/small.bin") == retry.ATTEMPTS
    before = web.gets("data/large.bin")
    web.faults = {}
    assert len(content(stage(f"{web.url}/data"))) == 3
    assert web.gets("data/large.bin") == before, "what was fetched is kept"


@pytest.mark.parametrize("status", ["404", "403"])
def test_a_file_that_is_gone_or_forbidden_is_asked_for_once(cache_dir: Path, web: WebServer, status: str) -> None:
    web.faults = {"data/a/small.bin": [status]}
    with pytest.raises(StagingError, match=r"small\.bin cannot be read"):
        stage(f"{web.url}/data")
    assert web.gets("data/a/small.bin") == 1


def test_a_large_file_goes_on_where_it_was_cut(cache_dir: Path, web: WebServer) -> None:
    web.faults = {"data/large.bin": ["", "", "", "", "cut!"]}  # the index's and the question for ranges are two
    with pytest.raises(StagingError, match=r"large\.bin could not be read"):
        stage(f"{web.url}/data/large.bin", workers=1)
    assert staged(cache_dir) == {}
    got = {limits for method, path, limits in web.requests if method == "GET" and path == "data/large.bin"}
    web.faults, web.requests = {}, []
    assert content(stage(f"{web.url}/data/large.bin")) == {"large.bin": LARGE}
    again = {limits for method, _, limits in web.requests if method == "GET" and "000-" in limits}
    assert len(again) < 5 and len(got | again) >= 5


def test_a_server_without_ranges(cache_dir: Path, web: WebServer) -> None:
    web.ranges = False
    assert content(stage(f"{web.url}/data"))["large.bin"] == LARGE
    assert web.gets("data/large.bin") == 2  # one to see whether there are ranges


def test_the_sum_that_a_web_server_gives(cache_dir: Path, web: WebServer) -> None:
    web.md5 = {"data/large.bin": hashlib.md5(LARGE).digest(), "data/a/small.bin": bytes(16)}
    web.md5["data/a/small.bin"] = hashlib.md5(b"small").digest()
    assert len(content(stage(f"{web.url}/data"))) == 3
    web.files["data/large.bin"] = LARGE[::-1]
    with pytest.raises(StagingError, match=r"large\.bin: its MD5 is"):
        stage(f"{web.url}/data")
    assert staged(cache_dir)["large.bin"] == LARGE


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(cache_dir: Path, web: WebServer) -> None:
    folder = stage(f"{web.url}/data")
    web.faults = {"data/a": ["500!"]}
    with pytest.raises(StagingError, match="could not be read in 5 attempts"):
        stage(f"{web.url}/data")
    assert len(content(folder)) == 3


def test_pauses_leave_the_global_generator_alone() -> None:
    calls = iter([OSError("once"), None])

    def call() -> str:
        if error := next(calls):
            raise error
        return "result"

    before = random.getstate()
    assert retry.with_retries("it", call, threading.Event()) == "result"
    assert random.getstate() == before
    stop = threading.Event()
    stop.set()
    with pytest.raises(retry.Cancelled):
        retry.with_retries("it", call, stop)


class Jobs:
    """Processes that stage."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("staging_job.py"))
        self.program = subprocess.Popen(
            [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, server: S3Server, cache_dir: Path, workers: int = 4) -> None:
        assert self.program.stdin is not None
        options = {"storage_options": server.storage_options, "workers": workers}
        line = {"piece_bytes": PIECE_BYTES, "url": URL, "cache_dir": str(cache_dir), "options": options}
        self.program.stdin.write(json.dumps(line) + "\n")
        self.program.stdin.flush()

    def reports(self, count: int) -> list[dict[str, Any]]:
        """The next reports, from any of them."""
        assert self.program.stdout is not None
        return [json.loads(self.program.stdout.readline()) for _ in range(count)]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.program.communicate()


class Gate:
    """Holds the server's answer number ``at`` back until it is opened."""

    def __init__(self, server: S3Server, at: int, answer: tuple[str, bytes] | None = None) -> None:
        self.at, self.answer = at, answer
        self.reached, self.opened = threading.Event(), threading.Event()
        self.count, self.lock = 0, threading.Lock()
        server.intercept = self

    def __call__(self, environ: dict[str, Any]) -> tuple[str, bytes] | None:
        with self.lock:
            self.count += 1
            held = self.count == self.at
        if not held:
            return None
        self.reached.set()
        assert self.opened.wait(60)
        return self.answer


@pytest.mark.parametrize("fetched", [2, 8])
def test_killed_in_the_middle(cache_dir: Path, s3: S3Server, jobs: Jobs, fetched: int) -> None:
    gate = Gate(s3, at=fetched + 2)  # the first is the listing
    jobs.start(s3, cache_dir, workers=1)
    assert gate.reached.wait(60)
    (lock,) = (cache_dir / "staged").glob("*.stage/lock")
    os.kill(holder(lock), signal.SIGKILL)
    gate.opened.set()
    found = staged(cache_dir)
    assert all(EXPECTED[name] == data for name, data in found.items())
    with pytest.raises(StagingError, match="no whole copy"):
        stage(URL, cache_dir, storage_options=s3.storage_options, offline=True)
    assert len(found) == max(0, fetched - 4)  # the large one has five pieces
    before = s3.gets()
    assert content(stage(URL, cache_dir, storage_options=s3.storage_options)) == EXPECTED
    assert s3.gets() - before == len(FILES) + 5 - fetched
    assert list((cache_dir / "staged").glob("*.stage/parts/*")) == []


def test_killed_while_a_copy_was_brought_up_to_date(cache_dir: Path, s3: S3Server, jobs: Jobs) -> None:
    folder = stage(URL, storage_options=s3.storage_options)
    changed = {"large.bin": LARGE[::-1], "0/0.bin": b"new"}
    for name, data in changed.items():
        s3.put("bucket", f"train/{name}", data)
    s3.delete("bucket", "train/2/2.bin")
    gate = Gate(s3, at=5)
    jobs.start(s3, cache_dir, workers=1)
    assert gate.reached.wait(60)
    (lock,) = (cache_dir / "staged").glob("*.stage/lock")
    os.kill(holder(lock), signal.SIGKILL)
    gate.opened.set()
    assert content(folder)["large.bin"] == LARGE  # the old one, whole
    with pytest.raises(StagingError, match="no whole copy"):
        stage(URL, storage_options=s3.storage_options, offline=True)
    before = s3.gets()
    stage(URL, storage_options=s3.storage_options)
    assert s3.gets() - before == 6 - 3
    assert content(folder) == {name: data for name, data in EXPECTED.items() if name != "2/2.bin"} | changed


def holder(lock: Path) -> int:
    """The process that holds a lock, by the kernel."""
    inode = lock.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" not in fields and fields[5].rpartition(":")[2] == str(inode):
            return int(fields[4])
    raise AssertionError("nobody holds the lock")


def test_eight_processes_and_one_download(cache_dir: Path, s3: S3Server, jobs: Jobs) -> None:
    gate = Gate(s3, at=1)
    for _ in range(8):
        jobs.start(s3, cache_dir)
    waiting = jobs.reports(7)
    assert {text for report in waiting for text in [report["message"]]} == {
        f"{URL}: another process stages it already; waiting for it"
    }
    assert len({report["pid"] for report in waiting}) == 7
    gate.opened.set()
    done = jobs.reports(8)
    assert {report["folder"] for report in done} == {str(stage(URL, storage_options=s3.storage_options, offline=True))}
    assert len({report["pid"] for report in done}) == 8
    assert staged(cache_dir) == EXPECTED
    assert (s3.listings(), s3.gets()) == (1, len(FILES) + 5)


def test_a_loser_takes_over_when_the_winner_dies(cache_dir: Path, s3: S3Server, jobs: Jobs) -> None:
    gate = Gate(s3, at=4)
    for _ in range(3):
        jobs.start(s3, cache_dir, workers=1)
    waiting = {report["pid"] for report in jobs.reports(2)}
    assert gate.reached.wait(60)
    (lock,) = (cache_dir / "staged").glob("*.stage/lock")
    winner = holder(lock)
    assert winner not in waiting
    os.kill(winner, signal.SIGKILL)
    gate.opened.set()
    assert {report["pid"] for report in jobs.reports(2)} == waiting
    assert staged(cache_dir) == EXPECTED
    assert (s3.listings(), s3.gets()) == (2, len(FILES) + 5 + 1)  # one was on its way when the winner died


def test_a_failure_reaches_all_who_wait(cache_dir: Path, s3: S3Server, jobs: Jobs) -> None:
    denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    gate = Gate(s3, at=4, answer=("403 Forbidden", denied))
    for _ in range(3):
        jobs.start(s3, cache_dir, workers=1)
    jobs.reports(2)
    gate.opened.set()
    failures = sorted(report["error"] for report in jobs.reports(3))
    assert all("train/large.bin cannot be read: PermissionError" in text for text in failures)
    assert sum("the process that staged for this one failed" in text for text in failures) == 2
    assert (s3.listings(), s3.gets()) == (1, 3)
    assert content(stage(URL, storage_options=s3.storage_options)) == EXPECTED, "a later call begins anew"


def test_nothing_is_logged_as_a_warning(cache_dir: Path, near: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchcache"):
        stage(near)
    assert caplog.records == []

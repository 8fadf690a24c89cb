"""Ctrl-C, signal handlers and forks at any moment, and descriptors that something else closes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Source, as_root, assert_same, image_and_label, other_owner

from torchcache import CacheBypassWarning, CachedDataset, location, section, waiting
from torchcache.section import Section

HERE = Path(__file__).parent


@pytest.mark.parametrize("scenario", ["items", "batches", "handlers", "fork", "forks", "loaders"])
def test_any_moment(tmp_path: Path, scenario: str) -> None:
    env = {**os.environ, "CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    warnings = ["-W", "error", "-W", "ignore::ResourceWarning"]  # of what Ctrl-C has left open in the source
    command = [sys.executable, *warnings, str(HERE / "interrupted_job.py"), scenario, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["", ">&- 2>&-", "<&- >&- 2>&-"])
def test_descriptors_that_are_closed(tmp_path: Path, closed: str) -> None:
    scenario = "output" if closed else "descriptors"
    env = {**os.environ, "CACHE_DIR": str(tmp_path / "cache")}
    command = f"exec {sys.executable} {HERE / 'interrupted_job.py'} {scenario} {tmp_path} {closed}"
    done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    if closed:
        assert (tmp_path / "names").read_text() == "{1: '/dev/null', 2: '/dev/null'}"
    else:
        assert "CacheBypassWarning" in done.stderr


@pytest.fixture
def handled() -> Iterator[list[str]]:
    """What a handler of SIGUSR1 has been called for, which is written here by the test."""
    called: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append("handler"))
    yield called
    signal.signal(signal.SIGUSR1, before)


def test_handlers_are_called_at_the_end_of_the_outermost_section(handled: list[str]) -> None:
    lock, inner = Section(), Section()
    handler = signal.getsignal(signal.SIGUSR1)
    with lock:
        with inner, lock:
            os.kill(os.getpid(), signal.SIGUSR1)
            handled.append("inner")
        handled.append("outer")
    assert handled == ["inner", "outer", "handler"]
    assert signal.getsignal(signal.SIGUSR1) is handler
    os.kill(os.getpid(), signal.SIGUSR1)
    assert handled[3:] == ["handler"]


def test_ctrl_c_is_raised_where_the_section_ends() -> None:
    lock, done = Section(), []
    with pytest.raises(KeyboardInterrupt), lock:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        done.append(1)
    assert done == [1]
    assert lock.acquire(blocking=False)
    lock.release()
    with lock:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            section.interrupt()
        section.interrupt()  # it was raised


def test_handlers_are_called_while_another_thread_has_the_section(handled: list[str]) -> None:
    lock, taken, free = Section(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            free.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    signal.signal(signal.SIGUSR1, lambda *_: free.set())
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    with lock:
        pass
    thread.join()


def test_other_threads_leave_the_handlers_alone() -> None:
    lock, handler = Section(), signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def enter() -> None:
        with lock:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(cache_dir: Path) -> None:
    reading, forked = threading.Event(), threading.Event()

    class Fails:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            if index == 3:
                reading.set()
                forked.wait()
                raise ValueError("a broken image")
            return index

    cached = CachedDataset(Fails(), key="fails")

    def read() -> None:
        with pytest.raises(ValueError, match="a broken image"):
            cached[3]

    thread = threading.Thread(target=read)
    thread.start()
    reading.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # half of what it would wait for itself
        forked.set()
        status = 1
        try:
            read()
            status = 0
        finally:
            os._exit(status)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_stopped_owner_delays_once(cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = CachedDataset(source, claim_timeout_s=0.2)
    cached[0]
    stopped = other_owner(cached, list(range(10, 30)))
    waits = []
    wait = waiting.Waiting.wait
    monkeypatch.setattr(waiting.Waiting, "wait", lambda *arguments: waits.append(1) or wait(*arguments))  # type: ignore[func-returns-value]
    for first in range(10, 30, 5):
        indices = list(range(first, first + 5))
        assert_same(list(cached.__getitems__(indices)), [image_and_label(i) for i in indices])
    assert len(waits) <= 2  # once in vain, as joining the others is a change of the log, too
    stopped.release()


def test_two_datasets_of_one_store_do_not_wait_for_each_other(cache_dir: Path, source: Source) -> None:
    first, second = CachedDataset(source, check=0), CachedDataset(source, check=0)
    for i in range(20):
        assert_same(first[i], second[i])
    assert source.reads().total() == 20
    first.close()
    second.close()


def as_another_user(use: Any) -> None:
    """Runs a function in a child that has no name, no home and no rights."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setgid(54321)
            os.setuid(54321)
            use()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder in which everybody may write; pytest's own are the user's alone."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@as_root
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    expected = Path(tempfile.gettempdir()) / "torchcache-54321"

    def use() -> None:
        assert location.cache_folder(None) == expected
        with CachedDataset([1, 2, 3], key="k") as cached:
            assert [cached[i] for i in range(3)] == [1, 2, 3]
        assert cached.path.parent == expected
        expected.chmod(0o777)
        with pytest.raises(OSError, match="not this user's own folder"):
            location.cache_folder(None)

    try:
        as_another_user(use)
    finally:
        shutil.rmtree(expected, ignore_errors=True)


@as_root
def test_a_folder_without_permission(anybodys: Path) -> None:
    cached = CachedDataset([1, 2, 3], key="k", cache_dir=anybodys)
    cached.fill(progress=False)
    cached.close()
    cached.path.chmod(0o700)

    def use() -> None:
        with pytest.warns(CacheBypassWarning, match="cannot be"):
            others = CachedDataset([1, 2, 3], key="k", cache_dir=anybodys)
            assert [others[i] for i in range(3)] == [1, 2, 3]

    as_another_user(use)


@as_root
def test_no_more_threads(anybodys: Path) -> None:
    cached = CachedDataset(list(range(20)), key="k", cache_dir=anybodys)

    def use() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        assert [cached[i] for i in range(20)] == list(range(20))
        assert cached.stats.samples_cached == 20

    as_another_user(use)

"""The command, run as a process: what it prints, its exit status, and what it does."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Source

from torchcache import CachedDataset, cli

LENGTH = 200
TRAIN = """
import os, sys
from pathlib import Path
from torchcache import CachedDataset
from helpers import Source

def dataset():
    return Source(200, Path(os.environ["READS"]))

def cached():
    return CachedDataset(dataset(), name="mine", key="k")

def other():
    return Source(200, Path(os.environ["READS"]), lambda i: (i, i))

def broken():
    raise ValueError("no such bucket")

def number():
    return 3

class Failing(Source):
    def __getitem__(self, index):
        if index == 150:
            raise OSError("the bucket is away")
        return super().__getitem__(index)

def failing():
    return CachedDataset(Failing(200, Path(os.environ["READS"])), name="failing", key="k")

def unknown():
    return [open(os.devnull)]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> Path:
    """A user's folder with a module in it, in which the command is run."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "broken_import.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("READS", str(tmp_path / "reads"))
    return folder


def command(arguments: tuple[Any, ...], output: int, errors: int, before: Callable[[], object]) -> int:
    """Runs the command in a process of its own, forked from this one, which has loaded PyTorch already."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.dup2(output, 1)
            os.dup2(errors, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            sys.argv = ["torchcache", *map(str, arguments)]
            warnings.resetwarnings()
            before()
            try:
                cli.main()
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 98
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(*arguments: str | Path, status: int = 0, before: Callable[[], object] = lambda: None) -> tuple[str, str]:
    """Output and errors of the command, which has to end with a status, and never with a traceback."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        found = command(arguments, out.fileno(), err.fileno(), before)
        output, errors = [(file.seek(0), file.read())[1] for file in (out, err)]
    assert found == status, f"{found}: {output}{errors}"
    assert "Traceback" not in errors
    assert "\x1b" not in output + errors  # no terminal, no colours
    return output, errors


def as_json(*arguments: str | Path, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status)[0])


def on_a_terminal(*arguments: str, columns: int) -> str:
    """What the command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    output: list[bytes] = []
    reading = threading.Thread(target=lambda: output.extend(iter(lambda: read(ours), b"")))
    reading.start()
    assert command(arguments, theirs, theirs, lambda: None) == 0
    os.close(theirs)
    reading.join()
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(output).decode()).replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the other end is closed
        return b""


def filled(source: Any, **options: Any) -> Path:
    with CachedDataset(source, **options) as cached:
        cached.fill(progress=False)
    return cached.path


def test_fill_resumes_and_is_used_by_training(project: Path, source: Source) -> None:
    with CachedDataset(source, name="mine", key="k") as cached:
        cached.fill(progress=False, indices=range(150))
    out, err = run("fill", "train:cached")
    assert re.search(r"mine-k: 200 of 200 samples, [\d.]+ KiB, 20[01] source reads in", out)
    assert err == ""  # no terminal, no bar
    assert sum(source.reads().values()) <= LENGTH + 1
    assert CachedDataset(source, name="mine", key="k").complete


def test_fill_with_workers_and_another_folder(project: Path, tmp_path: Path) -> None:
    found = as_json("fill", "train:dataset", "--workers", "2", "--cache-dir", tmp_path / "elsewhere")
    assert (found["complete"], found["stats"]["samples_cached"], found["length"]) == (True, LENGTH, LENGTH)
    assert Path(found["path"]).parent == tmp_path / "elsewhere"


def test_fill_on_a_terminal_has_a_bar(project: Path) -> None:
    output = on_a_terminal("fill", "train:cached", columns=100)
    assert re.search(r"100%.*200/200 .*samples/s", output)
    assert "mine-k: 200 of 200 samples" in output.replace("\n", " ")


def test_ls_and_info(project: Path, source: Source) -> None:
    assert "no stores" in run("ls")[0]
    path = filled(source, name="a_rather_long_name_for_a_dataset_of_images", key="0123456789abcdef0123456789abcdef")
    with CachedDataset(source, name="half", key="k") as half:
        half.fill(progress=False, indices=range(50))
    damaged = filled(source, name="damaged", key="k")
    os.truncate(damaged / "data.mdb", 20_000)
    out = run("ls")[0]
    line = next(line for line in out.splitlines() if path.name in line)
    assert "complete" in line and "200/200" in line
    assert re.search(r"half-k +partial +50/200", out)
    assert re.search(r"damaged-k +damaged", out) and "it was truncated" in out
    assert "3 stores, " in out
    listed = {Path(info["path"]).name: info for info in as_json("ls")}
    assert (listed["half-k"]["state"], listed["half-k"]["samples"], listed["half-k"]["source_reads"]) == (
        "partial",
        50,
        50,
    )
    out = run("info", "half")[0]
    assert re.search(r"dataset +helpers.Source", out) and re.search(r"samples +50 of 200", out)
    assert re.search(r"\[0\] +tensor +float32 +\[3, 4, 4\] +9.4 KiB", out)
    told = as_json("info", path)
    assert told["contents"]["sealed"] is True and told["store"]["key"] == "0123456789abcdef0123456789abcdef"
    assert "it was truncated" in run("info", "damaged", status=1)[0]


def test_ls_on_a_narrow_terminal_loses_nothing(project: Path, source: Source) -> None:
    path = filled(source, name="a_rather_long_name_for_a_dataset_of_images", key="0123456789abcdef0123456789abcdef")
    with CachedDataset(source, name="another", key="k") as cached:
        cached[0]
        output = on_a_terminal("ls", columns=60)
        assert f"{path.name}\n  state: complete\n  samples: 200/200\n" in output.replace(" \n", "\n")
        assert "  used by: 1 filling" in output
        lines = on_a_terminal("ls", columns=110).splitlines()[:-1]
    assert max(map(len, lines)) <= 110
    assert path.name in "".join(line.split()[0] for line in lines if line[:1].strip())
    assert any(re.search(r"in use|filling", line) for line in lines)


def test_verify(project: Path, source: Source) -> None:
    path = filled(source, name="mine", key="k")
    other = filled(source, name="other", key="k")
    data = bytearray((other / "data.mdb").read_bytes())
    out = run("verify")[0]
    assert re.search(r"mine-k: ok. 200 of 200 samples, \d+ blocks", out) and "other-k: ok." in out
    out = run("verify", "--source", "train:cached")[0]
    assert "200 samples are those of the source" in out and "other" not in out
    data[len(data) // 2] ^= 1
    (other / "data.mdb").write_bytes(data)
    out = run("verify", status=1)[0]
    assert "mine-k: ok." in out and re.search(r"other-k: .*(checksum|damaged|index)", out)
    found = as_json("verify", "mine", "--source", "train:other", "--samples", "5", status=1)
    assert "is not what its source gives now" in found[0]["problem"]
    assert found[0]["path"] == str(path)


def test_warm_rm_and_prune(project: Path, source: Source) -> None:
    for name in ("one", "two", "three"):
        filled(source, name=name, key="k")
    assert "one-k: " in run("warm", "one")[0]
    with CachedDataset(source, name="one", key="k") as cached:
        cached[0]
        out = run("rm", "one-k", "tw", status=1)[0]
        assert "one-k is in use: a process has it open" in out and "two-k: removed" in out
        out = run("prune", "--max-bytes", "1K", "--dry-run")[0]
        assert re.search(r"three-k +least recently used", out) and "1 would be removed" in out and "one-k" not in out
        assert len(as_json("prune", "--older-than", "0s")["removed"]) == 1
        assert [p.name for p in cached.path.parent.iterdir()] == ["one-k"]
        assert "one-k: removed" in run("rm", "--force", cached.path)[0]
    assert "no stores" in run("ls")[0]


def test_misuse(project: Path, source: Source) -> None:
    filled(source, name="mine", key="k")
    filled(source, name="mine2", key="k")
    for arguments, message in [
        (("info", "nothing"), "there is no store 'nothing'"),
        (("rm", "mine"), "may be any of these: mine-k, mine2-k"),
        (("rm", "/etc"), "there is no store '/etc'"),
        (("prune", "--max-bytes", "many"), "'many' is not a size"),
        (("prune", "--older-than", "7"), "'7' is not a time"),
        (("fill", "train"), "is not MODULE:FACTORY"),
        (("fill", "train:nothing"), "train has no nothing"),
        (("fill", "broken_import:x"), f"No module named 'nothing_of_that_name' ({project / 'broken_import.py'}:1)"),
        (("fill", "nothing_of_that_name:x"), "No module named 'nothing_of_that_name'\n"),
        (("fill", "train:Failing"), "missing 2 required positional arguments: 'length' and 'log'\n"),
        (("fill", "train:broken"), "ValueError: no such bucket (" + str(project / "train.py")),
        (("fill", "train:number"), "cannot be cached"),
        (("fill", "train:unknown"), "key="),
        (("dance",), "No such command 'dance'"),
    ]:
        out, err = run(*arguments, status=2)
        assert message in err, arguments
        assert out == ""


def test_an_error_of_the_source(project: Path) -> None:
    _, err = run("fill", "train:failing", status=1)
    assert re.search(r"reading train:failing raised OSError: the bucket is away \(.*train.py:\d+\)", err)
    assert as_json("ls")[0]["samples"] == 150


def test_doctor(project: Path, tmp_path: Path, cache_dir: Path) -> None:
    found = {finding["what"]: finding for finding in as_json("doctor")}
    assert {"folder", "locks", "file system", "space", "page cache", "boot id", "versions"} <= set(found)
    assert not cache_dir.exists()
    (tmp_path / "file").touch()
    out = run("doctor", "--cache-dir", tmp_path / "file", status=1)[0]
    assert "is a file" in out and "Choose another folder" in out

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))

    limited = run("doctor", before=limit)[0]
    assert re.search(r"open files \(ulimit -n\) +note +100", limited) and "ulimit -n 4096" in limited
    assert re.search(r"file size \(ulimit -f\) +note", limited)


def test_it_is_a_module(project: Path, source: Source) -> None:
    path = filled(source)
    done = subprocess.run(
        [sys.executable, "-m", "torchcache", "ls", "--json"], capture_output=True, text=True, check=True
    )
    assert [info["path"] for info in json.loads(done.stdout)] == [str(path)]


def test_stage_in_shards(project: Path, tmp_path: Path, cache_dir: Path) -> None:
    bucket = tmp_path / "bucket"
    (bucket / "train").mkdir(parents=True)
    for number in range(5):
        (bucket / "train" / f"{number}.bin").write_bytes(bytes(number))
    copy = Path(run("stage", bucket)[0].strip())
    assert copy.is_relative_to(cache_dir)
    assert sorted(file.name for file in copy.rglob("*.bin")) == ["0.bin", "1.bin", "2.bin", "3.bin", "4.bin"]
    assert run("stage", bucket, "--offline")[0].strip() == str(copy)
    shards = [Path(as_json("stage", bucket, tmp_path / "there", "--shard", f"{k}/2")["path"]) for k in (0, 1)]
    assert all(shard.is_relative_to(tmp_path / "there") for shard in shards)
    names = [{file.name for file in shard.rglob("*.bin")} for shard in shards]
    assert names == [{"0.bin", "2.bin", "4.bin"}, {"1.bin", "3.bin"}]
    assert run("ls") == (f"no stores under {cache_dir}\n", "")
    for arguments, message in (
        (("--shard", "2/2"), "'2/2' is not a shard"),
        (("--shard", "auto"), "auto under torchrun"),
        (("--option", "x"), "is not NAME=VALUE"),
    ):
        assert message in run("stage", bucket, *arguments, status=2)[1]
    assert "none of 5 files is selected" in run("stage", bucket, "--include", "*.jpg", status=1)[1]


def torchrun(node: int) -> Callable[[], None]:
    """As torchrun starts the one process of a node of two."""
    told = {"WORLD_SIZE": 2, "RANK": node, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 2, "GROUP_RANK": node}
    return lambda: os.environ.update({name: str(value) for name, value in told.items()})


def test_each_node_fills_and_stages_its_part(project: Path, tmp_path: Path, source: Source) -> None:
    (tmp_path / "bucket").mkdir()
    for number in range(3):
        (tmp_path / "bucket" / str(number)).touch()
    staged = []
    for node in (0, 1):
        there = tmp_path / f"node-{node}"
        run("fill", "train:dataset", "--cache-dir", there, before=torchrun(node))
        out, _ = run("stage", tmp_path / "bucket", there, "--shard", "auto", before=torchrun(node))
        staged.append({file.name for file in Path(out.strip()).iterdir()})
    assert staged == [{"0", "2"}, {"1"}]
    assert source.reads() == Counter(range(LENGTH))

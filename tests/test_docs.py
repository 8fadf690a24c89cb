"""The documentation: its Python runs, its commands exist, its links lead somewhere, nothing is left out.

The Python blocks of a page are one program, run block by block in a folder of its own. What a block would need around
it (a dataset, a transform) comes from ``GIVEN``. A ``text`` block directly after a Python block is what that prints. A
block that cannot run here has a comment before it that says why: ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import shlex
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from s3_server import S3Server
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import FakeData
from torchvision.transforms import v2

import torchcache
import torchcache.distributed

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (.*?)\s*-->$")
FENCE = re.compile(r"( *)```(\w*)(.*)$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
EPOCHS = 2
FOLDERS_NAMED = "/cache/"  # in the pages; moved into the temporary folder
# Commands of the shell blocks, beside those that are looked up.
COMMANDS = {"pip", "export", "git", "cd", "df", "du"}
SUBCOMMANDS = {"ls", "info", "fill", "verify", "warm", "rm", "prune", "stage", "doctor"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: what stands after the fence.
        text: its lines, without the indentation of the fence.
        line: number of its first line in the page, from 1.
        reason: why it is not run; ``None``: it is run.
        output: what it prints, if the page says so.
    """

    language: str
    text: str
    line: int
    reason: str | None
    output: str | None


def blocks(page: Path) -> list[Block]:
    lines = page.read_text().splitlines()
    found: list[Block] = []
    start, end = 0, -1
    while start < len(lines):
        fence = FENCE.match(lines[start])
        if fence is None:
            start += 1
            continue
        before, previous = [line for line in lines[end + 1 : start] if line.strip()], end
        end = next(i for i in range(start + 1, len(lines)) if lines[i].strip() == "```")
        text = textwrap.dedent("\n".join(lines[start + 1 : end])) + "\n"
        reason = NOT_RUN.match(before[-1].strip()) if before else None
        if fence[2] == "text" and not before and previous >= 0 and found[-1].language == "python":
            found[-1] = Block(**{**vars(found[-1]), "output": text})
        found.append(Block(fence[2], text, start + 2, reason[1] if reason else None, None))
        start = end + 1
    return found


def mnist(folder: Path) -> dict[str, Any]:
    """MNIST's files with 64 samples, where the page would download them to."""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = np.zeros((64, 28, 28), np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            np.array([0x803, *images.shape], ">i4").tobytes() + images.tobytes()
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(np.array([0x801, 64], ">i4").tobytes() + bytes(64))
    return {}


def image_folder(folder: Path) -> dict[str, Any]:
    """A folder of 16 images of 2 classes."""
    for i in range(16):
        path = folder / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        v2.functional.to_pil_image(torch.full((3, 40, 40), i, dtype=torch.uint8)).save(path)
    return {"root": folder / "images"}


def pipeline(folder: Path) -> dict[str, Any]:
    from torchvision.datasets import ImageFolder

    steps = v2.Compose([v2.ToImage(), v2.Resize(32), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
    return {
        "pipeline": steps,
        "ImageFolder": ImageFolder,
        "apply_to_image": OnImage,
        "Subset": torch.utils.data.Subset,
        **image_folder(folder),
    }


class OnImage:
    """Applies a transform to the image of an (image, label) sample."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, sample: Any) -> Any:
        return self.transform(sample[0]), sample[1]


def images(folder: Path) -> dict[str, Any]:
    return {
        "dataset": FakeData(96, (3, 32, 32), transform=v2.Compose([v2.ToImage(), v2.ToPureTensor()])),
        "augment": OnImage(v2.RandomHorizontalFlip()),
        "DataLoader": DataLoader,
        "torch": torch,
    }


def readme(folder: Path) -> dict[str, Any]:
    return {**mnist(folder), **images(folder), **pipeline(folder), "DistributedSampler": DistributedSampler}


def distributed(folder: Path) -> dict[str, Any]:
    return {
        "source": TensorDataset(torch.arange(64.0), torch.arange(64)),
        "epochs": EPOCHS,
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "CachedDataset": torchcache.CachedDataset,
    }


class Client:
    """An object store's, which has a lock and connections and so cannot be identified."""

    def __init__(self) -> None:
        self.connection = (byte for byte in b"")

    def get(self, url: str) -> bytes:
        return f"the bytes of {url}".encode()


class Scan:
    def __init__(self, volume: torch.Tensor, spacing: float) -> None:
        self.volume, self.spacing = volume, spacing


GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": readme,
    "choosing.md": lambda folder: {**images(folder), **image_folder(folder)},
    "errors.md": lambda folder: {**pipeline(folder), "client": Client()},
    "fidelity.md": lambda folder: {"torchcache": torchcache, "Scan": Scan, **images(folder)},
    "nodes.md": distributed,
    "one-node.md": lambda folder: {**images(folder), "epochs": EPOCHS},
    "from-mindspore.md": lambda folder: {**images(folder), **image_folder(folder)},
    "from-modelarts.md": lambda folder: {**images(folder), **image_folder(folder)},
    "staging.md": lambda folder: {**pipeline(folder), "to_tensor": v2.ToImage()},
}


@pytest.fixture
def object_store(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket that the page on staging speaks of."""
    if page.name != "staging.md":
        yield
        return
    folder = image_folder(tmp_path)["root"]
    with S3Server() as server:
        for image in folder.rglob("*.png"):
            server.put("bucket", f"imagenet/train/{image.relative_to(folder)}", image.read_bytes())
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "any")
        yield


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, in which what belongs under torchrun runs too."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "ranks"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers are forked: what a page defines is in no file that another process could import."""
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("fork", force=True)
    yield
    torch.multiprocessing.set_start_method(before, force=True)


def runs(page: Path) -> bool:
    return any(block.language == "python" and block.reason is None for block in blocks(page))


@pytest.mark.usefixtures("cache_dir", "one_rank", "forking", "object_store")
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(GIVEN.get(page.name, lambda _: {})(folder))
    for block in blocks(page):
        if block.language != "python" or block.reason is not None:
            continue
        text = "\n" * (block.line - 1) + block.text.replace(FOLDERS_NAMED, f"{tmp_path}/")
        linecache.cache[str(page)] = (len(text), None, text.splitlines(keepends=True), str(page))
        with redirect_stdout(StringIO()) as printed:
            exec(compile(text, str(page), "exec"), vars(module))
        if block.output is not None:
            assert printed.getvalue() == block.output, f"{page.name}:{block.line}"
    linecache.cache.pop(str(page), None)


def test_what_is_not_run_has_a_reason() -> None:
    lines = [line.strip() for page in PAGES for line in page.read_text().splitlines()]
    comments = [line for line in lines if line.startswith("<!--") and "not run" in line]
    assert all((match := NOT_RUN.match(line)) and len(match[1].split()) > 2 for line in comments)
    unrun = [block for page in PAGES for block in blocks(page) if block.reason is not None]
    assert len(unrun) == len(comments)  # each is directly before a block


def shell_commands(page: Path) -> Iterator[str]:
    for block in blocks(page):
        if block.language in ("bash", "shell", "sh", "console") and block.reason is None:
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                if words:
                    yield shlex.join(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for command in shell_commands(page):
        problem = what_is_wrong_with(shlex.split(command))
        assert not problem, f"{page.name}: {command}: {problem}"


def what_is_wrong_with(words: list[str]) -> str:
    scripts = [word for word in words[1:] if word.endswith(".py")]
    if words[0] in ("python", "torchrun"):
        if words[1:2] == ["-m"]:
            return "" if importlib.util.find_spec(words[2]) else "no such module"
        return "" if scripts and (ROOT / scripts[0]).exists() else "no such script"
    if words[0] == "make":
        return "" if re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M) else "no such target"
    if words[0] == "torchcache":
        return "" if words[1] in SUBCOMMANDS else "no such command"
    return "" if words[0] in COMMANDS else "unknown; if it exists everywhere, it belongs in COMMANDS"


def test_the_command_has_these_subcommands() -> None:
    done = subprocess.run([sys.executable, "-m", "torchcache", "--help"], capture_output=True, text=True, check=True)
    assert {name for name in SUBCOMMANDS if re.search(rf"\b{name}\b", done.stdout)} == SUBCOMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert sorted(re.findall(r"^ +- (\S+\.md)$", navigation, re.M)) == sorted(page.name for page in PAGES[1:])


def test_it_is_built_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr
    html = {page.name: page.read_text() for page in tmp_path.glob("*.html")}
    assert html.keys() >= {f"{page.stem}.html" for page in PAGES[1:]}
    loaded = re.compile(
        r"""<(?:script|img|iframe|link[^>]*(?:stylesheet|icon|preconnect))[^>]*(?:src|href)="?(?:https?:)?//"""
    )
    assert not [name for name, text in html.items() if loaded.search(text)]


def test_what_the_theme_would_load_later_is_off() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config and "http" not in config
    assert not re.search(
        r"^(extra_css|extra_javascript|repo_url):", config, re.M
    )  # a repo's host is asked for its stars


def test_every_error_is_explained() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "errors.md").read_text(), flags=re.M)[1:]
    explained = {section.splitlines()[0]: section for section in sections}
    assert set(torchcache.errors.__all__) <= set(explained)
    for name in torchcache.errors.__all__:
        for part in ("**Meaning.**", "**Cause.**", "**Remedy.**"):
            assert part in explained[name], f"{name} lacks {part}"


def test_every_public_name_is_in_the_reference() -> None:
    api = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: torchcache\.(?:distributed\.|fingerprint\.)?(\w+)$", api, re.M))
    assert shown == (set(torchcache.__all__) - {"__version__"}) | set(torchcache.distributed.__all__)
    assert "`torchcache.__version__`" in api


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "docs" / "examples.md").read_text(), re.M))
    assert listed == {path.name for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/from-mindspore.md"])
def test_ratios_were_measured(page: str) -> None:
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    ratios = re.findall(r"\b1/\d{2,}\b|\b0\.\d\d\b", (ROOT / page).read_text())
    assert [ratio for ratio in ratios if ratio not in measured] == []

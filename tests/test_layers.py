"""Imports go only downwards, and the public names are what they are meant to be."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchcache
from torchcache import errors

PACKAGE = Path(torchcache.__file__).parent
LAYERS = [
    {"_version", "descriptors", "errors", "packages", "pagecache", "progress", "memory", "section", "turns"},
    {"serial"},
    {"bytecode", "leaves", "provenance", "readahead", "registry", "retry"},
    {"column", "objects"},
    {"digest", "encode", "evidence", "topology"},
    {"walk"},
    {"code", "data"},
    {"fingerprint", "guard", "split"},
    {"flatten", "schema"},
    {"block", "environment", "filesystem", "folder", "listing", "location", "owner"},
    {"database", "manifest", "records", "transfer", "usage"},
    {"places", "store"},
    {"index", "items"},
    {"reader", "staging"},
    {"admission", "buffer", "compare", "indices", "messages", "packing", "partitioned", "plan", "recipe", "report"},
    {"waiting", "watch"},
    {"source"},
    {"fill", "ahead", "check"},
    {"collate", "connection", "contents"},
    {"samples"},
    {"catalog", "dataset"},
    {"delivery", "loader", "scalars"},
    {"exchange"},
    {"distributed"},
    {"__init__"},
    {"doctor", "factory"},
    {"tables"},
    {"cli"},
    {"__main__"},
]
# Within a layer, in this direction only.
WITHIN = {("folder", "environment")}
ERRORS = [cls for name in errors.__all__ if not issubclass(cls := getattr(errors, name), Warning)]


def imported(module: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "torchcache":
            found.update(alias.name if (PACKAGE / f"{alias.name}.py").exists() else "__init__" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchcache."):
            found.add((node.module or "").split(".")[1])
    return found


def test_every_module_has_a_layer() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == set().union(*LAYERS)


@pytest.mark.parametrize("module", sorted(set().union(*LAYERS)))
def test_imports_go_downwards(module: str) -> None:
    level = next(i for i, layer in enumerate(LAYERS) if module in layer)
    below = set().union(*LAYERS[:level])
    allowed = below | {target for origin, target in WITHIN if origin == module}
    assert imported(module) <= allowed


def test_one_module_knows_lmdb() -> None:
    users = [path.stem for path in PACKAGE.glob("*.py") if "import lmdb" in path.read_text()]
    assert users == ["environment"]


def test_public_names() -> None:
    assert torchcache.__all__ == sorted(torchcache.__all__)
    assert set(errors.__all__) - {"TorchcacheError"} <= set(torchcache.__all__)
    assert all(hasattr(torchcache, name) for name in torchcache.__all__)


def test_importing_loads_only_what_every_job_needs() -> None:
    others = {"torchvision", "fsspec", "s3fs", "aiohttp", "typer", "rich"}
    code = f"import sys, torchcache; sys.exit(bool({others!r} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Raises(Dataset[int]):
    def __len__(self) -> int:
        return len(ERRORS)

    def __getitem__(self, index: int) -> int:
        raise ERRORS[index]("what, which value, what to do")


def test_errors_cross_a_worker_and_a_pickle() -> None:
    raised = iter(DataLoader(Raises(), batch_size=None, num_workers=1))  # which goes on after an error
    for cls in ERRORS:
        assert str(pickle.loads(pickle.dumps(cls("text")))) == "text"
        with pytest.raises(cls, match="what, which value, what to do") as found:
            next(raised)
        assert found.type is cls


def test_all_torch_dtypes_are_known() -> None:
    from torchcache.leaves import DTYPE_NAMES

    assert {d for d in vars(torch).values() if isinstance(d, torch.dtype)} == set(DTYPE_NAMES)


def test_only_several_nodes_need_a_network() -> None:
    """The cache of one node calls no collective and opens no port."""
    words = re.compile(r"torch\.distributed|^import socket|^from socket|http\.server", re.MULTILINE)
    users = {path.stem for path in PACKAGE.glob("*.py") if words.search(path.read_text())}
    assert users <= {"__init__", "delivery", "distributed", "exchange", "messages", "partitioned", "topology"}

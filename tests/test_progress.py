"""Progress bars: who sees one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from helpers import Source

from torchcache import CachedDataset, progress


def shell(config: dict[str, object]) -> SimpleNamespace:
    """What IPython has in ``sys.modules``: in a notebook's kernel its configuration names the kernel's application."""
    return SimpleNamespace(get_ipython=lambda: SimpleNamespace(config=config))


def test_a_notebook_is_no_terminal_and_gets_a_bar(
    cache_dir: object, source: Source, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config, shown in [("log", {}, False), ("notebook", {"IPKernelApp": {}}, True)]:
        monkeypatch.setitem(sys.modules, "IPython", shell(config))
        CachedDataset(source, name=name, key="k").fill()
        assert ("200/200" in capsys.readouterr().err) is shown
        assert progress.bar(show=False).disable

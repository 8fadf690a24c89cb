"""Progress bars: on a terminal and in a notebook; silent in a log file, a pipe and a batch job."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm


def bar(*, show: bool = True, **options: Any) -> tqdm[Any]:
    """A bar, if it is wanted and somebody can see it.

    Args:
        show: whether it is wanted.
        options: tqdm's.
    """
    if not show:
        disable: bool | None = True
    else:
        # None: only where there is no terminal, for which tqdm takes a notebook, too.
        disable = False if _in_notebook() else None
    return tqdm(disable=disable, **options)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config

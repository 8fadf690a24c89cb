"""The figures that the long tests reach are printed at their end."""

from __future__ import annotations

from typing import Any

import pytest

_FIGURES: list[str] = []


@pytest.fixture
def record() -> list[str]:
    """A list to which a test appends what it has reached."""
    return _FIGURES


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("figures")
    for figure in _FIGURES:
        terminalreporter.line(figure)

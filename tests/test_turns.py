"""Threads that work in turns."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from torchcache.turns import Turns


def running(name: str) -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(name))


def test_results_come_in_the_order_of_the_groups() -> None:
    turns = Turns(3, "order")
    gate = threading.Event()

    def first() -> int:
        gate.wait()  # the second thread is done by then
        return 0

    def second() -> int:
        gate.set()
        return 1

    turns.give([first])
    turns.give([second])
    turns.give([lambda: 2, lambda: 3])
    assert len(turns) == 3
    turns.give([lambda: 4])
    assert [turns.take().values for _ in range(4)] == [[0], [1], [2, 3], [4]]
    assert len(turns) == 0
    turns.close()


def test_what_was_made_before_an_error_is_kept() -> None:
    turns = Turns(1, "error")
    turns.give([lambda: 1, lambda: 1 // 0, lambda: 3])
    turns.give([lambda: 4])
    values, error = turns.take()
    assert values == [1]
    assert isinstance(error, ZeroDivisionError)
    assert turns.take() == ([4], None)
    turns.close()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_threads_end(how: str) -> None:
    turns = Turns(2, f"end-{how}")
    for _ in range(5):
        turns.give([list])
    assert len(running(f"end-{how}")) == 2
    if how == "closed":
        turns.close()
        turns.close()
    else:
        del turns
        gc.collect()
    assert running(f"end-{how}") == []


def test_the_interpreter_ends_while_they_work() -> None:
    script = """
import torch
from torchcache.turns import Turns
turns = Turns(2, "exit")
for _ in range(8):
    turns.give([lambda: torch.rand(1000, 1000).sum()] * 20)
print(turns.take().error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("None\n", "")

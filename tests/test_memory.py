"""Memory is given again when nothing that was made of it is left, and not before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchcache.memory import LARGE_BYTES, Pool

HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "a view": lambda tensor: tensor[5:7],
    "another dtype": lambda tensor: tensor.view(torch.float64).view(2, -1)[1],
    "detached": lambda tensor: tensor.view(torch.float32).requires_grad_().detach(),
    "a storage": lambda tensor: tensor.untyped_storage(),
    "an array": lambda tensor: tensor.numpy(),
    "a view of an array": lambda tensor: tensor.numpy()[3:9].view(np.uint16),
    "a memoryview": lambda tensor: memoryview(tensor.numpy())[1:],
    "a capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    "a list of columns": lambda tensor: list(tensor.view(-1, 2).unbind(1)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_is_not_given_again(holder: str) -> None:
    pool = Pool(4)
    tensor = pool.empty(LARGE_BYTES)
    address = tensor.data_ptr()
    held = HOLDERS[holder](tensor)
    del tensor
    gc.collect()
    others = [pool.empty(LARGE_BYTES) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    del held, others
    again = [pool.empty(LARGE_BYTES) for _ in range(4)]
    assert address in [tensor.data_ptr() for tensor in again]
    assert len({tensor.data_ptr() for tensor in again}) == 4


def test_what_a_graph_saves_is_held() -> None:
    pool = Pool(1)
    weight = torch.ones(LARGE_BYTES // 4, requires_grad=True)
    values = pool.empty(LARGE_BYTES).view(torch.float32).fill_(3)
    loss = (values * weight).sum()
    del values
    pool.empty(LARGE_BYTES).fill_(0)
    loss.backward()
    assert weight.grad is not None
    assert bool((weight.grad == 3).all())


def test_only_so_many_wait() -> None:
    pool = Pool(2)
    tensors = [pool.empty(LARGE_BYTES) for _ in range(5)]
    addresses = {tensor.data_ptr() for tensor in tensors}
    del tensors
    assert len(pool._free[LARGE_BYTES]) == 2
    assert {pool.empty(LARGE_BYTES).data_ptr() for _ in range(3)} <= addresses


def test_it_is_as_torch_gives_it() -> None:
    pool = Pool(2)
    for nbytes in (0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 3):
        tensor, plain = pool.empty(nbytes), torch.empty(nbytes, dtype=torch.uint8)
        assert (tensor.dtype, tensor.shape, tensor.device) == (plain.dtype, plain.shape, plain.device)
        assert tensor.untyped_storage().nbytes() == nbytes
        assert tensor.data_ptr() % 64 == 0

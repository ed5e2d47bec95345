"""A shard's buffers: an encoded bucket stays unchanged while it is referenced, and its buffer is reused afterwards."""

from __future__ import annotations

import pytest
import torch
from table_sides import CODED, side

from gossipx.tables.parts import Storages


@pytest.mark.parametrize("storages", [Storages(), CODED])
def test_an_encoded_bucket_is_unchanged_while_referenced_and_then_reused(storages: Storages) -> None:
    here = side([torch.zeros(4)], servers=1, storages=storages)
    store = here.stores[0]
    first = store.encode(0)
    assert store.encode(0) is first  # each version is encoded once
    first.release()
    given = []
    for _ in range(5):
        here.update([torch.ones(4)])
        here.push()
        given.append(store.encode(0))
        given[-1].release()
    assert bytes(first.source.view) == bytes(16), "a sender still holds a reference"
    assert torch.frombuffer(bytearray(given[-1].source.view), dtype=torch.float32).tolist() == [-2.5] * 4
    if storages.raw_pulls:
        memory = {id(one.source.view.obj) for one in given}
        assert len(memory) == 1 and id(first.source.view.obj) not in memory
        first.release()
        here.update([torch.ones(4)])
        here.push()
        assert store.encode(0).source.view.obj is first.source.view.obj or len(store._spare._free[16]) == 1


def test_buffers_of_pushes_are_reused() -> None:
    here = side([torch.zeros(4)], servers=1)
    for _ in range(20):
        here.update([torch.ones(4)])
        here.push()
    assert {size: len(free) for size, free in here.table_store._spare._free.items()} == {16: 1}

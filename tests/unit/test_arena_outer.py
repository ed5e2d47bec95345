"""The arena with an outer optimizer, whose result enters the weights together with the steps made meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arenas import Net, model_of, same, train, values
from torch import nn

from gossipx import outer
from gossipx.errors import UsageError
from gossipx.memory import PIECE
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming

GAMMA = 0.6


def made(seed: int, rule: str | None = None, module: nn.Module | None = None, **options: Any):
    module = Net(seed) if module is None else module
    arena = ParameterArena(module, **options)
    if rule is not None:
        arena.use_outer(outer.outer_from(rule))
    return module, arena


def pull(arena: ParameterArena, model: bytes, share: float, steps: Any = lambda: None) -> None:
    """Pull a model as a driver does; ``steps`` are made between the request and the mix."""
    base = arena.snapshot()
    own = base.hold()
    steps()
    incoming = Incoming(arena, base)
    incoming.take(0, memoryview(bytearray(model)))
    assert incoming.norm() >= 0
    arena.exchanged.commit(incoming.buffer, share, own)
    own.release()
    incoming.release()


def test_every_section_gets_momentum_and_buffers_are_only_mixed() -> None:
    """x ← y_t + β (y_j − y_t) + γ (y_t − y_{t−1}), for float32 and float64 alike; BatchNorm's statistics without γ."""
    module, arena = made(0, f"momentum:{GAMMA}")
    other, theirs = made(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = values(module)
    pull(arena, model_of(theirs), 0.25)
    train(module, optimizer)
    arena.step_done()
    now, wanted = values(module), values(other)
    pull(arena, model_of(theirs), 0.25)
    for name, after in values(module).items():
        if name == "frozen" or not after.is_floating_point():
            assert torch.equal(after, now[name])
            continue
        added = 0 if name.startswith("norm.running") else GAMMA * (now[name] - before[name])
        torch.testing.assert_close(after, now[name] + 0.25 * (wanted[name] - now[name]) + added, rtol=1e-5, atol=1e-6)


def test_vectors_of_many_pieces() -> None:
    """The pass goes piece by piece; each value meets its own momentum."""
    size = 3 * PIECE // 4 + 17
    rule = f"momentum:{GAMMA}"
    module, arena = made(0, rule, nn.Linear(size, 1, bias=False))
    _, theirs = made(1, None, nn.Linear(size, 1, bias=False))
    x = module.weight.detach()
    first = x.clone()
    pull(arena, model_of(theirs), 0.5)
    with torch.no_grad():
        module.weight.add_(torch.randn(1, size))
    arena.step_done()
    now = x.clone()
    pull(arena, model_of(theirs), 0.5)
    wanted = theirs.sections[0].values[:size].view(1, -1)
    torch.testing.assert_close(x, now + 0.5 * (wanted - now) + GAMMA * (now - first), rtol=1e-5, atol=1e-6)


def test_a_pushed_model_does_not_touch_the_state() -> None:
    """Without a base of its own it is no exchange of this peer."""
    _, arena = made(0, f"momentum:{GAMMA}")
    _, theirs = made(1)
    incoming = Incoming(arena, arena.snapshot())
    incoming.take(0, memoryview(bytearray(model_of(theirs))))
    incoming.norm()
    arena.exchanged.commit(incoming.buffer, 0.5)
    incoming.release()
    assert arena.exchanged.outer is not None and arena.exchanged.outer.vectors() == []


def test_masters_of_16_bit_models_take_small_momentum() -> None:
    """A change below half of bfloat16's last bit stays in the float32 master."""
    _, arena = made(0, f"momentum:{GAMMA}", nn.Linear(64, 1, bias=False).bfloat16())
    _, theirs = made(0, None, nn.Linear(64, 1, bias=False).bfloat16())
    pull(arena, model_of(theirs), 0.0)
    section = arena.sections[0]
    section.values.add_(2.0**-14)
    section.write_back()
    arena.set_boundary(1)
    now = section.values.clone()
    pull(arena, model_of(theirs), 0.0)
    moved = (section.values - now)[:64]
    torch.testing.assert_close(moved, torch.full_like(moved, GAMMA * 2.0**-14), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("rule", ["momentum:0.6", "nesterov"])
def test_a_replaced_model_begins_anew(rule: str) -> None:
    """The first exchange after it is plain mixing."""
    module, arena = made(0, rule)
    other, theirs = made(1)
    pull(arena, model_of(theirs), 0.5)
    whole = Incoming(arena, None, whole=True)
    whole.take(0, memoryview(bytearray(model_of(theirs, whole=True))))
    assert arena.adopt(whole.buffer, 7)
    whole.release()
    assert arena.exchanged.outer is not None and arena.exchanged.outer.vectors() == []
    pull(arena, model_of(theirs), 0.5)
    after, expected = values(module), values(other)
    assert all(torch.allclose(after[name], expected[name]) for name in after if not name.startswith("norm.num"))


@pytest.mark.parametrize(("rule", "models"), [("momentum:0.6", 1), ("nesterov:lr=0.7,momentum=0.9", 2)])
def test_the_memory_of_the_state(rule: str, models: int) -> None:
    """One vector of trained values or two (with alignment), however many exchanges there were."""
    _, arena = made(0, rule)
    _, theirs = made(1)
    for _ in range(3):
        pull(arena, model_of(theirs), 0.5)
    trained = sum(section.trainable for section in arena.sections)
    assert sum(vector.numel() for vector in arena.exchanged.outer.vectors()) == models * trained


def test_the_finish_is_a_plain_average() -> None:
    """apply_merged with ``training`` false: neither momentum nor a change of its state."""
    module, arena = made(0, "momentum:0.6")
    other, theirs = made(1)
    pull(arena, model_of(theirs), 0.5)
    kept = [vector.clone() for vector in arena.exchanged.outer.vectors()]
    captured = arena.snapshot()
    mean = arena.pool.buffer()
    mean.view[:] = model_of(theirs)
    merged = arena.exchanged.snapshot_of(mean, 1)
    arena.exchanged.apply_merged(merged, captured, training=False)
    captured.release()
    merged.release()
    after, expected = values(module), values(other)
    assert same(
        {name: after[name] for name, p in module.named_parameters() if p.requires_grad},
        {name: expected[name] for name, p in module.named_parameters() if p.requires_grad},
    )
    assert all(map(torch.equal, arena.exchanged.outer.vectors(), kept))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("momentum", "a value is missing; 'momentum' takes gamma=NUMBER"),
        ("momentum:1", "gamma is a momentum, from 0 to below 1"),
        ("momentum:-0.1", "gamma is a momentum, from 0 to below 1"),
        ("momentum:nan", "gamma is a momentum, from 0 to below 1"),
        ("nesterov:lr=0", "lr is the outer learning rate, above 0 and up to 10"),
        ("nesterov:momentum=1", "momentum is a momentum, from 0 to below 1"),
        ("momentums:0.5", "unknown outer optimizer 'momentums' (did you mean 'momentum'?): one of momentum, nesterov"),
        ("none:1", "'none' takes no keys"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_one_line(spec: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        outer.outer_from(spec)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_specs() -> None:
    assert outer.outer_from("none") is None
    assert outer.outer_from("momentum:0.6") == outer.Momentum(0.6)
    assert outer.outer_from("nesterov") == outer.Nesterov(0.7, 0.9)

"""The arena: layout, measuring and copies; mixing, adopting and merging models, and outer optimizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from arenas import Net, adopt, mix, mix_in, model_of, same, train, values
from torch import Tensor, nn

from gossipx import outer
from gossipx.errors import UsageError
from gossipx.memory import PIECE
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import HostBuffer, typed
from gossipx.model.receive import Incoming, digest, flaw

# --- layout -------------------------------------------------------------------------------------------


def test_one_buffer_for_each_dtype():
    module = Net()
    module.low = nn.Parameter(torch.randn(3).bfloat16())
    arena = ParameterArena(module)
    assert {section.storage.dtype for section in arena.sections} == {torch.float32, torch.float64, torch.bfloat16}
    for section in arena.sections:
        start, end = section.storage.data_ptr(), section.storage.data_ptr() + section.storage.nbytes
        ours = [p for p in module.parameters() if p.dtype == section.storage.dtype]
        assert ours and all(start <= p.data_ptr() and p.data_ptr() + p.nbytes <= end for p in ours)
    assert arena.nbytes() == arena.snapshot().buffer.view.nbytes
    assert arena.nbytes(whole=True) == arena.snapshot(whole=True).buffer.view.nbytes > arena.nbytes()


def test_state_dict_goes_in_and_out():
    module, other = Net(0), Net(1)
    arena = ParameterArena(module)
    module.load_state_dict(other.state_dict())
    arena.step_done()
    assert same(values(module), values(other))
    assert torch.equal(arena.snapshot().buffer.vectors[0], ParameterArena(other).snapshot().buffer.vectors[0])


@pytest.mark.parametrize("by_data", [False, True])
def test_tied_weights_are_stored_once_and_stay_tied(by_data: bool):
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    if by_data:
        other.weight.data = one.weight.data
    else:
        other.weight = one.weight
    module = nn.Sequential(one, other)
    arena = ParameterArena(module)
    assert arena.parameters == 16
    with torch.no_grad():
        one.weight.fill_(3.0)
    assert torch.equal(other.weight, one.weight)
    arena.detach()
    with torch.no_grad():
        one.weight.fill_(4.0)
    assert torch.equal(other.weight, one.weight)


def test_compiled_module_has_the_same_manifest():
    module = Net()
    compiled = torch.compile(module)
    assert ParameterArena(compiled).manifest == ParameterArena(Net()).manifest


def test_manifest_names_what_differs():
    wide = Net()
    wide.body = nn.Linear(5, 9)
    plain, other = ParameterArena(Net()), ParameterArena(wide)
    assert plain.digest != other.digest
    differing = [line for line in other.manifest if line not in plain.manifest]
    assert any(line.startswith("body.weight float32 9x5") for line in differing)
    frozen = Net()
    frozen.body.weight.requires_grad_(False)
    assert ParameterArena(frozen).digest != plain.digest


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(weight)
    if bias is not None:
        module.bias = nn.Parameter(bias)
    return module


WHOLE = torch.randn(24)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (linear(torch.randn(4, 8)[:, ::2]), "'weight'.*make it contiguous"),
        (linear(torch.randn(4, 1).expand(4, 4)), "'weight'.*make it contiguous"),
        (linear(torch.eye(4).to_sparse()), "'weight'.*dense"),
        (
            linear(torch.randn(4, 4).to(torch.float8_e4m3fn)),
            r"'weight' cannot be joined: it is trained as torch\.float8",
        ),
        (linear(WHOLE[:16].view(4, 4), WHOLE[12:16]), "'bias'.*shares a part of its memory with 'weight'"),
        (nn.LazyLinear(3), "'weight'.*run one batch"),
        (nn.Linear(4, 4, device="meta"), "'weight'.*materialise"),
        (nn.ReLU(), "no trainable parameter"),
    ],
)
def test_tensors_that_cannot_be_laid_out_are_refused_by_name(module: nn.Module, told: str):
    with pytest.raises(UsageError, match=told) as raised:
        ParameterArena(module)
    assert "\n" not in str(raised.value)


def test_empty_and_integer_parameters_are_accepted():
    module = nn.Linear(4, 4)
    module.empty = nn.Parameter(torch.zeros(3, 0))
    module.table = nn.Parameter(torch.arange(5), requires_grad=False)
    arena = ParameterArena(module)
    with torch.no_grad():
        module.weight.add_(1.0)
    assert arena.step_done() == pytest.approx(4.0)
    assert torch.equal(module.table, torch.arange(5)) and module.empty.shape == (3, 0)


# --- copies -----------------------------------------------------------------------------------------


def test_a_snapshot_is_shared_until_the_next_boundary():
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    arena = ParameterArena(module)
    one, two = arena.snapshot(), arena.snapshot()
    assert one.buffer is two.buffer and one.step == 0
    content = bytes(one.buffer.view)
    train(module, optimizer)
    assert bytes(arena.snapshot().buffer.view) == content, "an unfinished step is not visible"
    arena.step_done()
    three = arena.snapshot()
    assert three.buffer is not one.buffer and three.step == 1
    assert bytes(three.buffer.view) != content == bytes(one.buffer.view)


# --- mixing, merging and outer optimizers -----------------------------------------------------------


def received(arena: ParameterArena, other: ParameterArena) -> HostBuffer:
    """Return the other model as received from the wire, without a base."""
    buffer = arena.pool.buffer()
    buffer.view[:] = model_of(other)
    return buffer


# --- mixing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [mix, mix_in], ids=["pulled", "pushed"])
@pytest.mark.parametrize("share", [0.5, 0.25, 1.0])
def test_mixing_is_between_the_two_models(share: float, way: Callable[[ParameterArena, bytes, float], float]):
    module, other = Net(0), Net(1)
    mine, theirs = values(module), values(other)
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    distance = way(arena, model_of(their_arena), share)
    after = values(module)
    for name in ("conv.weight", "norm.running_mean", "body.bias", "head.weight"):
        torch.testing.assert_close(after[name], (1 - share) * mine[name] + share * theirs[name], rtol=1e-6, atol=1e-6)
    assert torch.equal(after["frozen"], mine["frozen"])
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    expected = math.sqrt(sum(float((mine[n].double() - theirs[n].double()).square().sum()) for n in trained))
    assert distance == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mixed", [True, False])
def test_batchnorm_statistics_are_mixed_or_stay_local(mixed: bool):
    modules = [Net(0), Net(0)]
    modules[1].norm.running_mean.fill_(4.0)
    arena, other = [ParameterArena(module, mix_buffers=mixed) for module in modules]
    before = modules[0].norm.running_var.clone()
    mix(arena, model_of(other), 0.5)
    assert torch.equal(modules[0].norm.running_mean, torch.full((5,), 2.0 if mixed else 0.0))
    assert torch.equal(modules[0].norm.running_var, before)
    adopt(arena, model_of(other, whole=True), 7)
    assert torch.equal(modules[0].norm.running_mean, torch.full((5,), 4.0)), "a joining peer receives them in any case"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["conv.weight", "head.bias", "norm.running_var"], [math.nan, math.inf, -math.inf]),
        ("head.bias", 1e200),  # whose square is infinite
    ],
)
@pytest.mark.parametrize("with_base", [False, True])
def test_mixing_is_all_or_nothing(name: str, value: float, with_base: bool):
    """No tensor changes, whichever tensor of whichever dtype contains the value."""
    module, other = Net(0), Net(1)
    tensor = other.state_dict()[name]
    tensor[(-1,) * tensor.dim()] = value
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    before = values(module)
    base = arena.snapshot() if with_base else None
    if with_base:
        arena.step_done()
    assert math.isnan(mix(arena, model_of(their_arena), 0.5, base))
    assert math.isnan(mix_in(arena, model_of(their_arena), 0.5))
    assert same(values(module), before)


def test_pushed_models_are_mixed_one_after_the_other():
    """Each model is compared with the result of the one before, so push-sum's Σ w z is preserved."""
    modules = [Net(seed) for seed in range(3)]
    first, second, third = (values(module) for module in modules)
    arena, *others = (ParameterArena(module) for module in modules)
    arena.step_done()
    mix_in(arena, model_of(others[0]), 0.5)  # weights 1 and 1
    mix_in(arena, model_of(others[1]), 0.75)  # then weights 2 and 6
    after = values(modules[0])
    for name in ("conv.weight", "norm.running_mean", "body.bias", "head.weight"):
        mean = (first[name] + second[name] + 6 * third[name]) / 8
        torch.testing.assert_close(after[name], mean, rtol=1e-5, atol=1e-6)


def test_mixing_with_a_base_keeps_the_progress_made_since():
    module, other = Net(0), Net(1)
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    base = arena.snapshot()
    at_request, theirs = values(module), values(other)
    train(module, torch.optim.SGD(module.parameters(), lr=0.1))
    arena.step_done()
    progressed = values(module)
    mix(arena, model_of(their_arena), 0.5, base)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            expected = progressed[name] + 0.5 * (theirs[name] - at_request[name])
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-6)


def test_a_whole_model_is_adopted():
    module, other = Net(0), Net(1)
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    assert adopt(arena, model_of(their_arena, whole=True), 12)
    theirs = values(other)
    for name, tensor in values(module).items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, theirs[name]), name
    assert (arena.step, arena.snapshot().step) == (12, 12)


def test_a_model_with_nan_is_not_adopted():
    module, other = Net(0), Net(1)
    other.head.weight.data[0, 0] = math.nan
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    before = values(module)
    assert not adopt(arena, model_of(their_arena, whole=True), 12)
    assert same(values(module), before) and arena.step == 0


def test_distance_to_a_reference():
    module, other = Net(0), Net(1)
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    reference = arena.pool.buffer()
    reference.view[:] = model_of(their_arena)
    far = math.sqrt(arena.exchanged.squared_distance(reference.vectors))
    assert far == pytest.approx(mix(arena, model_of(their_arena), 0.5), rel=1e-6)
    assert arena.exchanged.squared_distance(arena.snapshot().buffer.vectors) == 0.0


# --- buffers ------------------------------------------------------------------------------------------


def test_statistics_move_towards_the_others_and_stay_valid():
    """A variance that fell sharply since the request must not become negative by adding an old difference."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    arena = ParameterArena(module)
    base, model = arena.snapshot(), model_of(arena)
    module[1].running_var.fill_(0.01)
    module[1].running_mean.fill_(3.0)
    weight = module[0].weight.detach().clone()
    arena.step_done()
    mix(arena, model, 0.5, base)
    assert module[1].running_var.tolist() == pytest.approx([0.505] * 3)  # halfway from 0.01 to 1
    assert module[1].running_mean.tolist() == pytest.approx([1.5] * 3)
    assert torch.equal(module[0].weight, weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_frozen_values_of_any_dtype_are_carried(dtype: torch.dtype):
    module = nn.Linear(2, 3)
    module.codes = nn.Parameter(torch.ones(5).to(dtype), requires_grad=False)
    module.register_buffer("scales", torch.ones(4).to(dtype))
    arena = ParameterArena(module)
    with torch.no_grad():
        module.weight.add_(1.0)
    assert arena.step_done() == pytest.approx(math.sqrt(6))
    base = arena.snapshot()
    assert mix(arena, model_of(arena), 0.5) == 0.0
    assert adopt(arena, model_of(arena, whole=True), 7)
    assert arena.exchanged.squared_distance(base.buffer.vectors) == 0.0
    assert module.codes.float().tolist() == [1.0] * 5


def test_an_infinite_buffer_stays_and_spreads_no_nan():
    """Such as a running minimum that starts at infinity."""
    module = nn.Linear(2, 3)
    module.register_buffer("least", torch.tensor([math.inf, math.inf, 1.0]))
    arena = ParameterArena(module)
    model = bytearray(model_of(arena))
    sent = typed(memoryview(model), torch.float32)
    sent[arena.sections[0].trainable :][:3] = torch.tensor([math.inf, 5.0, 3.0])
    assert mix(arena, bytes(model), 0.5) == 0.0
    assert module.least.tolist() == [math.inf, math.inf, 2.0]


@pytest.mark.fault(76)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_constant_that_is_not_finite_is_merged_and_is_no_flaw(value: float):
    """Such as the mask of attention."""
    nets = Net(1), Net(2)
    for net in nets:
        net.norm.running_var[-1] = value
    arenas = [ParameterArena(net) for net in nets]
    assert [flaw(arena) for arena in arenas] == ["", ""] and all(map(digest, arenas))
    captured, wanted = arenas[0].snapshot(), (nets[0].body.bias + nets[1].body.bias).detach() / 2
    arenas[0].exchanged.apply_merged(arenas[0].exchanged.snapshot_of(merged(*arenas, 1, 1), 0), captured)
    torch.testing.assert_close(nets[0].body.bias.detach(), wanted)
    variance = nets[0].norm.running_var
    assert str(float(variance[-1])) == str(value) and bool(variance[:-1].isfinite().all())
    nets[0].norm.running_mean[0] = math.nan  # one that trained becomes NaN
    assert flaw(arenas[0]) == "NaN in its buffer 'norm.running_mean', while all trained values are finite"
    assert digest(arenas[0]) == ""
    with torch.no_grad():
        nets[0].head.weight[0, 0] = math.inf
    assert flaw(arenas[0]) == "NaN or Inf in its model: lower the learning rate"


# --- merging in waves ---------------------------------------------------------------------------------


def merged(arena: ParameterArena, other: ParameterArena, own: int, theirs: int) -> HostBuffer:
    """Return the result of a round: the other's model from the wire, with ours merged into it."""
    held, buffer = arena.snapshot(), received(arena, other)
    assert arena.exchanged.merge(buffer, held.buffer, own, theirs) > 0
    held.release()
    return buffer


@pytest.mark.parametrize(("own", "theirs"), [(1, 1), (2, 1), (3, 4), (5, 2)])
def test_both_merge_to_the_same_bits_and_to_the_weighted_mean(own: int, theirs: int):
    one, other = ParameterArena(Net(1)), ParameterArena(Net(2))
    ours, as_theirs = merged(one, other, own, theirs), merged(other, one, theirs, own)
    for mine, of_it, a, b in zip(
        ours.vectors, as_theirs.vectors, one.snapshot().vectors, other.snapshot().vectors, strict=True
    ):
        assert torch.equal(mine, of_it)
        mean = (own * a.double() + theirs * b.double()) / (own + theirs)
        torch.testing.assert_close(mine.double(), mean, rtol=1e-6, atol=1e-7)


def test_a_mean_of_all_is_adopted_unchanged():
    one, other = ParameterArena(Net(1)), ParameterArena(Net(2))
    for mine, theirs in zip(merged(one, other, 0, 3).vectors, other.snapshot().vectors, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["body.weight", "head.bias", "norm.running_var"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_not_merged(name: str, value: float):
    arena, other = ParameterArena(Net(1)), Net(2)
    their_arena = ParameterArena(other)
    other.state_dict()[name].view(-1)[-1] = value
    their_arena.set_boundary(1)
    held = arena.snapshot()
    before = bytes(held.buffer.view)
    assert math.isnan(arena.exchanged.merge(received(arena, their_arena), held.buffer, 1, 1))
    assert bytes(held.buffer.view) == before, "the captured model does not change"


def test_without_a_step_since_the_capture_the_result_is_exactly_the_mean():
    module = Net(1)
    arena, other = ParameterArena(module), ParameterArena(Net(2))
    captured = arena.snapshot()
    mean = arena.exchanged.snapshot_of(merged(arena, other, 1, 1), captured.step)
    frozen = module.frozen.clone()
    arena.exchanged.apply_merged(mean, captured)
    for mine, wanted in zip(arena.snapshot().vectors, mean.vectors, strict=True):
        assert torch.equal(mine, wanted)
    assert torch.equal(module.frozen, frozen)


def test_own_steps_since_the_capture_are_kept():
    module = Net(1)
    arena, other = ParameterArena(module), ParameterArena(Net(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    captured = arena.snapshot()
    before = [vector.clone() for vector in captured.vectors]
    mean = arena.exchanged.snapshot_of(merged(arena, other, 1, 1), captured.step)
    train(module, optimizer)
    arena.step_done()
    own = [section.storage[: section.trainable].clone() for section in arena.sections]
    arena.exchanged.apply_merged(mean, captured)
    for section, mine, base, wanted in zip(arena.sections, own, before, mean.vectors, strict=True):
        cut = section.trainable
        assert cut == 0 or not torch.equal(mine, base[:cut])
        torch.testing.assert_close(section.storage[:cut], wanted[:cut] + (mine - base[:cut]), rtol=1e-5, atol=1e-6)
        assert torch.equal(section.storage[cut : section.mixed], wanted[cut : section.mixed]), "statistics as merged"


# --- outer optimizers: their result enters the weights together with the steps made meanwhile ----------


GAMMA = 0.6


def made(seed: int, rule: str | None = None, module: nn.Module | None = None, **options: Any):
    module = Net(seed) if module is None else module
    arena = ParameterArena(module, **options)
    if rule is not None:
        arena.use_outer(outer.outer_from(rule))
    return module, arena


def pull(arena: ParameterArena, model: bytes, share: float) -> None:
    """Pull a model as a driver with an outer optimizer does."""
    base = arena.snapshot()
    own = base.hold()
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


def test_a_replaced_model_begins_anew() -> None:
    """The first exchange after it is plain mixing."""
    module, arena = made(0, "momentum:0.6")
    other, theirs = made(1)
    pull(arena, model_of(theirs), 0.5)
    assert adopt(arena, model_of(theirs, whole=True), 7)
    assert arena.exchanged.outer is not None and arena.exchanged.outer.vectors() == []
    pull(arena, model_of(theirs), 0.5)
    after, expected = values(module), values(other)
    assert all(torch.allclose(after[name], expected[name]) for name in after if not name.startswith("norm.num"))


def test_the_memory_of_the_state() -> None:
    """One vector of trained values (with alignment), however many exchanges there were."""
    _, arena = made(0, "momentum:0.6")
    _, theirs = made(1)
    for _ in range(3):
        pull(arena, model_of(theirs), 0.5)
    trained = sum(section.trainable for section in arena.sections)
    assert sum(vector.numel() for vector in arena.exchanged.outer.vectors()) == trained


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
        ("momentum:1", "gamma is a momentum, from 0 to below 1"),
        ("momentum:nan", "gamma is a momentum, from 0 to below 1"),
        ("nesterov:lr=0", "lr is the outer learning rate, above 0 and up to 10"),
        ("nesterov:momentum=1", "momentum is a momentum, from 0 to below 1"),
        ("momentums:0.5", "unknown outer optimizer 'momentums' (did you mean 'momentum'?): one of momentum, nesterov"),
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

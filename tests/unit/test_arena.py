"""The arena: laying out, measuring, copying, mixing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from arenas import mix, mix_in
from torch import Tensor, nn
from torch.nn.utils import prune

from gossipx.arena import ParameterArena
from gossipx.buffers import HostBuffer, typed
from gossipx.errors import UsageError
from gossipx.incoming import Incoming


class Net(nn.Module):
    """A bit of everything that is laid out in ways of its own."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.body = nn.Linear(5, 7)
        self.head = nn.Linear(7, 2).double()
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.conv(images)).mean((2, 3))
        return self.head(torch.tanh(self.body(features)).double())


def train(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    module(images).square().sum().backward()
    optimizer.step()


def model_of(arena: ParameterArena, whole: bool = False) -> bytes:
    """A model as it goes over the wire."""
    snapshot = arena.snapshot(whole)
    model = bytes(snapshot.buffer.view)
    snapshot.release()
    return model


def received(arena: ParameterArena, other: ParameterArena) -> HostBuffer:
    """The other's model as it comes over the wire, kept as it is."""
    buffer = arena.pool.buffer()
    buffer.view[:] = model_of(other)
    return buffer


def adopt(arena: ParameterArena, other: ParameterArena, step: int) -> bool:
    incoming = Incoming(arena, None, whole=True)
    incoming.take(0, memoryview(bytearray(model_of(other, whole=True))))
    taken = arena.adopt(incoming.buffer, step)
    incoming.release()
    return taken


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- laying out ---------------------------------------------------------------------------------------


def test_laying_out_changes_no_value_shape_stride_or_object():
    module = Net()
    before, parameters = values(module), dict(module.named_parameters())
    strides = {name: tensor.stride() for name, tensor in module.state_dict().items()}
    arena = ParameterArena(module)
    assert same(values(module), before)
    assert {name: tensor.stride() for name, tensor in module.state_dict().items()} == strides
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not module.conv.weight.is_contiguous()
    assert arena.parameters >= sum(p.numel() for p in module.parameters() if p.requires_grad)


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


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_training_goes_as_without_it(optimizer_first: bool):
    """Optimizers keep working, with parameter groups, made before or after; each step is as it would have been."""

    def optimizer(module: Net) -> torch.optim.Optimizer:
        groups = [{"params": [*module.conv.parameters()], "lr": 0.1}, {"params": [*module.head.parameters()]}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    plain, laid_out = Net(), Net()
    reference = optimizer(plain)
    tested = optimizer(laid_out) if optimizer_first else None
    arena = ParameterArena(laid_out)
    tested = tested or optimizer(laid_out)
    for seed in range(3):
        train(plain, reference, seed)
        train(laid_out, tested, seed)
        assert arena.step_done() > 0
    assert same(values(laid_out), values(plain))


def test_state_dict_goes_in_and_out():
    module, other = Net(0), Net(1)
    arena = ParameterArena(module)
    module.load_state_dict(other.state_dict())
    arena.step_done()
    assert same(values(module), values(other))
    assert torch.equal(arena.snapshot().buffer.vectors[0], ParameterArena(other).snapshot().buffer.vectors[0])


@pytest.mark.parametrize("by_data", [False, True])
def test_tied_weights_lie_once_and_stay_tied(by_data: bool):
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


def test_detach_gives_every_tensor_its_own_storage():
    module = Net()
    before = values(module)
    arena = ParameterArena(module)
    strides = {name: tensor.stride() for name, tensor in module.state_dict().items()}
    arena.detach()
    assert same(values(module), before)
    assert {name: tensor.stride() for name, tensor in module.state_dict().items()} == strides
    tensors = [*module.parameters(), *module.buffers()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    with torch.no_grad():
        module.body.weight.fill_(1.0)
    assert torch.equal(module.frozen, before["frozen"])


def broken_stride() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    return module


def expanded() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.randn(4, 1).expand(4, 4))
    return module


def sparse() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.eye(4).to_sparse())
    return module


def partly_shared() -> nn.Module:
    module = nn.Linear(4, 4)
    whole = torch.randn(24)
    module.weight = nn.Parameter(whole[:16].view(4, 4))
    module.bias = nn.Parameter(whole[12:16])
    return module


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (broken_stride, "weight", "make it contiguous"),
        (expanded, "weight", "make it contiguous"),
        (sparse, "weight", "dense"),
        (partly_shared, "bias", "shares a part of its memory with 'weight'"),
        (lambda: nn.LazyLinear(3), "weight", "run one batch"),
        (lambda: nn.Linear(4, 4, device="meta"), "weight", "materialise"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(make, name: str, reason: str):
    with pytest.raises(UsageError, match=f"'(0.)?{name}'.*{reason}") as raised:
        ParameterArena(make())
    assert "\n" not in str(raised.value)


def test_module_without_trained_parameters_is_refused():
    with pytest.raises(UsageError, match="no parameter that is trained"):
        ParameterArena(nn.ReLU())


def test_empty_and_integer_parameters_are_no_trouble():
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
    assert bytes(arena.snapshot().buffer.view) == content, "a step that is not done yet is not seen"
    arena.step_done()
    three = arena.snapshot()
    assert three.buffer is not one.buffer and three.step == 1
    assert bytes(three.buffer.view) != content == bytes(one.buffer.view)


def test_nothing_is_allocated_once_it_has_run_for_a_while():
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    arena, other = ParameterArena(module), ParameterArena(Net(1))
    seen: list[set[int]] = []
    for step in range(8):
        places = set()
        for whole in (False, True):
            snapshot, again = arena.snapshot(whole), arena.snapshot(whole)
            places.add(snapshot.buffer.vectors[0].data_ptr())
            snapshot.release()
            again.release()
        incoming = Incoming(arena, arena.snapshot())
        incoming.take(0, memoryview(bytearray(model_of(other))))
        places.add(incoming.buffer.vectors[0].data_ptr())
        train(module, optimizer, step)
        arena.step_done()
        arena.commit(incoming.buffer, 0.5)
        incoming.release()
        seen.append(places)
    warm = set().union(*seen[:3])
    assert set().union(*seen[3:]) <= warm


def test_a_snapshot_is_never_torn_while_another_thread_steps():
    """Each boundary is one constant everywhere, BatchNorm's buffers too; between boundaries it is a mixture."""
    module = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    arena = ParameterArena(module)
    tensors = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]

    def fill(value: float) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(value)

    fill(1.0)
    arena.step_done()
    ended = threading.Event()

    def steps() -> None:
        for step in range(2, 1500):
            fill(float(step))
            arena.step_done()
        ended.set()

    thread = threading.Thread(target=steps)
    held = arena.snapshot()
    thread.start()
    taken = 0
    while not ended.is_set() or not taken:
        for whole in (False, True):
            snapshot = arena.snapshot(whole)
            vector = snapshot.buffer.vectors[0]
            present = set(vector.unique().tolist()) - {0.0}  # 0: the padding between tensors
            assert present == {float(snapshot.step)}
            snapshot.release()
            taken += 1
    thread.join()
    assert set(held.buffer.vectors[0].unique().tolist()) - {0.0} == {1.0}, "one that is held does not change"


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
    adopt(arena, other, 7)
    assert torch.equal(modules[0].norm.running_mean, torch.full((5,), 4.0)), "a joining peer takes them in any case"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["conv.weight", "head.bias", "norm.running_var"])
@pytest.mark.parametrize("with_base", [False, True])
def test_mixing_is_all_or_nothing(name: str, value: float, with_base: bool):
    """Whatever tensor holds it, of the first or the last dtype: no other is touched either."""
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


def test_models_that_were_pushed_enter_one_after_the_other():
    """Each is weighed against the model as the one before has left it: so push-sum's Σ w z stays as it is."""
    modules = [Net(seed) for seed in range(3)]
    first, second, third = (values(module) for module in modules)
    arena, *others = (ParameterArena(module) for module in modules)
    arena.step_done()
    mix_in(arena, model_of(others[0]), 0.5)  # of weights 1 and 1,
    mix_in(arena, model_of(others[1]), 0.75)  # then of 2 and 6
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


def test_masks_of_minus_infinity_do_not_keep_models_apart():
    """A causal mask is a float buffer with −∞ in it, on both sides."""

    def masked(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Linear(3, 3)
        module.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        return module

    module, other = masked(0), masked(1)
    mask, expected = module.mask.clone(), (module.weight + other.weight).detach() / 2
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    assert mix(arena, model_of(their_arena), 0.5) > 0
    assert torch.equal(module.mask, mask)
    torch.testing.assert_close(module.weight.detach(), expected)


def test_enormous_values_are_refused_and_raise_nothing():
    module, other = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
    other.weight.data.fill_(1e200)
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    before = values(module)
    assert math.isnan(mix(arena, model_of(their_arena), 0.5))
    assert same(values(module), before)


def test_a_whole_model_is_adopted():
    module, other = Net(0), Net(1)
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    assert adopt(arena, their_arena, 12)
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
    assert not adopt(arena, their_arena, 12)
    assert same(values(module), before) and arena.step == 0


def test_distance_to_a_reference():
    module, other = Net(0), Net(1)
    arena, their_arena = ParameterArena(module), ParameterArena(other)
    reference = arena.pool.buffer()
    reference.view[:] = model_of(their_arena)
    far = arena.distance(reference)
    assert far == pytest.approx(mix(arena, model_of(their_arena), 0.5), rel=1e-6)
    assert arena.distance(arena.snapshot().buffer) == 0.0


# --- what is not added up -----------------------------------------------------------------------------


def test_statistics_move_towards_the_others_and_stay_possible():
    """A variance that fell by much since the request is not made negative by a difference to what it was then."""
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
    assert adopt(arena, arena, 7)
    assert arena.distance(base.buffer) == 0.0
    assert module.codes.float().tolist() == [1.0] * 5


def test_8_bit_weights_are_refused_by_name():
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(module.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(UsageError, match=r"parameter 'weight' cannot be joined: it is trained as torch\.float8"):
        ParameterArena(module)


def assigned(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def unfrozen(module: nn.Module) -> None:
    module[0].weight.requires_grad_(True)


@pytest.mark.parametrize("mix_buffers", [True, False])
def test_what_is_not_trained_may_be_replaced(mix_buffers: bool):
    """Buffers that forward passes make anew are as good as local; pruning renames what is trained."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    arena = ParameterArena(module, mix_buffers)
    module[1].running_mean = module[1].running_mean + 1.0
    prune.identity(module[0], "weight")
    arena.check(module)


def test_an_infinite_buffer_stays_and_spreads_no_nan():
    """A least value seen, say, that begins at infinity."""
    module = nn.Linear(2, 3)
    module.register_buffer("least", torch.tensor([math.inf, math.inf, 1.0]))
    arena = ParameterArena(module)
    model = bytearray(model_of(arena))
    sent = typed(memoryview(model), torch.float32)
    sent[arena.sections[0].trainable :][:3] = torch.tensor([math.inf, 5.0, 3.0])
    assert mix(arena, bytes(model), 0.5) == 0.0
    assert module.least.tolist() == [math.inf, math.inf, 2.0]


def grown(module: nn.Module) -> None:
    module.append(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (assigned, "'0.bias' lies in other memory"),
        (nn.Module.double, "'0.bias' lies in other memory"),
        (unfrozen, "'0.weight' is trained, which was frozen"),
        (grown, "'2.weight' was added to the model"),
    ],
)
def test_a_model_that_is_changed_under_the_arena_is_noticed(change: Callable[[nn.Module], object], told: str):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module[0].weight.requires_grad_(False)
    arena = ParameterArena(module)
    arena.check(module)
    arena.check(torch.compile(module, backend="eager"))
    change(module)
    with pytest.raises(UsageError, match=told):
        arena.check(module)


# --- merging, as waves do -----------------------------------------------------------------------------


def merged(arena: ParameterArena, other: ParameterArena, own: int, theirs: int) -> HostBuffer:
    """What both hold after a round: the other's model as it comes over the wire, ours merged into it."""
    held, buffer = arena.snapshot(), received(arena, other)
    assert arena.merge(buffer, held.buffer, own, theirs) > 0
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


def test_a_mean_of_all_is_taken_as_it_is():
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
    assert math.isnan(arena.merge(received(arena, their_arena), held.buffer, 1, 1))
    assert bytes(held.buffer.view) == before, "what is held stays"


def test_without_a_step_since_the_capture_exactly_the_mean_is_taken_in():
    module = Net(1)
    arena, other = ParameterArena(module), ParameterArena(Net(2))
    captured = arena.snapshot()
    mean = arena.held(merged(arena, other, 1, 1), captured.step)
    frozen = module.frozen.clone()
    arena.take_in(mean, captured)
    for mine, wanted in zip(arena.snapshot().vectors, mean.vectors, strict=True):
        assert torch.equal(mine, wanted)
    assert torch.equal(module.frozen, frozen)


def test_own_steps_since_the_capture_are_kept():
    module = Net(1)
    arena, other = ParameterArena(module), ParameterArena(Net(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    captured = arena.snapshot()
    before = [vector.clone() for vector in captured.vectors]
    mean = arena.held(merged(arena, other, 1, 1), captured.step)
    train(module, optimizer)
    arena.step_done()
    own = [section.storage[: section.trainable].clone() for section in arena.sections]
    arena.take_in(mean, captured)
    for section, mine, base, wanted in zip(arena.sections, own, before, mean.vectors, strict=True):
        cut = section.trainable
        assert cut == 0 or not torch.equal(mine, base[:cut])
        torch.testing.assert_close(section.storage[:cut], wanted[:cut] + (mine - base[:cut]), rtol=1e-5, atol=1e-6)
        assert torch.equal(section.storage[cut : section.mixed], wanted[cut : section.mixed]), "statistics as merged"


def test_masks_of_minus_infinity_do_not_hinder_a_wave():
    class Masked(nn.Module):
        def __init__(self, value: float):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), value))
            self.register_buffer("mask", torch.tensor([0.0, -math.inf, value]))

    module = Masked(1.0)
    arena, other = ParameterArena(module), ParameterArena(Masked(3.0))
    captured = arena.snapshot()
    arena.take_in(arena.held(merged(arena, other, 1, 1), 0), captured)
    assert module.weight.tolist() == [2.0] * 3 and module.mask.tolist() == [0.0, -math.inf, 2.0]

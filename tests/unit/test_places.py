"""Changes of the model in mid-training: followed, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from arenas import mix, model_of
from torch import nn
from torch.nn.utils import prune, vector_to_parameters

from gossipx.errors import UsageError
from gossipx.model.arena import ParameterArena

pytestmark = pytest.mark.fault(49)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(5, 6)).to(memory_format=torch.channels_last)


def moved_by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 2


def moved_by_vector(module: nn.Module) -> None:
    vector = torch.cat([parameter.detach().reshape(-1) * 2 for parameter in module.parameters()])
    vector_to_parameters(vector, module.parameters())


def converted_and_back(module: nn.Module) -> None:
    module.double()
    module.float()
    moved_by_data(module)


def shared(module: nn.Module) -> None:
    module.share_memory()
    moved_by_data(module)


def in_place(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)


@pytest.mark.parametrize("move", [moved_by_data, moved_by_vector, converted_and_back, shared, in_place])
@pytest.mark.parametrize("sampled", [None, 0])
def test_moved_values_are_mixed_as_if_changed_in_place(move: Callable[[nn.Module], None], sampled: int | None) -> None:
    module, expected = network(), network()
    arena, other = ParameterArena(module, sampled=sampled), ParameterArena(expected, sampled=sampled)
    theirs = model_of(ParameterArena(network(1)))
    parameters = [*module.parameters()]
    move(module)
    in_place(expected)
    deltas = []
    for one in (arena, other):
        one.places.check()
        deltas.append(one.step_done())
        assert mix(one, theirs, 0.5) > 0
    assert deltas[0] == deltas[1] > 0
    for (name, ours), right in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, right) and ours.stride() == right.stride(), name
    assert all(one is parameter for one, parameter in zip(module.parameters(), parameters, strict=True))
    assert module[2].weight.untyped_storage().nbytes() == module[2].weight.nbytes


def test_moved_weights_that_are_tied_stay_tied() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight.data = module[0].weight.data
    arena = ParameterArena(module)
    module[0].weight.data = torch.ones(4, 4)
    arena.places.check()
    assert torch.equal(module[1].weight, torch.ones(4, 4))
    assert module[0].weight.untyped_storage()._cdata == module[1].weight.untyped_storage()._cdata


@pytest.mark.parametrize("mix_buffers", [True, False])
def test_replaced_buffers_are_followed_and_renamed_parameters_found(mix_buffers: bool) -> None:
    """Forward passes may assign buffers, and pruning renames parameters."""
    module = network()
    arena = ParameterArena(module, mix_buffers)
    for mean in (1.0, 3.0):
        module[1].running_mean = torch.full((4,), mean)
        prune.identity(module[2], "weight")
        arena.places.check()
        assert float(module[1].running_mean.mean()) == mean
        arena.step_done()
        with torch.no_grad():
            arena.sections[0].storage.zero_()
        assert not module[1].running_mean.any() and not module[2].weight_orig.any()
    arena.detach()
    assert module[1].running_mean.untyped_storage().data_ptr() != arena.sections[0].storage.data_ptr()


def test_freezing_is_followed_and_so_is_unfreezing_again() -> None:
    module = network()
    arena = ParameterArena(module)
    module[2].requires_grad_(False)
    arena.places.check()
    module[2].requires_grad_(True)
    moved_by_data(module)
    arena.places.check()
    assert arena.step_done() > 0


def test_memory_formats_and_sharing_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    module = network()
    arena = ParameterArena(module)
    for _ in range(2):
        module.share_memory()
        module[0].weight.data = module[0].weight.data.contiguous()
        arena.places.check()
    of_format, of_sharing = caplog.messages
    assert "'0.weight' keeps the memory format" in of_format
    assert "'0.bias' was passed to another process, which keeps a copy of it" in of_sharing


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module[2], "weight", 0.5)


def given_a_buffer(module: nn.Module) -> None:
    module.register_buffer("cache", torch.ones(3), persistent=False)
    module.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # peers exchange no integers
    module.register_buffer("mask", torch.ones(3))


def grown_table(module: nn.Module) -> None:
    module.table = torch.ones(4)


ADDED = "was added after gossipx.join: peers do not exchange it; register it before gossipx.join"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (pruned, f"buffer '2.weight_mask' {ADDED}"),
        (given_a_buffer, f"buffer 'mask' {ADDED}"),
        (grown_table, "buffer 'table' was changed from (3,) to (4,) after gossipx.join: peers no longer"),
    ],
)
def test_a_buffer_that_is_added_or_grows_is_told_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture, change: Callable[[nn.Module], None], told: str
) -> None:
    module = network()
    module.register_buffer("table", torch.ones(3))
    arena = ParameterArena(module)
    change(module)
    for _ in range(2):
        moved_by_data(module)
        arena.places.check()
        assert arena.step_done() > 0
    (message,) = caplog.messages
    assert message.startswith(told)


# --- refusals -----------------------------------------------------------------------------------------


def given_a_new_head(module: nn.Module) -> None:
    module[2] = nn.Linear(5, 9)


def reshaped(module: nn.Module) -> None:
    module[0].bias.data = torch.zeros(5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda module: module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True),
            "'0.weight' is another Parameter than at gossipx.join (load_state_dict(assign=True)?)",
        ),
        (nn.Module.double, "'0.weight' was changed from float32 to float64 after gossipx.join"),
        (reshaped, "'0.bias' was changed from (4,) to (5,) after gossipx.join"),
        (lambda module: module[2].weight.requires_grad_(True), "'2.weight' was unfrozen after gossipx.join"),
        (lambda module: module.append(nn.Linear(2, 2)), "'3.weight' was added to the model"),
        (given_a_new_head, "'2.weight' is another Parameter"),
    ],
)
def test_other_changes_are_refused_at_once_and_again(change: Callable[[nn.Module], object], told: str) -> None:
    module = network()
    module[2].weight.requires_grad_(False)
    arena = ParameterArena(module)
    arena.places.check()
    torch.compile(module, backend="eager")
    arena.places.check()
    change(module)
    for _ in range(2):
        with pytest.raises(UsageError) as raised:
            arena.places.check()
        assert str(raised.value).startswith(told) and "before gossipx.join" in str(raised.value)

"""The arena: layout, measuring and copies."""

from __future__ import annotations

import pytest
import torch
from arenas import Net, same, train, values
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.model.arena import ParameterArena

# --- layout -------------------------------------------------------------------------------------------


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
def test_training_takes_the_same_steps_as_without_an_arena(optimizer_first: bool):
    """Optimizers made before or after joining, with parameter groups, take exactly the same steps as without an
    arena."""

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

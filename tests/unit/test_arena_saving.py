"""Saving, copying and passing on a model that lies in an arena: the same as without gossipx."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arenas import Net, same, train, values
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gossipx.model.arena import ParameterArena

pytestmark = pytest.mark.fault(59)


class Adapted(nn.Module):
    """A large frozen base with two small trained tensors, tied weights, 16-bit and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.base = nn.Linear(400, 400).requires_grad_(False)
        self.down = nn.Linear(400, 4, bias=False)
        self.up = nn.Linear(4, 400, bias=False)
        self.embedding = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 20)
        self.out.weight = self.embedding.weight
        self.half = nn.Linear(3, 3).bfloat16()
        self.empty = nn.Parameter(torch.zeros(2, 0))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


def trained() -> tuple[Adapted, torch.optim.Optimizer]:
    module = Adapted()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    train(module, optimizer)
    return module, optimizer


def saved(what: object) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


PARTS: dict[str, Callable[[Adapted, torch.optim.Optimizer], object]] = {
    "model": lambda module, _: module,
    "state": lambda module, _: module.state_dict(),
    "part": lambda module, _: [module.down.weight, module.up.weight],
    "module": lambda module, _: module.net.conv,
    "buffers": lambda module, _: module.net.norm.state_dict(),
    "tied": lambda module, _: {"one": module.embedding.weight, "other": module.out.weight},
    "optimizer": lambda _, optimizer: optimizer,
    "optimizer state": lambda _, optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("part", PARTS)
def test_torch_saves_the_same_bytes_as_without_an_arena(part: str) -> None:
    plain, laid_out = trained(), trained()
    arena = ParameterArena(laid_out[0])
    assert saved(PARTS[part](*laid_out)) == saved(PARTS[part](*plain))
    for module, optimizer in (plain, laid_out):
        train(module, optimizer, seed=1)
    arena.step_done()
    assert saved(PARTS[part](*laid_out)) == saved(PARTS[part](*plain)), "after a step"
    arena.detach()
    assert saved(PARTS[part](*laid_out)) == saved(PARTS[part](*plain)), "after the arena has gone"


def test_safetensors_saves_the_same_bytes_as_without_an_arena(tmp_path: Path) -> None:
    plain, laid_out = trained()[0], trained()[0]
    arena = ParameterArena(laid_out)
    for name, module in (("plain", plain), ("laid-out", laid_out)):
        module.net.conv.to(memory_format=torch.contiguous_format)  # a format without strides
        save_model(module, tmp_path / f"{name}-model")
        own = {key: tensor for key, tensor in module.state_dict().items() if key != "out.weight"}
        save_file(own, tmp_path / f"{name}-file")
    for kind in ("model", "file"):
        assert (tmp_path / f"laid-out-{kind}").read_bytes() == (tmp_path / f"plain-{kind}").read_bytes()
    assert torch.equal(load_file(tmp_path / "laid-out-file")["base.weight"], plain.base.weight)
    del arena


def storage_of(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_each_tensor_has_a_storage_of_its_own_size_and_tied_ones_share_it(device: str) -> None:
    module = Adapted().to(device)
    expected = saved(module.state_dict())
    arena = ParameterArena(module)
    assert saved(module.state_dict()) == expected
    tensors = [*module.parameters(), *(one for one in module.buffers() if one.is_floating_point())]
    for tensor in tensors:
        assert storage_of(tensor) == (tensor.data_ptr(), tensor.nbytes) and tensor.storage_offset() == 0
    assert module.out.weight.untyped_storage()._cdata == module.embedding.weight.untyped_storage()._cdata
    assert module.net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.fill_(3.0)
    assert {value for one in arena.sections for value in one.storage[: one.trainable].unique().tolist()} == {0.0, 3.0}


def test_the_memory_lives_as_long_as_one_tensor_of_it() -> None:
    module = Adapted()
    expected = module.down.weight.detach().clone()
    ParameterArena(module)
    kept = module.down.weight
    del module
    gc.collect()
    torch.full((200_000,), 7.0)  # would reuse the memory if it were free
    assert torch.equal(kept, expected)


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    module, optimizer = trained()
    arena = ParameterArena(module)
    ema = copy.deepcopy(module)
    before = values(ema)
    train(module, optimizer, seed=1)
    arena.step_done()
    assert same(values(ema), before) and not same(values(module), before)
    assert ema.out.weight is ema.embedding.weight
    assert sum(storage_of(tensor)[1] for tensor in ema.parameters()) == sum(one.nbytes for one in ema.parameters())
    with torch.no_grad():
        for tensor in ema.parameters():
            tensor.zero_()
    assert module.down.weight.count_nonzero()


class Predictions(Dataset[Any]):
    """A data set that holds the model, which its workers use."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        parameter = next(self.module.parameters())
        return torch.stack([parameter.detach().sum(), torch.tensor(float(parameter.untyped_storage().nbytes()))])


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_a_worker_of_a_data_loader_gets_the_model(start: str) -> None:
    module = nn.Linear(300, 5)
    arena = ParameterArena(nn.Sequential(module, nn.Linear(500, 500)))
    loader = DataLoader(Predictions(module), num_workers=1, multiprocessing_context=start)
    total, nbytes = next(iter(loader))[0].tolist()
    assert total == pytest.approx(float(module.weight.detach().sum()), rel=1e-5) and nbytes == module.weight.nbytes
    arena.places.check()
    with torch.no_grad():
        module.weight.add_(1.0)
    assert arena.step_done() == pytest.approx(1500**0.5)

"""Codecs as a DDP communication hook: two real processes over gloo, and one on a GPU over NCCL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import free_ports
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossipx.errors import UsageError
from gossipx.integrations import ddp
from runs import folder

SCRIPT = """
import hashlib
import warnings

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gossipx.errors import GossipxError
from gossipx.integrations import comm_hook, ddp

warnings.simplefilter("ignore")
SPECS = ("3lc:1.75", "topk2", "dgc:momentum=0,sample=0")  # these draw nothing at random
RANK, PORT = int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=RANK, world_size=2)
torch.set_num_threads(1)


class Training:
    def __init__(self, spec=None, dtype=torch.float32, **options):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
        self.model = DistributedDataParallel(self.module.to(dtype), **{"bucket_cap_mb": 0.1, **options})
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.03, momentum=0.9)
        self.dtype, self.step, self.losses = dtype, 0, []
        if spec is not None:
            self.state, hook = ddp.hook(spec)
            self.model.register_comm_hook(self.state, hook)

    def backward(self, factor=1.0):
        generator = torch.Generator().manual_seed(2 * self.step + RANK)
        x = torch.randn(32, 20, generator=generator).to(self.dtype)
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True) / 4).square().mean() * factor
        loss.backward()
        return float(loss.detach())

    def train(self, until):
        while self.step < until:
            self.losses.append(self.backward())
            self.optimizer.step()
            self.step += 1
        return self

    @property
    def bits(self):
        with torch.no_grad():
            values = torch.cat([part.flatten() for part in self.module.parameters()])
            return hashlib.sha256(values.float().numpy()).hexdigest()

    @property
    def loss(self):
        return sum(self.losses[-10:]) / 10

    def state_dict(self):
        parts = {"model": self.module, "optimizer": self.optimizer, "hook": self.state}
        return {name: part.state_dict() for name, part in parts.items()}

    def resume(self, path, step):
        kept = torch.load(path, weights_only=True)
        self.module.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.state.load_state_dict(kept["hook"])
        self.step = step
        return self

    def error(self):
        kept = self.state.state_dict()["kept"]
        return torch.cat([kept[number]["error"] for number in sorted(kept)])


def refused(action):
    try:
        action()
    except GossipxError as error:
        return str(error)


told = {}
plain, none, ternary = Training().train(40), Training("none").train(40), Training("3lc:1.75").train(40)
told["plain"], told["none"] = [plain.bits, plain.losses[0], plain.loss], [none.bits, none.losses[0], none.loss]
told["3lc"] = [ternary.bits, ternary.losses[0], ternary.loss]
told["bytes"] = [none.state.bytes_sent, ternary.state.bytes_sent, sum(p.numel() for p in none.module.parameters())]
told["half"] = Training("3lc:1.75", dtype=torch.bfloat16).train(3).bits

whole = {spec: Training(spec).train(8) for spec in SPECS}
fixed = Training("3lc:1.75", find_unused_parameters=True).train(8)  # DDP keeps its first buckets
told["buckets"] = [[len(one.state._sizes), len(one.state._buckets)] for one in (whole["3lc:1.75"], fixed)]
told["numbers"] = [sorted(one.state.state_dict()["kept"]) for one in (whole["3lc:1.75"], fixed)]
told["other buckets"] = [whole["3lc:1.75"].bits, fixed.bits, Training("3lc:1.75", bucket_cap_mb=100).train(8).bits]
told["resumed"] = {}
for spec in SPECS:
    for step in (1, 4):  # DDP rebuilds its buckets after the first iteration
        torch.save(Training(spec).train(step).state_dict(), path := FOLDER / f"{RANK}.pt")
        told["resumed"][f"{spec} {step}"] = [whole[spec].bits, Training(spec).resume(path, step).train(8).bits]

one = Training("3lc:1.75").train(3)
before = one.error()
one.backward(float("inf") if RANK == 1 else 1.0)
told["not finite"] = [bool(part.grad.isnan().all()) for part in one.module.parameters()]
told["kept"] = torch.equal(before, one.error())
one.backward()
told["finite again"] = all(bool(part.grad.isfinite().all()) for part in one.module.parameters())

saved = one.state.state_dict()
other = {**saved, "rank": 1 - RANK}
told["other rank"] = refused(lambda: Training("3lc:1.75").state.load_state_dict(other))
told["other codec"] = refused(lambda: Training("topk2").state.load_state_dict(saved))
again = Training("3lc:1.75")
again.state.load_state_dict({**saved, "sizes": [[20, 300], [1]]})
told["other parameters"] = refused(again.backward)


def broken(*args, **options):
    raise GossipxError("a frame is damaged")


comm_hook.decode_into = broken
try:
    Training("3lc:1.75").backward()
except Exception as error:
    told["damaged"] = str(error)
(FOLDER / f"{RANK}.json").write_text(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Figures from both ranks of a group of two."""
    with folder(tmp_path_factory.mktemp("hook"), 1) as made:
        script, (port,) = made.script(SCRIPT), free_ports(1)
        for process in [made.start(script, made.path, str(rank), str(port)) for rank in range(2)]:
            ended = process.end()
            assert ended.code == 0, ended.shown
        yield [json.loads((made.path / f"{rank}.json").read_text()) for rank in range(2)]


def test_without_a_codec_the_bits_are_those_of_ddp(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["plain"] == ranks[0]["none"]


def test_a_codec_converges_with_a_fraction_of_the_bytes(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (_, first, plain), (_, _, ternary) = rank["plain"], rank["3lc"]
        assert plain < 0.7 * first
        assert ternary < plain + 0.1 * (first - plain)
        none_bytes, ternary_bytes, parameters = rank["bytes"]
        assert 40 * 4 * parameters < none_bytes < 1.01 * 40 * 4 * parameters
        assert ternary_bytes < none_bytes / 150
    for what in ("3lc", "half"):
        assert ranks[0][what][0] == ranks[1][what][0]  # bits of both ranks


def test_error_feedback_follows_parameters_when_ddp_rebuilds_its_buckets(ranks: list[dict[str, Any]]) -> None:
    """Each tensor is encoded by itself, so that the result does not depend on buckets."""
    assert ranks[0]["buckets"] == [[1, 2], [2, 2]]  # at first, and after the first iteration
    assert ranks[0]["numbers"] == [list(range(6))] * 2
    assert len(set(ranks[0]["other buckets"])) == 1


def test_a_loaded_state_continues_with_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks[0]["resumed"]) == 6
    for rank in ranks:
        assert [how for how, (one, other) in rank["resumed"].items() if one != other] == []


def test_a_gradient_that_is_not_finite_leaves_the_error_as_it_was(ranks: list[dict[str, Any]]) -> None:
    assert all(all(rank["not finite"]) and rank["finite again"] for rank in ranks)
    assert ranks[1]["kept"] and not ranks[0]["kept"]  # rank 1 had the infinite gradient


def test_a_state_of_something_else_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank, told in enumerate(ranks):
        assert told["other rank"] == (
            f"the hook's saved state is of rank {1 - rank} of 2, this is rank {rank} of 2: save and load one state per "
            "rank"
        )
        assert told["other codec"] == "the hook's saved state is of codec '3lc:sparsity=1.75', this hook has 'topk2'"
        assert "is of other parameters, or of other buckets" in told["other parameters"]
        assert "a frame is damaged" in told["damaged"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("3lv", "unknown codec '3lv' .did you mean '3lc'"),
        ("moniqua", "codec 'moniqua' encodes models only, not gradients"),
        ("3lc:feedback=false", "codec '3lc:feedback=false' loses part of each gradient without error feedback"),
    ],
)
def test_a_codec_that_does_not_suit_gradients_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ddp.hook(spec)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_gradients_on_a_device(tmp_path: Path, backend: str) -> None:
    """Frames are staged on the device for a group of NCCL alone; gradient = average + error, on the device."""
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        module = nn.Linear(30, 40).cuda()
        model = DistributedDataParallel(module, device_ids=[0])
        state, hook = ddp.hook("3lc:1.75")
        model.register_comm_hook(state, hook)
        x = torch.randn(8, 30, device="cuda")
        model(x).square().mean().backward()
        exact = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
        kept = state.state_dict()["kept"]
        for number, (parameter, gradient) in enumerate(zip(module.parameters(), exact, strict=True)):
            assert parameter.grad is not None
            error = kept[number]["error"].view_as(gradient)
            assert error.is_cuda and bool(error.any())
            assert torch.allclose(parameter.grad + error, gradient, atol=1e-6)
    finally:
        dist.destroy_process_group()

"""Muon and AdamW as one optimizer: which parameters each trains, and that loops and checkpoints take it for one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from arenas import HalfNet
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook

from gossipx.errors import UsageError
from gossipx.model.arena import ParameterArena
from gossipx.optimizers import MuonAdamW, muon
from gossipx.runtime.optimizers import Optimizers
from gossipx.tasks.models import MODELS, build_model

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


class Tied(nn.Module):
    """A model of text whose output layer is its embedding, and layers that hold matrices in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)
        self.words = nn.Embedding(9, 4)
        self.head.weight = self.words.weight
        self.places = nn.Parameter(torch.zeros(3, 4))
        self.attention, self.recurrent = nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)
        self.norm, self.body = nn.LayerNorm((3, 4)), nn.Linear(4, 4)


def built(name: str) -> nn.Module:
    one = MODELS[name]
    return build_model(name, classes=one.classes, channels=one.channels, pixels=one.pixels)


def hidden(model: nn.Module, **settings: Any) -> list[str]:
    """Return the names of the parameters that Muon trains."""
    optimizer = muon(model, 0.01, **settings)
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    assert {id(one) for one in trained} == {id(one) for one in model.parameters()}, "each once, in one of both"
    assert len(trained) == len({id(one) for one in trained})
    matrices = {id(one) for group in optimizer.param_groups if group["kind"] == "muon" for one in group["params"]}
    return [name.removesuffix(".weight") for name, one in model.named_parameters() if id(one) in matrices]


@needs_muon
def test_hidden_matrices_are_found_by_layer_and_place() -> None:
    layers = ("queries_keys_values", "attention_out", "dense", "dense_out")
    assert hidden(built("transformer")) == [f"blocks.{block}.{layer}" for block in range(3) for layer in layers]
    assert hidden(built("lenet")) == ["maps.0", "maps.3", "head.0"]
    assert hidden(built("convnet")) == ["maps.0", "maps.4", "maps.8"]
    assert len(hidden(built("resnet20"))) == 19, "all layers but the last"
    with pytest.raises(UsageError, match=r"^Sequential has no hidden matrix, and Muon trains only these: use torch"):
        muon(nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.Linear(4, 2)), 0.01)
    assert hidden(Tied(), adamw=()) == ["attention.in_proj_weight", "attention.out_proj", "body"]
    assert hidden(Tied()) == ["attention.in_proj_weight", "attention.out_proj"], "the last one counts as the output"
    assert hidden(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), Tied().head), adamw=()) == ["1", "2"]


@needs_muon
def test_output_layers_are_named_where_they_are_not_the_last() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("head_of_actor", "body", "more")})
    assert hidden(model, adamw="head*") == ["body", "more"]
    assert hidden(torch.compile(model), adamw=["head_of_actor.weight", "more.weight"]) == ["_orig_mod.body"]
    with pytest.raises(UsageError, match=r"^adamw: 'body\.wight' is the name of no matrix \(did you mean 'body\.weigh"):
        muon(model, 0.01, adamw=["body.wight"])


def test_an_old_torch_and_values_out_of_range_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: dict[str, float]
    for wrong in ({"lr": -1.0}, {"weight_decay": -0.1}, {"momentum": 1.0}) if hasattr(torch.optim, "Muon") else ():
        with pytest.raises(ValueError, match=r"^MuonAdamW: lr and weight_decay are at least 0"):
            muon(built("lenet"), **{"lr": 0.01, **wrong})
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(UsageError, match=r"^Muon needs torch 2\.9, and this is .*: update it, or give another"):
        muon(built("lenet"), 0.01)


# --- as one optimizer ---------------------------------------------------------------------------------


class Loop:
    """A loop over a small model, with a schedule of the learning rate."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        kernel = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.Flatten())
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), kernel, nn.Linear(12, 3), nn.Linear(3, 2))
        self.optimizer: torch.optim.Optimizer = muon(self.model, 0.02)
        self.schedule()

    def schedule(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = (self.model(torch.full((2, 4), 0.5)) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.loss()
            self.optimizer.step()
            self.scheduler.step()

    @property
    def values(self) -> list[float]:
        return [value for one in self.model.parameters() for value in one.detach().flatten().tolist()]


@pytest.fixture
def loop() -> Iterator[Loop]:
    yield Loop()


@needs_muon
def test_one_schedule_is_of_both_and_the_state_is_that_of_torch(loop: Loop) -> None:
    loop.steps(3)
    assert [group["lr"] for group in loop.optimizer.param_groups] == [0.01, 0.01]
    matrix, bias = loop.model[0].weight, loop.model[0].bias
    assert set(loop.optimizer.state[matrix]) == {"momentum_buffer"}
    assert len(loop.optimizer.state) == len([*loop.model.parameters()])
    for one, state in loop.optimizer.state.items():
        assert all(value.shape == one.shape for key, value in state.items() if key != "step")
    assert (
        set(loop.optimizer.state[bias]) == {"step", "exp_avg", "exp_avg_sq"} and loop.optimizer.state[bias]["step"] == 3
    )


@needs_muon
@pytest.mark.parametrize("way", ["state_dict", "pickle", "copy", "distributed"])
def test_a_state_that_is_kept_continues_bit_for_bit(loop: Loop, way: str) -> None:
    straight, again = Loop(), Loop()
    straight.steps(6)
    loop.steps(3)
    again.model.load_state_dict(loop.model.state_dict())
    if way == "state_dict":
        again.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    elif way == "distributed":
        kept = copy.deepcopy(get_optimizer_state_dict(loop.model, loop.optimizer))
        set_optimizer_state_dict(again.model, again.optimizer, kept)
    else:
        pair = loop.model, loop.optimizer
        again.model, again.optimizer = pickle.loads(pickle.dumps(pair)) if way == "pickle" else copy.deepcopy(pair)
        again.schedule()
    again.scheduler.load_state_dict(loop.scheduler.state_dict())
    again.steps(3)
    assert again.values == straight.values


@needs_muon
def test_a_step_is_one_step_to_hooks_and_to_a_joined_peer(loop: Loop) -> None:
    seen, iterations = [], []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    Optimizers(loop.model, loop.optimizer).count(lambda: iterations.append(1))
    before = loop.values
    assert float(loop.optimizer.step(loop.loss).detach()) > 0  # type: ignore[arg-type]
    handle.remove()
    assert seen == [loop.optimizer] and len(iterations) == 1 and all(map(float.__ne__, before, loop.values))
    frozen = loop.values
    loop.optimizer.zero_grad()
    loop.optimizer.step()
    assert loop.values == frozen, "what has no gradient stays"


@needs_muon
def test_a_gradient_scaler_skips_the_step_of_both(loop: Loop) -> None:
    scaler, plain = torch.amp.GradScaler("cpu", init_scale=4.0), Loop()
    for factor in (1.0, float("inf"), 1.0):
        loop.optimizer.zero_grad()
        scaler.scale(factor * (loop.model(torch.full((2, 4), 0.5)) - 1).square().mean()).backward()
        scaler.step(loop.optimizer)
        scaler.update()
    for _ in range(2):
        plain.loss()
        plain.optimizer.step()
    assert loop.values == plain.values and scaler.get_scale() == 2.0


@needs_muon
def test_a_group_that_is_added_is_of_adamw_unless_it_says_otherwise(loop: Loop) -> None:
    plain, matrix = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    loop.optimizer.add_param_group({"params": [plain]})
    loop.optimizer.add_param_group({"params": [matrix], "kind": "muon", "lr": 0.5})
    plain.grad, matrix.grad = torch.eye(2), torch.eye(2)
    loop.optimizer.step()
    assert [len(loop.optimizer.state[one]) for one in (plain, matrix)] == [3, 1]


@needs_muon
def test_a_model_in_bfloat16_trains_beside_its_float32_masters() -> None:
    """The state has the parameters' dtype, as torch makes it; what is exchanged are gossipx's masters."""
    model = HalfNet(0, torch.bfloat16)
    arena, optimizer, losses = ParameterArena(model), muon(model, 0.02), []
    begin = {name: one.detach().clone() for name, one in model.named_parameters()}
    for _ in range(10):
        optimizer.zero_grad()
        loss = sum(one.float().square().mean() for one in model.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        optimizer.step()
        arena.step_done()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert all(section.values.dtype == torch.float32 for section in arena.sections)
    assert any(not torch.equal(begin[name], one) for name, one in model.named_parameters())
    for parameter, state in optimizer.state.items():
        assert all(value.dtype == (torch.float32 if key == "step" else parameter.dtype) for key, value in state.items())
    assert isinstance(optimizer, MuonAdamW)

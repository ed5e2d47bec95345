"""Integrations: what a group's rank 0 reports to the other ranks, and what is refused before joining."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossipx.errors import GossipxError, NotEnoughPeersError, UsageError
from gossipx.integrations import ddp
from gossipx.integrations.callback import PeerCallback
from gossipx.integrations.group import MOST, GroupStatus
from gossipx.launch.environment import ENV_PEERS, ENV_PROGRESS, ENV_RESUME


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tau": 5}, "unknown setting 'tau'"),
        ({"policy": "adaptve"}, "did you mean 'adaptive'"),
        ({"servers": "0"}, "a parameter server needs a loop of your own"),
        ({"config_file": "none.toml"}, "none.toml: cannot read the configuration"),
    ],
)
def test_a_callback_with_wrong_settings_is_refused_when_it_is_made(settings: dict[str, Any], told: str) -> None:
    """And not when training begins, which may be minutes of loading later."""
    with pytest.raises(UsageError, match=told):
        PeerCallback(**settings)


@pytest.mark.parametrize(("items", "recorded"), [(None, [2.5, 4.5]), (8, [5.0, 9.0])])
def test_the_trainers_loss_is_recorded_whatever_logging_steps_says(items: int | None, recorded: list[float]) -> None:
    """The Trainer tells callbacks every 500 steps. Of accumulated batches it is their mean, or with num_items_in_batch,
    by which the Trainer has each divided by the items of all, their sum."""
    pytest.importorskip("transformers")
    from gossipx.integrations.transformers import GossipCallback

    class Model(nn.Module):
        def forward(self, loss: float, **kwargs: Any) -> dict[str, torch.Tensor]:
            return {"loss": torch.tensor(loss)}

    logged: list[float] = []
    peer = SimpleNamespace(iteration=0, asked=False, leave_at_exit=lambda: None, finish=lambda: None)
    peer.log = lambda tag, value: logged.append(float(value))
    callback, model = GossipCallback(), Model()
    callback._joining = SimpleNamespace(  # type: ignore[assignment]
        own=lambda directory: directory,
        join=lambda *arguments: peer,
        run=SimpleNamespace(run=SimpleNamespace(log_interval=2)),
    )
    args = SimpleNamespace(output_dir="out", distributed_state=SimpleNamespace(distributed_type=None))
    state = SimpleNamespace(stateful_callbacks={}, is_world_process_zero=False)
    callback.on_train_begin(args, state, None, model=model, optimizer=object())
    for step in range(1, 5):
        for micro in (1, 2):
            model(float(step + micro - 1), **({} if items is None else {"num_items_in_batch": items}))
        model.eval()(99.0)
        model.train()
        peer.iteration = step
        callback.on_step_end(args, state, None)
    callback.on_log(args, state, None, logs={"loss": 7.0})
    assert logged == recorded


@given(st.text())
def test_a_status_of_any_error_has_room(text: str) -> None:
    assert len(msgspec.json.encode(GroupStatus.of(ValueError(text * 500)))) <= MOST


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (NotEnoughPeersError("1 of 4 peers left"), 4, "1 of 4 peers left"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
        (SystemExit(), 0, ""),
        (SystemExit(3), 3, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_others_fail_or_leave_as_rank_0_does(error: BaseException, code: int, reason: str) -> None:
    with pytest.raises(GossipxError if reason else SystemExit, match=reason or None) as raised:
        GroupStatus.of(error).end()
    assert code == (raised.value.exit_code if isinstance(raised.value, GossipxError) else raised.value.code)


@pytest.mark.parametrize(
    ("settings", "variable", "told"),
    [
        ({"servers": "0"}, "", "leave out --servers"),
        ({"mode": "server"}, "", "leave out --servers"),
        ({"checkpoint_every": "500"}, "", "framework's checkpoints contain gossipx's state"),
        ({}, ENV_RESUME, "framework's checkpoints contain gossipx's state"),
        ({"polcy": "tau:5"}, "", "policy"),
    ],
)
def test_settings_that_need_gossipxs_own_loop_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], variable: str, told: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=told):
        ddp.join(model, torch.optim.SGD(model.parameters(), lr=0.1), peers="none.txt", **settings)


def test_a_shard_is_the_same_part_that_the_peer_would_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_PEERS, raising=False)
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("127.0.0.1:7001\n127.0.0.1:7002\n127.0.0.1:7003\n")
    parts = [list(ddp.PendingJoin(hosts, rank=rank).shard(list(range(10))).indices) for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == list(range(10)) and {len(part) for part in parts} == {3, 4}
    with pytest.raises(UsageError, match="targets or labels"):
        ddp.PendingJoin(hosts, rank=0, settings={"partition": "dirichlet:alpha=1"}).shard(list(range(10)))


# --- refusals -----------------------------------------------------------------------------------------


def test_lightning_strategies_that_split_a_model_are_refused() -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    from gossipx.integrations.lightning import GossipCallback

    for strategy in (FSDPStrategy, DeepSpeedStrategy):
        fake = SimpleNamespace(strategy=strategy.__new__(strategy), optimizers=[])
        with pytest.raises(UsageError, match=rf"{strategy.__name__}.*strategy='ddp'"):
            GossipCallback().on_train_start(fake, nn.Linear(1, 1))
    fake = SimpleNamespace(strategy=DDPStrategy.__new__(DDPStrategy), optimizers=[])
    with pytest.raises(UsageError, match="configure_optimizers returns no optimizer"):
        GossipCallback().on_train_start(fake, nn.Linear(1, 1))


def test_accelerate_that_splits_a_model_or_has_not_prepared_it_is_refused() -> None:
    pytest.importorskip("accelerate")
    from accelerate import DistributedType

    from gossipx.integrations import accelerate

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for kind, told in ((DistributedType.FSDP, "FSDP splits the model"), (DistributedType.NO, "not prepared")):
        with pytest.raises(UsageError, match=told):
            accelerate.join(SimpleNamespace(distributed_type=kind), model, optimizer)


@pytest.mark.parametrize(
    ("name", "wanted"), [("lightning", "Lightning"), ("transformers", "transformers"), ("accelerate", "Accelerate")]
)
def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch, name: str, wanted: str) -> None:
    for module in ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks", "transformers", "accelerate"):
        if name in module:
            monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"gossipx.integrations.{name}", raising=False)
    with pytest.raises(UsageError, match=rf"{wanted} cannot be imported.*pip install '\.\[{name}\]'"):
        importlib.import_module(f"gossipx.integrations.{name}")


def test_a_launcher_in_between_does_not_part_a_peer_from_its_run() -> None:
    """torchrun closes the pipe in the processes that it starts."""
    reading, writing = os.pipe()
    peer = "from gossipx.launch.environment import start_reporting; start_reporting().tell(state='train')"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {peer!r}], check=True)"
    environment = {**os.environ, ENV_PROGRESS: str(writing)}
    subprocess.run([sys.executable, "-c", launcher], pass_fds=(writing,), env=environment, check=True, timeout=60)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        assert [json.loads(line) for line in pipe] == [{"state": "train"}]

"""Checkpoints of one peer, between the training thread and the writing thread, without a network."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arenas import average
from checkpoint_bench import ABOUT, Bench
from seeds import some
from small_disks import keep_old_checkpoints
from torch import nn

from gossipx.checkpoint import KEEP, CheckpointError, CheckpointPart, Store
from gossipx.codecs.rivals import EFSignSGD
from gossipx.compression import WaveCodec
from gossipx.errors import UsageError
from gossipx.outer import Nesterov
from gossipx.runtime import checkpoints
from gossipx.settings.modes import Elastic

LONG = 30.0
Make = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Make]:
    """Make peers, which begin to train."""
    made: list[Bench] = []

    def make(directory: Path | None = tmp_path, begins: bool = True, **options: Any) -> Bench:
        made.append(Bench(directory, **options))
        if begins:
            made[-1].begin()
        return made[-1]

    yield make
    for one in made:
        one.close()


class Slow(Store):
    """A store that writes each checkpoint only after ``may`` is released."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.begun, self.may = threading.Semaphore(0), threading.Semaphore(0)
        self.saved: list[int] = []

    def save(self, iteration: int, parts: Mapping[str, CheckpointPart]) -> None:
        self.begun.release()
        assert self.may.acquire(timeout=LONG)
        self.saved.append(iteration)
        super().save(iteration, parts)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint_bench.Store", Slow)


# --- the same state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["never", "drift:distance=0.05", "adaptive:threshold=0.1", "random:p=0.5"])
@pytest.mark.parametrize("sampled", [None, 3])
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], torch.float32), ids=str)
def test_training_resumes_bit_for_bit(bench: Make, dtype: torch.dtype, sampled: int | None, policy: str) -> None:
    """Weights, masters of 16-bit models, buffers, momenta, random numbers, deltas and the policy's state."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    straight = bench(dtype=dtype, policy=policy, sampled=sampled)
    straight.step(20)
    drawn = torch.randn(2), random.random(), np.random.random()
    torch.randn(2), random.random(), np.random.random()
    again = bench(dtype=dtype, policy=policy, sampled=sampled, resumes=True, begins=False)
    assert again.checkpoints.resumed and again.begin() == {"steps": 20}
    assert (torch.equal(torch.randn(2), drawn[0]), random.random(), np.random.random()) == (True, *drawn[1:])
    assert all(map(torch.equal, again.all(), straight.all()))
    assert again.driver.state_dict() == straight.driver.state_dict()

    torch.manual_seed(1)
    straight.step(15)
    torch.manual_seed(1)
    again.step(15)
    assert all(map(torch.equal, again.all(), straight.all()))
    assert again.driver.state_dict() == straight.driver.state_dict()
    assert int(again.module.seen) == 35


@pytest.mark.fault(83)
def test_several_optimizers_resume_with_their_states(bench: Make) -> None:
    straight = bench(several=True)
    torch.manual_seed(0)
    straight.step(20)
    again = bench(several=True, resumes=True)
    for one in (straight, again):
        torch.manual_seed(1)
        one.step(10)
    assert all(map(torch.equal, again.all(), straight.all()))
    with pytest.raises(UsageError, match=r"is of Adam and SGD, not Adam: join that optimizer, or call peer\.join_op"):
        only = bench(resumes=True)
        only.step(1)


def wave(one: Bench, number: int) -> tuple[object, list[torch.Tensor]]:
    """Take part in a wave of two whose other code is ours; return the reference after it and our new model."""
    codec, own = one.driver.waves.codecs[0], one.arena.snapshot()
    codec.encode(number, number, (0, 1), own.vectors, founds=False)
    codec.average(number, {1: codec.code(number, (0, 1), 0)})
    codec.end(number, {}, True, own.vectors, out := one.arena.exchanged.pool.buffer())
    codec.applied(number)
    own.release()
    return codec._number, [vector.clone() for vector in out.vectors]


@pytest.mark.parametrize("codec", [None, EFSignSGD()])
def test_a_reference_of_waves_resumes_with_momentum_and_what_its_owner_holds(bench: Make, codec: Any) -> None:
    torch.manual_seed(0)

    def made(resumes: bool) -> Bench:
        one = bench(begins=False, resumes=resumes)
        one.driver.waves.codecs[0] = WaveCodec(codec, one.arena, 0, Nesterov(0.8, 0.4))
        one.driver.begin_codec()
        one.begin()
        return one

    straight = made(False)
    straight.step(5)
    first, _ = wave(straight, 1)
    straight.step(5)
    again = made(True)
    assert again.driver.waves.codecs[0]._number == first
    ours, theirs = wave(straight, 2), wave(again, 2)
    assert ours[0] == theirs[0] != first and all(map(torch.equal, ours[1], theirs[1]))


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("rule", ["momentum:0.6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_outer_optimizer_resumes_with_its_state(bench: Make, dtype: torch.dtype, rule: str, fragments: int) -> None:
    """In a run with fragments, the state of each of them; here the first one was not exchanged yet."""
    torch.manual_seed(0)
    straight = bench(dtype=dtype, rule=rule, fragments=fragments)
    theirs = bench(None, dtype=dtype, fragments=fragments).arena
    exchanged = [fragment.number for fragment in theirs.fragments[-2:]]

    def kept(one: Bench) -> list[list[torch.Tensor]]:
        return [fragment.outer.vectors() for fragment in one.arena.fragments if fragment.outer is not None]

    straight.step(5)
    average(straight.arena, theirs, exchanged)
    straight.step(5)
    again = bench(dtype=dtype, rule=rule, resumes=True, fragments=fragments)
    assert [len(vectors) for vectors in kept(again)] == [len(vectors) for vectors in kept(straight)]
    assert all(all(map(torch.equal, *both)) for both in zip(kept(again), kept(straight), strict=True))
    assert kept(again)[-1] and bool(kept(again)[0]) == (fragments == 1)
    for one in (straight, again):
        average(one.arena, theirs, exchanged)
    assert all(map(torch.equal, again.module.state_dict().values(), straight.module.state_dict().values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.fault(38)
def test_a_hub_resumes_with_its_centre(bench: Make, dtype: torch.dtype) -> None:
    """The centre is neither a worker's model nor the hub's own; here no worker has changed it since the start."""
    torch.manual_seed(0)
    hub = Elastic(hub="0", alpha=0.3)
    straight = bench(dtype=dtype, hub=hub)
    centre = straight.centre()
    straight.step(10)
    again = bench(dtype=dtype, hub=hub, resumes=True)
    assert all(map(torch.equal, again.all(), straight.all()))
    assert all(map(torch.equal, again.centre(), centre))
    own = again.arena.snapshot()
    assert not torch.equal(own.buffer.vectors[0], centre[0]), "the hub has trained meanwhile"
    own.release()


def test_a_checkpoint_is_the_step_boundary_whatever_training_does_meanwhile(bench: Make, slow: None) -> None:
    torch.manual_seed(0)
    one = bench()
    one.step(10, flush=False)
    kept = {name: tensor.clone() for name, tensor in one.module.state_dict().items()}
    state = {key: value.clone() for key, value in one.optimizer.state_dict()["state"][0].items()}
    assert one.store.begun.acquire(timeout=LONG)
    one.step(5, flush=False)
    one.store.may.release()
    assert one.checkpoints.flush() is None
    found = one.store.load()
    assert found is not None and found.iteration == 10
    model = found.parts["model"].tensors
    assert model.keys() == kept.keys() - {"two.weight"}, "tied tensors are saved once"
    assert all(torch.equal(model[name], kept[name]) for name in model)
    assert all(
        torch.equal(found.parts["optimizer"].tensors[f"0.state.state.0.{key}"], value) for key, value in state.items()
    )
    assert one.arena.pool.now is not None and one.arena.pool.now.holders == 1, "the snapshot is released"


# --- when ---------------------------------------------------------------------------------------------


def test_a_checkpoint_due_while_another_is_written_is_skipped_and_counted(
    bench: Make, slow: None, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench()
    one.step(35, flush=False)
    assert one.checkpoints.skipped == 2
    assert [line for line in caplog.messages if "skipped" in line] == [
        "a checkpoint is skipped because the previous one is still being written: raise --checkpoint-every"
    ]
    one.store.may.release()
    assert one.checkpoints.flush() is None
    one.step(5, flush=False)
    one.store.may.release()
    assert one.checkpoints.flush() is None
    assert one.store.saved == [10, 40] and one.checkpoints.skipped == 2


@pytest.mark.fault(31)
def test_an_interval_in_seconds_uses_the_monotonic_clock(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 0.0)
    one = bench(every="60s")
    taken = []
    for _ in range(10):
        now[0] += 25
        one.step()
        taken.append(one.store.find())
    assert taken == [None, None, 3, 3, 3, 6, 6, 6, 9, 9]


@pytest.mark.fault(4)
def test_without_an_interval_only_the_last_checkpoint_is_written(bench: Make) -> None:
    one = bench(every="0")
    one.step(25)
    one.checkpoints.training_ended(dict)
    assert one.checkpoints.flush() is None and one.store.find() is None
    one.checkpoints.leaving(dict)
    assert one.checkpoints.flush() is None and one.store.find() == 25


@pytest.mark.parametrize("at", [20, 25])
def test_the_end_of_training_is_written_once(bench: Make, slow: None, at: int) -> None:
    one = bench(every="20")
    one.step(at, flush=False)
    for _ in range(2):
        one.store.may.release()
    one.checkpoints.training_ended(dict)
    one.checkpoints.leaving(dict)
    assert one.checkpoints.flush() is None
    assert one.store.saved == ([20] if at == 20 else [20, 25])


@pytest.mark.fault(22)
def test_a_model_with_nan_is_not_saved(bench: Make) -> None:
    """The newest checkpoint stays one that can be resumed from."""
    one = bench()
    one.step(10)
    one.driver.role.training.sound = False
    one.step(10)
    one.checkpoints.leaving(dict)
    assert one.checkpoints.flush() is None and one.store.find() == 10


def test_without_a_directory_nothing_is_captured(bench: Make) -> None:
    one = bench(None)
    one.step(20)
    one.checkpoints.leaving(dict)
    assert one.checkpoints.flush() is None and one.checkpoints._writer is None


# --- faults -------------------------------------------------------------------------------------------


def full(iteration: int, parts: Mapping[str, CheckpointPart]) -> None:
    raise CheckpointError("no room")


@pytest.mark.fault(28)
def test_a_full_disk_is_logged_at_a_limited_rate_and_the_last_checkpoint_decides(
    bench: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench()
    one.step(10)
    save = one.store.save

    monkeypatch.setattr(one.store, "save", full)
    for _ in range(30):
        one.step(flush=False)
        one.checkpoints._idle.wait(LONG)
    assert one.checkpoints.failed == 3 and caplog.messages == ["no room"]
    one.checkpoints.leaving(dict)
    assert isinstance(one.checkpoints.flush(), CheckpointError), "a failed checkpoint of this iteration is retried"
    assert one.checkpoints.failed == 4 and one.store.find() == 10
    monkeypatch.setattr(one.store, "save", save)
    one.checkpoints.leaving(dict)
    assert one.checkpoints.flush() is None and one.store.find() == 40


@pytest.mark.fault(28, 57)
def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_hides_no_later_failure(
    bench: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench()
    one.step(10 * KEEP)
    keep_old_checkpoints(monkeypatch)
    one.step(10)
    old = f"{one.store.directory}/00000010: an old checkpoint cannot be removed (Read-only file system)"
    assert caplog.messages == [old]
    written = one.store.find()
    assert one.checkpoints.newest == written == 10 * KEEP + 10, "the new one is complete"
    assert one.checkpoints.failed == 0 and one.checkpoints.flush() is None

    monkeypatch.setattr(one.store, "save", full)
    one.step(10, flush=False)
    assert isinstance(one.checkpoints.flush(), CheckpointError)
    assert caplog.messages == [old, "no room"] and one.checkpoints.failed == 1


def test_state_that_cannot_be_saved_is_logged_and_training_continues(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench()
    one.optimizer.param_groups[0]["schedule"] = object()
    one.step(30, flush=False)
    assert one.arena.step == 30 and one.checkpoints.failed == 3 and one.store.find() is None
    assert len(caplog.messages) == 1 and "optimizer.0.state.param_groups.0.schedule is of type object" in caplog.text
    assert isinstance(one.checkpoints.flush(), UsageError)


def test_an_unexpected_error_costs_one_checkpoint(
    bench: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once ended the thread that writes, and each later checkpoint waited 300 s for it."""
    one = bench()
    with monkeypatch.context() as broken:
        broken.setattr(one.store, "save", lambda iteration, parts: 1 / 0)
        one.step(10, flush=False)
        assert isinstance(one.checkpoints.flush(), CheckpointError)
    assert caplog.messages == ["a checkpoint cannot be written: ZeroDivisionError: division by zero"]
    one.step(10, flush=False)
    assert one.checkpoints.flush() is None and one.store.find() == 20


def test_an_optimizer_that_cannot_be_saved_is_told_as_training_begins(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench(every="0", begins=False)
    one.optimizer.param_groups[0]["schedule"] = object()
    one.begin()
    assert "schedule is of type object" in caplog.text and "no checkpoint can be written" in caplog.text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"about": {**ABOUT, "peers": 3}}, "a run with peers 2, not 3"),
        ({"about": {**ABOUT, "--policy": "tau"}}, "a run with --policy never, not tau"),
        ({"net": lambda dtype: nn.Linear(4, 1)}, "of another model: it has 'image float32 2x3x4x4"),
        ({"dtype": torch.float64}, "of another model: it has 'image float32"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(bench: Make, options: dict[str, Any], told: str) -> None:
    one = bench()
    one.step(10)
    other = bench(resumes=True, begins=False, **options)
    before = other.all()
    with pytest.raises(UsageError) as caught:
        other.begin()
    assert told in str(caught.value) and "00000010" in str(caught.value)
    assert all(map(torch.equal, other.all(), before)), "a refused checkpoint changes nothing"


# --- parts of the script ------------------------------------------------------------------------------


def test_parts_of_the_script(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    one, order = bench(), {"epoch": 3, "place": torch.arange(5)}
    one.checkpoints.register("order", lambda: order, order.update)
    one.checkpoints.register("model", dict, lambda state: None)  # does not collide with gossipx's own "model"
    one.step(10)
    order["epoch"] = 4
    again = bench(resumes=True)
    taken: list[Any] = []
    again.checkpoints.register("order", dict, taken.append)
    assert taken[0]["epoch"] == 3 and torch.equal(taken[0]["place"], torch.arange(5))
    again.checkpoints.register("new", dict, taken.append)
    assert len(taken) == 1 and "has no part 'new': it keeps its initial state" in caplog.text


def test_a_start_that_replaces_checkpoints_says_so(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The option to resume it may have been forgotten."""
    for told in (0, 1):
        made = bench()
        made.step(10)
        assert caplog.text.count("checkpoints of an earlier run are replaced; GOSSIPX_RESUME=1 resumes it") == told


@pytest.mark.parametrize("name", ["", "a/b", "..", "twice", "ä"])
def test_names_of_parts(bench: Make, name: str) -> None:
    one = bench()
    one.checkpoints.register("twice", dict, lambda state: None)
    with pytest.raises(UsageError, match="is not a valid new name of a checkpoint part"):
        one.checkpoints.register(name, dict, lambda state: None)


def test_state_that_cannot_be_saved_is_refused_at_registration(bench: Make) -> None:
    with pytest.raises(UsageError, match=r"sampler\.generator is of type"):
        bench().checkpoints.register("sampler", lambda: {"generator": torch.Generator()}, lambda state: None)


# --- an optimizer that is joined in mid-run -----------------------------------------------------------


def changed(bench: Make) -> Bench:
    """Return a peer that has trained 10 iterations with Adam and then 10 with SGD, joined in mid-run."""
    first = bench()
    first.step(10)
    follow_sgd(first)
    first.step(10)
    return first


def follow_sgd(one: Bench) -> None:
    one.optimizer = torch.optim.SGD([p for p in one.module.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    one.optimizers.replace(one.optimizer)
    one.checkpoints.optimizers_replaced()


@pytest.mark.fault(48)
def test_the_optimizer_joined_in_mid_run_gets_its_state_back(bench: Make) -> None:
    first = changed(bench)
    again = bench(resumes=True)
    follow_sgd(again)
    momenta = [one.optimizer.state_dict()["state"] for one in (first, again)]
    assert momenta[0].keys() == momenta[1].keys() and momenta[0]
    for key, state in momenta[0].items():
        assert torch.equal(state["momentum_buffer"], momenta[1][key]["momentum_buffer"])
    again.step(1)
    follow_sgd(again)
    assert not again.optimizer.state, "a later one begins anew"


@pytest.mark.fault(48)
def test_a_step_with_the_optimizer_of_before_is_refused(bench: Make) -> None:
    changed(bench)
    again = bench(resumes=True)
    with pytest.raises(
        UsageError, match=r"is of SGD, not Adam: join that optimizer, or call peer\.join_optimizer with it before"
    ):
        again.step(1)

"""Waves between real processes over real sockets."""

from __future__ import annotations

import numpy as np
import pytest

from runs import Folder

WATCHED = """
import hashlib
import gossipx.model.arena
import gossipx.model.pool

made, waves = [], []
class Counted(gossipx.model.pool.HostBuffer):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        made.append(self)
gossipx.model.pool.HostBuffer = Counted

plain = gossipx.model.arena.Fragment.apply_merged
def apply_merged(self, *arguments):
    plain(self, *arguments)
    now = self._boundaries.snapshot()
    waves.append(hashlib.sha256(now.buffer.view).hexdigest())
    now.release()
gossipx.model.arena.Fragment.apply_merged = apply_merged

model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
warm = 0
with gossipx.join(model, optimizer) as peer:
    torch.manual_seed(peer.rank)
    while peer.iteration < ITERATIONS:
        x = torch.randn(8, 4).double()
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True) * (peer.rank + 1)).square().mean().backward()
        optimizer.step()
        if peer.iteration == ITERATIONS // 2:
            warm = len(made)
    trained = len(made)
tell(peer, waves=waves, warm=warm, made=trained, held=len(peer._driver.captures))
"""


def test_after_each_blocking_wave_all_hold_the_same_bits(four: Folder) -> None:
    """At any progress, and with statistics too; only peers that have ended may miss the last waves."""
    script = four.script(WATCHED.replace("ITERATIONS", "100"))
    options = ("--policy", "tau:10", "--exchange", "waves", "--blocking", "--iterations", "100")
    four.run(*options, script, four.path)
    told = [four.told(rank) for rank in range(4)]
    common = set.intersection(*(set(one["waves"]) for one in told))
    assert len(common) >= 6, [len(one["waves"]) for one in told]
    begun = [[here in common for here in one["waves"]] for one in told]
    assert all(among[: len(common) - 1] == [True] * (len(common) - 1) for among in begun), begun
    assert all(one["held"] == 0 for one in told)


def test_waves_need_no_further_memory_once_warm(four: Folder) -> None:
    script = four.script(WATCHED.replace("ITERATIONS", "400"))
    four.run("--policy", "tau:4", "--exchange", "waves", "--iterations", "400", script, four.path)
    for rank in range(4):
        told = four.told(rank)
        assert told["made"] <= 8 and told["made"] - told["warm"] <= 2, told
        assert told["held"] == 0


@pytest.mark.slow
def test_the_sum_of_all_models_changes_by_own_steps_alone(four: Folder) -> None:
    """However the threads of the four processes interleave, while all of them train."""
    script = four.script("""
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
vector = nn.utils.parameters_to_vector
own, before = torch.zeros_like(vector(model.parameters())).detach(), None

def begins(*arguments):
    global before
    before = vector(model.parameters()).detach().clone()

def ends(*arguments):  # before the peer's own hook, which mixes
    own.add_(vector(model.parameters()).detach() - before)

optimizer.register_step_pre_hook(begins)
optimizer.register_step_post_hook(ends)
def over(peer):  # nobody is in a wave, or begins one: among fewer than four, a lost round would change the sum
    waves, ranks = peer._role.waves, range(4)
    return all_have(peer, "enough", peer._role.sync.retrievals > 60, ranks) and all_have(
        peer, "rests", waves.current is None, ranks
    )

def begins_one(seen):
    return seen.step % 3 == 0 and peer._role.sync.retrievals <= 60

with gossipx.join(model, optimizer, policy=begins_one) as peer:
    first = vector(model.parameters()).detach().clone()
    while not over(peer):
        x = batch(peer).double()
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True) * (peer.rank + 1)).square().mean().backward()
        optimizer.step()
last = vector(model.parameters()).detach()
tell(peer, own=own.tolist(), moved=(last - first).tolist(), waves=peer._role.sync.retrievals)
""")
    four.run("--exchange", "waves", "--finish", "none", script, four.path)
    told = [four.told(rank) for rank in range(4)]
    assert min(one["waves"] for one in told) > 60, [one["waves"] for one in told]
    own, moved = (np.array([one[key] for one in told]) for key in ("own", "moved"))
    assert np.abs(moved - own).max() > 0.05
    np.testing.assert_allclose(moved.sum(0), own.sum(0), rtol=0, atol=1e-9)


RESTORED = """
import torch.distributed as dist

model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with gossipx.join(model, optimizer) as peer:
    dist.init_process_group("gloo", f"file://{FOLDER}/pace", rank=peer.rank, world_size=2)
    while peer._role.sync.retrievals < 2:
        train(peer, model, optimizer, peer.iteration + 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 10.0)
    peer.load_state_dict(peer.state_dict())
    dist.barrier()  # else the faster peer would start a wave that the other joins with its earlier model
    train(peer, model, optimizer, peer.iteration + 12)
    dist.destroy_process_group()
tell(peer, values=[float(one) for parameter in model.parameters() for one in (parameter.min(), parameter.max())])
"""


@pytest.mark.parametrize("options", [("--outer", "nesterov"), ("--codec", "topk2")], ids=" ".join)
def test_a_restored_model_is_not_moved_by_what_was_kept_of_the_last_one(two: Folder, options: tuple[str, ...]) -> None:
    """Both peers hold it and do not train, so no wave may change it: neither by momentum nor by a reference."""
    waves = ("--exchange", "waves", "--policy", "tau:3", "--blocking", *options)
    two.run(*waves, two.script(RESTORED), two.path)
    for rank in range(2):
        assert two.told(rank)["values"] == pytest.approx([10.0] * 4, rel=1e-5)

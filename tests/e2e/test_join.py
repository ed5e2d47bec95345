"""``gossipx.join`` in users' scripts: real processes, real sockets.

Numbers in brackets are rows of the project's fault list.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runs import Folder, Run, differences, folder, one_line

BRIEF = ("--policy", "tau:5", "--iterations", "40", "--peer-timeout", "20")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Folder]:
    """A folder for two peers."""
    with folder(tmp_path, 2) as made:
        yield made


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Folder]:
    """A folder for three peers."""
    with folder(tmp_path, 3) as made:
        yield made


def agree(run: Run, peers: int) -> bool:
    """Whether all peers left the same model."""
    return all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-6 for rank in range(1, peers))


# --- loops --------------------------------------------------------------------------------------------


TEN_LINES = """
torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
peer = gossipx.join(model, optimizer)
first = [float(parameter.detach().sum()) for parameter in model.parameters()]
"""


def test_the_ten_line_loop(two: Folder) -> None:
    script = two.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 40)
tell(peer, arguments=sys.argv[2:], first=first, iteration=peer.iteration,
     last=[float(parameter.detach().sum()) for parameter in model.parameters()], size=peer.size)
"""
    )
    run = two.run(*BRIEF, "--blocking", script, two.path, "--epochs", "3", "-x")
    one, other = two.told(0), two.told(1)
    assert one["arguments"] == other["arguments"] == ["--epochs", "3", "-x"]
    assert one["first"] == other["first"] != one["last"]  # all start with one peer's weights
    assert one["last"] == pytest.approx(other["last"], abs=1e-5)
    assert one["iteration"] == other["iteration"] == 40 and one["size"] == 2
    assert agree(run, 2)
    assert run.summary["task"] is None and run.summary["test_accuracy"] == [None, None]
    assert sum(run.summary["retrievals"]) > 0


def test_a_script_without_finish_agrees_when_it_exits(two: Folder) -> None:
    run = two.run(*BRIEF, two.script(TEN_LINES + "train(peer, model, optimizer, 40)\n"), two.path)
    assert agree(run, 2) and run.summary["lost"] == []


def test_a_loop_without_an_optimizer(two: Folder) -> None:
    script = two.script(
        """
model = nn.Linear(4, 1)
with gossipx.join(model) as peer:
    while peer.iteration < 40:
        loss = (model(batch(peer)) - 1).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= 0.01 * gradient
        peer.step()
"""
    )
    run = two.run(*BRIEF, "--blocking", script, two.path)
    assert agree(run, 2) and sum(run.summary["retrievals"]) > 0


@pytest.mark.parametrize("by", ["iid", "dirichlet"])
def test_shards_are_disjoint_and_cover(three: Folder, by: str) -> None:
    script = three.script(
        """
class Labelled(torch.utils.data.TensorDataset):
    targets = torch.arange(100) % 10

model = nn.Linear(4, 1)
with gossipx.join(model) as peer:
    parts = [[int(row[0]) for row in peer.shard(Labelled(torch.arange(100)))]]
    if sys.argv[2] == "iid":
        parts.append([int(value) for value in peer.shard(list(range(100)))])
tell(peer, parts=parts)
"""
    )
    partition = {"iid": "iid", "dirichlet": "dirichlet:alpha=1"}[by]
    three.run(*BRIEF, "--partition", partition, script, three.path, by)
    for parts in zip(*(three.told(rank)["parts"] for rank in range(3)), strict=True):
        assert sorted(itertools.chain(*parts)) == list(range(100))


@pytest.mark.parametrize("policy", ["random:p=0", "drift:distance=1000"])
def test_a_restored_state_continues_as_if_uninterrupted(two: Folder, policy: str) -> None:
    """Iterations, the policy's state (through JSON) and later deltas are equal: restoring is not a step."""
    script = two.script(
        TEN_LINES
        + """
import copy
with peer:
    train(peer, model, optimizer, 15)
    mine = json.dumps(peer.state_dict())
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(peer, model, optimizer, 30)
    straight = [peer.state_dict(), [parameter.tolist() for parameter in model.parameters()]]
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    peer.load_state_dict(json.loads(mine))
    resumed = peer.iteration
    train(peer, model, optimizer, 30)
    again = [peer.state_dict(), [parameter.tolist() for parameter in model.parameters()]]
tell(peer, straight=straight, again=again, resumed=resumed)
"""
    )
    run = two.run("--policy", policy, "--peer-timeout", "20", script, two.path)
    for rank in range(2):
        told = two.told(rank)
        assert told["resumed"] == 15 and told["straight"] == told["again"]
        assert told["straight"][0]["sync"]["since"]["travelled"] > 0
    assert agree(run, 2)


def test_restoring_a_state_drops_a_pull_under_way(two: Folder) -> None:
    """Its difference refers to a replaced model; later pulls are mixed as usual."""
    script = two.script(
        TEN_LINES
        + """
import copy
with peer:
    train(peer, model, optimizer, 10)
    mine, kept = peer.state_dict(), copy.deepcopy(model.state_dict())
    for _ in range(20):
        train(peer, model, optimizer, 12)
        model.load_state_dict(kept)
        peer.load_state_dict(mine)
    back = [peer.state_dict()["sync"]["counts"] == mine["sync"]["counts"], peer.iteration]
    train(peer, model, optimizer, 60)
tell(peer, back=back)
"""
    )
    run = two.run("--policy", "tau:1", "--peer-timeout", "20", script, two.path)
    assert [two.told(rank)["back"] for rank in range(2)] == [[True, 10]] * 2
    assert run.summary["lost"] == [] and agree(run, 2)


# --- models -------------------------------------------------------------------------------------------

ZOO = """
class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.back = nn.Linear(8, 7, bias=False)
        self.back.weight = self.words.weight
        self.conv = nn.Conv2d(3, 8, 3, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.still = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 1).double()

    def forward(self, words, images):
        x = self.norm(self.conv(images)).mean((2, 3)) + self.back(self.words(words)).mean(1, keepdim=True)
        return self.wide(self.still(self.frozen(x)).double())


torch.manual_seed(os.getpid())
model = Zoo()
groups = [
    {"params": [*model.words.parameters(), *model.conv.parameters(), *model.norm.parameters()], "lr": 0.02},
    {"params": model.wide.parameters(), "lr": 0.005},
    {"params": model.still.parameters(), "lr": 0.0},
]
optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def state():
    return {name: value.detach().double().flatten().tolist() for name, value in model.state_dict().items()}


with gossipx.join(model, optimizer) as peer:
    first = state()
    generator = torch.Generator().manual_seed(peer.rank)
    for _ in range(40):
        optimizer.zero_grad()
        images = torch.randn(4, 3, 6, 6, generator=generator) + peer.rank
        out = model(torch.randint(7, (4,), generator=generator), images.to(memory_format=torch.channels_last))
        (out - 1).square().mean().backward()
        optimizer.step()
    during = model.words.weight.data_ptr() == model.back.weight.data_ptr()
tell(peer, first=first, last=state(), tied=[during, model.words.weight.data_ptr() == model.back.weight.data_ptr()],
     channels_last=model.conv.weight.is_contiguous(memory_format=torch.channels_last),
     dtypes=[str(model.wide.weight.dtype), str(model.conv.weight.dtype)])
"""


@pytest.mark.parametrize("buffers", ["mix", "local"])
def test_any_module_trains_and_agrees(two: Folder, buffers: str) -> None:
    run = two.run(*BRIEF, "--buffers", buffers, two.script(ZOO), two.path)
    one, other = two.told(0), two.told(1)
    assert one["first"] == other["first"]
    assert one["tied"] == other["tied"] == [True, True]
    assert one["channels_last"] and one["dtypes"] == ["torch.float64", "torch.float32"]
    statistics = {"norm.running_mean", "norm.running_var"}
    same = one["last"].keys() - (statistics if buffers == "local" else set())
    assert [name for name in same if one["last"][name] != pytest.approx(other["last"][name], abs=1e-5)] == []
    if buffers == "local":
        assert all(one["last"][name] != pytest.approx(other["last"][name], abs=1e-2) for name in statistics)
    unmoved = {name for name in one["last"] if one["last"][name] == one["first"][name]}
    assert unmoved == {"frozen.weight", "frozen.bias", "still.weight", "still.bias"}
    left = run.model(0)
    assert left.keys() == one["last"].keys()
    assert left["conv.weight"].flatten().tolist() == pytest.approx(one["last"]["conv.weight"])


def test_different_models_are_refused_and_the_first_different_tensor_is_named(two: Folder) -> None:
    """[21]"""
    script = two.script(
        """
width = 3 + int(os.environ["GOSSIPX_RANK"])
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, width), nn.Linear(width, 1))
with gossipx.join(model, torch.optim.SGD(model.parameters(), lr=0.01)) as peer:
    train(peer, model, None, 0)
"""
    )
    line = two.refused(*BRIEF, script, two.path)
    assert "1.weight" in line and "2.weight" not in line, line


def test_a_lazy_module_is_refused_by_name(two: Folder) -> None:
    script = two.script("model = nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(2))\ngossipx.join(model)\n")
    line = two.refused(*BRIEF, script, two.path)
    assert "'1.weight'" in line and "lazy module" in line


def test_compiled_and_plain_peers_agree(two: Folder) -> None:
    script = two.script(
        """
torch.manual_seed(0)
plain = model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
if os.environ["GOSSIPX_RANK"] == sys.argv[2]:
    model = torch.compile(model, backend="aot_eager")
    model(torch.randn(8, 4))  # compiled before it joins
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
looked = []


def evaluate(module):
    looked.append(float(sum(parameter.detach().sum() for parameter in module.parameters())))
    return 0.5


with gossipx.join(model, optimizer, evaluate=evaluate) as peer:
    before = float(plain[0].weight.detach().sum())
    train(peer, model, optimizer, 40)
    after = float(plain[0].weight.detach().sum())
tell(peer, moved=before != after, looked=looked)
"""
    )
    run = two.run(*BRIEF, "--blocking", script, two.path, "0")
    assert agree(run, 2) and sum(run.summary["retrievals"]) > 0
    assert two.told(0)["moved"] and two.told(1)["moved"]
    assert run.summary["test_accuracy"] == [0.5, 0.5] and run.summary["consensus_accuracy"] == 0.5
    before, after, averaged = two.told(0)["looked"]  # the accuracy of the averaged model is measured on that model
    assert averaged == pytest.approx(after, abs=1e-5) and after != before


# --- what counts as an iteration ----------------------------------------------------------------------


def test_only_steps_that_change_the_weights_count(two: Folder) -> None:
    script = two.script(
        """
counts = {}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
fused = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
with gossipx.join(model, optimizer) as peer:
    fused.register_step_post_hook(peer._optimizer_stepped)
    for _ in range(10):
        optimizer.zero_grad()
        for _ in range(4):
            model(batch(peer)).square().mean().backward()
        optimizer.step()
    counts["accumulated"] = peer.iteration
    for name, one in (("scaled", optimizer), ("fused", fused)):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        began, skipped = peer.iteration, 0
        for number in range(12):
            one.zero_grad()
            loss = model(batch(peer)).square().mean()
            scaler.scale(loss * float("inf") if number % 4 == 3 else loss).backward()
            scaler.step(one)
            scale = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < scale
        counts[name] = [peer.iteration - began, skipped]
tell(peer, **counts, finite=all(bool(parameter.isfinite().all()) for parameter in model.parameters()))
"""
    )
    two.run(*BRIEF, script, two.path)
    assert two.told(0) == {"accumulated": 10, "scaled": [9, 3], "fused": [9, 3], "finite": True}


# --- peers that are started by hand -------------------------------------------------------------------


def test_without_peers_join_names_the_options(two: Folder) -> None:
    script = two.script(
        """
from gossipx.errors import UsageError

try:
    gossipx.join(nn.Linear(4, 1))
except UsageError as error:
    sys.exit(str(error))
"""
    )
    line = one_line(two.start(script, two.path).end(), 1)
    assert "gossipx run --peers hosts.txt" in line and "peers='hosts.txt'" in line


def test_peers_started_by_hand_with_a_custom_policy(two: Folder) -> None:
    script = two.script(
        """
asked = []


def policy(observation):
    asked.append(observation.step)
    return observation.step % 4 == 0


model = nn.Linear(4, 1)
with gossipx.join(model, peers="hosts.txt", rank=int(sys.argv[2]), policy=policy, blocking=True,
                  peer_timeout=20, name="hand", logdir=str(FOLDER)) as peer:
    while peer.iteration < 20:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * (peer.rank + 1))
        peer.step()
    retrievals = peer._role.sync.retrievals
tell(peer, asked=asked, retrievals=retrievals, weight=model.weight.flatten().tolist())
"""
    )
    started = [two.start(script, two.path, str(rank)) for rank in (0, 1)]
    for process in started:
        ended = process.end()
        assert ended.code == 0 and ended.errors == "", ended.shown
    assert two.told(0)["asked"] == list(range(1, 21))
    assert two.told(0)["retrievals"] == two.told(1)["retrievals"] == 5
    assert two.told(0)["weight"] == pytest.approx(two.told(1)["weight"], abs=1e-6)
    assert all((two.path / "hand" / f"peer-{rank:02d}" / "model.safetensors").exists() for rank in (0, 1))


def test_several_lines_of_this_machine_need_a_rank(two: Folder) -> None:
    script = two.script("gossipx.join(nn.Linear(4, 1), peers='hosts.txt')\n")
    ended = two.start(script, two.path).end()
    assert ended.code == 1 and "give rank= or set GOSSIPX_RANK" in ended.errors, ended.shown


def test_a_restarted_peer_gets_a_model_before_it_trains(three: Folder) -> None:
    """[36, 37]"""
    script = three.script(
        """
torch.manual_seed(int(sys.argv[3]))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
peer = gossipx.join(model, optimizer, peers="hosts.txt", rank=int(sys.argv[2]), policy="tau:5", peer_timeout=20,
                    logdir=str(FOLDER), eval_interval=0)
began, back = peer.iteration, FOLDER / "back"
with peer:
    if sys.argv[3] == "1":
        back.touch()
    train(peer, model, optimizer, 20)
    print("trains", flush=True)
    if peer.rank == 2 and sys.argv[3] == "0":
        while True:  # until it is killed
            train(peer, model, optimizer, peer.iteration + 10)
    while not back.exists():
        train(peer, model, optimizer, peer.iteration + 10)
    train(peer, model, optimizer, peer.iteration + 50)
tell(peer, began=began, weight=model.weight.flatten().tolist(), iteration=peer.iteration)
"""
    )
    first = [three.start(script, three.path, str(rank), "0") for rank in range(3)]
    for process in first:
        process.line("trains")
    first[2].signal(signal.SIGKILL)
    assert first[2].end().code == -signal.SIGKILL
    for process in [*first[:2], three.start(script, three.path, "2", "1")]:
        ended = process.end()
        assert ended.code == 0 and "Traceback" not in ended.errors, ended.shown
    told = [three.told(rank) for rank in range(3)]
    assert told[0]["began"] == told[1]["began"] == 0
    assert told[2]["began"] >= 20 and told[2]["iteration"] >= told[2]["began"] + 50
    assert told[0]["weight"] == pytest.approx(told[1]["weight"], abs=1e-6)
    assert told[0]["weight"] == pytest.approx(told[2]["weight"], abs=1e-6)


# --- faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [True, False])
def test_a_script_that_raises_in_one_peer(three: Folder, block: bool) -> None:
    """The user's traceback is shown once, and the other peers continue."""
    loop = """
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        raise RuntimeError("a bug of the user's")
    train(peer, model, optimizer, 40)
"""
    script = three.script(TEN_LINES + ("with peer:" if block else "if peer:") + loop)
    run = three.run(*BRIEF, script, three.path, tracebacks=1)
    assert f"[{three.names[1]}] RuntimeError: a bug of the user's" in run.ended.output
    assert run.summary["lost"] == [three.names[1]]
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


def test_a_peer_killed_during_the_run_leaves_no_part_of_its_model(three: Folder) -> None:
    """[1, 32] It sends a model with extreme values when it dies; the others stay finite and agree."""
    script = three.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 20)
    if peer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    train(peer, model, optimizer, 60)
"""
    )
    run = three.run("--policy", "tau:1", "--iterations", "60", "--peer-timeout", "5", script, three.path)
    assert run.summary["lost"] == [three.names[2]]
    assert all(bool(tensor.isfinite().all()) for tensor in run.model(0).values())
    assert max(differences(run.model(0), run.model(1)).values()) <= 1e-6


def test_too_few_peers_left(three: Folder) -> None:
    """[11]"""
    script = three.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 10)
    if peer.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    train(peer, model, optimizer, 10**9)
"""
    )
    started = three.start_run("--policy", "tau:5", "--peer-timeout", "5", "--min-peers", "3", script, three.path)
    assert "fewer than" in one_line(started.end(), 4)


def test_a_poisoned_model_is_refused_and_counted(three: Folder) -> None:
    """[22] The NaN is in a buffer, not in the weights, so its sender does not notice."""
    script = three.script(
        TEN_LINES.replace("nn.ReLU()", "nn.BatchNorm1d(16)")
        + """
with peer:
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        model[1].running_mean.fill_(float("nan"))
    while not all_have(peer, "refused", peer._role.poisoned > 0, (0, 2)):
        train(peer, model, optimizer, peer.iteration + 5)
"""
    )
    run = three.run("--policy", "tau:1", "--blocking", "--peer-timeout", "20", script, three.path)
    for rank in (0, 2):
        assert all(bool(tensor.isfinite().all()) for tensor in run.model(rank).values())
        assert run.summary["poisoned"][rank] >= 1
    assert "holds NaN or Inf: not mixed" in run.ended.output, run.ended.shown
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


def test_a_diverged_peer_logs_it_and_spoils_no_other(three: Folder) -> None:
    """[22]"""
    script = three.script(
        TEN_LINES.replace(
            "(model, optimizer)", "(model, optimizer, evaluate=lambda m: float(m[0].bias.isfinite().all()))"
        )
        + """
with peer:
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        with torch.no_grad():
            model[0].bias.fill_(float("nan"))
    train(peer, model, optimizer, 40)
"""
    )
    run = three.run("--policy", "tau:3", "--peer-timeout", "20", script, three.path)
    said = [line for line in run.ended.output.splitlines() if "NaN" in line]
    assert len(said) == 1 and "own model holds NaN or Inf since iteration 11" in said[0], run.ended.shown
    assert run.summary["poisoned"] == [0, 0, 0]
    assert run.summary["test_accuracy"] == [1.0, 0.0, 1.0]
    assert run.summary["consensus_accuracy"] == 1.0  # of the finite models
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


# --- mistakes in scripts ------------------------------------------------------------------------------


def test_figures_may_be_tensors(two: Folder) -> None:
    script = two.script(
        TEN_LINES.replace("(model, optimizer)", "(model, optimizer, evaluate=lambda m: torch.tensor(0.75))")
        + """
with peer:
    for until in range(5, 45, 5):
        train(peer, model, optimizer, until)
        peer.log("train/loss", torch.tensor(1.5))
"""
    )
    run = two.run(*BRIEF, script, two.path)
    assert run.summary["test_accuracy"] == [0.75, 0.75] and run.summary["lost"] == []


@pytest.mark.parametrize("given", ["float('nan')", "'high'", "torch.zeros(2)"])
def test_an_invalid_accuracy_does_not_end_the_training(two: Folder, given: str) -> None:
    script = two.script(
        TEN_LINES.replace("(model, optimizer)", f"(model, optimizer, evaluate=lambda m: {given})")
        + "with peer:\n    train(peer, model, optimizer, 20)\n"
    )
    run = two.run(*BRIEF, script, two.path)
    assert run.summary["test_accuracy"] == [None, None] and agree(run, 2)


def test_changes_after_the_last_step_take_part_in_the_finish(two: Folder) -> None:
    """An example is a loop that loads averaged weights at the end."""
    script = two.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(peer.rank)
tell(peer, ends=[float(parameter.mean()) for parameter in model.parameters()])
"""
    )
    two.run("--policy", "never", script, two.path)
    assert two.told(0)["ends"] == two.told(1)["ends"] == [0.5] * 4


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError('no')"])
def test_a_script_that_fails_without_a_block_is_not_averaged_in(two: Folder, end: str) -> None:
    script = two.script(
        TEN_LINES
        + f"""
train(peer, model, optimizer, 10)
if peer.rank == 0:
    with torch.no_grad():
        model[0].weight.fill_(100.0)
    {end}
train(peer, model, optimizer, 30)
"""
    )
    run = two.run("--policy", "never", script, two.path, tracebacks=end.startswith("raise"))
    assert run.summary["lost"] == [two.names[0]]
    assert float(run.model(1)["0.weight"].abs().max()) < 50


def test_a_model_moved_after_joining_is_refused_by_name(two: Folder) -> None:
    script = two.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 5)
    model.double().float()
    train(peer, model, optimizer, 200)
"""
    )
    told = two.refused("--policy", "never", script, two.path)
    assert "'0.weight' lies in other memory" in told and "before gossipx.join" in told


def test_a_model_moved_after_the_last_step_is_saved_without_the_finish(three: Folder) -> None:
    """The training is not lost, neither this peer's nor that of the others."""
    script = three.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 30)
    if peer.rank == 1:
        model.half()
"""
    )
    run = three.run("--policy", "never", script, three.path)
    assert run.summary["lost"] == [] and run.model(1)["0.weight"].dtype == torch.float16
    assert "'0.weight' lies in other memory" in run.ended.output
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


def test_a_caught_exit_does_not_count(two: Folder) -> None:
    script = two.script(
        TEN_LINES
        + """
train(peer, model, optimizer, 5)
try:
    sys.exit(2)
except SystemExit:
    pass
train(peer, model, optimizer, 10)
"""
    )
    run = two.run(*BRIEF, script, two.path)
    assert run.summary["lost"] == [] and agree(run, 2)


def test_training_in_a_thread_continues_after_the_main_thread(two: Folder) -> None:
    script = two.script(
        TEN_LINES + "import threading\nthreading.Thread(target=train, args=(peer, model, optimizer, 300)).start()\n"
    )
    run = two.run("--policy", "tau:5", "--peer-timeout", "20", script, two.path)
    assert run.summary["iterations"] == 300 and run.summary["lost"] == [] and agree(run, 2)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("gossipx.join(model, optimizer)\ngossipx.join(model, optimizer)", "has joined already"),
        (
            "with gossipx.join(model, optimizer): pass\nwith gossipx.join(model, optimizer): pass",
            "under gossipx run a script joins once",
        ),
        ("gossipx.join(optimizer, model)", "join takes the model first, then the optimizer"),
        ("gossipx.join(model, 0.1)", "float is not a torch optimizer"),
        ("gossipx.join(nn.Linear(2, 2), optimizer)", "the optimizer trains none of the model's parameters"),
        ("gossipx.join(model, optimizer, iteration=7)", "unknown setting 'iteration' (did you mean 'iterations'?)"),
    ],
)
def test_a_wrong_call_of_join(two: Folder, body: str, told: str) -> None:
    start = "model = nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
    started = two.start_run("--peer-timeout", "5", two.script(start + body), two.path)
    ended = started.end()
    assert ended.code == 2 and ended.errors.count("\n") == 1 and told in ended.errors, ended.shown


def test_under_a_run_its_rank_and_settings_apply_but_a_policy_function_is_used(two: Folder) -> None:
    """The summary names the function."""
    script = two.script(
        TEN_LINES.replace(
            "(model, optimizer)", "(model, optimizer, rank=0, seed=3, policy=lambda seen: seen.step % 5 == 0)"
        )
        + "with peer:\n    train(peer, model, optimizer, 21)\ntell(peer, rank=peer.rank)\n"
    )
    run = two.run("--policy", "tau:10", "--blocking", script, two.path)
    assert [two.told(rank)["rank"] for rank in range(2)] == [0, 1]
    assert run.summary["policy"] == "function <lambda>" and run.summary["retrievals"] == [4, 4]


def test_a_loop_that_counts_no_iteration_is_warned(two: Folder) -> None:
    script = two.script("with gossipx.join(nn.Linear(4, 1)):\n    pass\n")
    run = two.run(*BRIEF, script, two.path)
    assert run.ended.output.count("no iteration was counted: pass the optimizer to gossipx.join") == 2


def test_a_forked_process_is_not_the_peer(two: Folder) -> None:
    """[4] In a forked process SIGTERM has its default action, and its exit does not finish the peer."""
    script = two.script(
        TEN_LINES
        + """
import multiprocessing
with peer:
    train(peer, model, optimizer, 5)
    other = multiprocessing.get_context("fork").Process(target=signal.pause)
    other.start()
    other.terminate()
    other.join(60)
    quick = multiprocessing.get_context("fork").Process(target=int)
    quick.start()
    quick.join(60)
    loader = torch.utils.data.DataLoader(range(8), num_workers=2)
    seen = sum(int(one) for one in loader)
    train(peer, model, optimizer, 10)
tell(peer, codes=[other.exitcode, quick.exitcode], seen=seen)
"""
    )
    run = two.run(*BRIEF, script, two.path)
    assert [two.told(rank)["codes"] for rank in range(2)] == [[-signal.SIGTERM, 0]] * 2
    assert [two.told(rank)["seen"] for rank in range(2)] == [28, 28]
    assert agree(run, 2) and run.summary["iterations"] == 10


def test_the_figures_are_reported_if_the_model_cannot_be_written(two: Folder) -> None:
    """[28]"""
    script = two.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        (FOLDER / "x" / "peer-01" / ".model.safetensors.tmp").mkdir()
"""
    )
    run = two.run(*BRIEF, script, two.path)
    assert run.summary["lost"] == [] and run.summary["iterations"] == 10
    assert "model.safetensors: it cannot be written" in run.ended.output and "--no-save-model" in run.ended.output
    assert "finished, but its process ended: exit code 1" in run.ended.output


def test_a_partition_by_label_needs_labels(two: Folder) -> None:
    script = two.script("with gossipx.join(nn.Linear(4, 1)) as peer:\n    peer.shard(list(range(100)))\n")
    told = two.refused("--partition", "dirichlet:alpha=0.3", script, two.path)
    assert "has no targets or labels" in told

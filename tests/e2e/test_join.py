"""``gossipx.join`` in users' scripts: real processes, real sockets."""

from __future__ import annotations

import itertools

import pytest

from runs import TEN_LINES, Folder, agree, one_line

BRIEF = ("--policy", "tau:5", "--iterations", "40", "--peer-timeout", "20")


# --- loops --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("by", ["iid", pytest.param("dirichlet", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("policy", ["drift:distance=1000", pytest.param("random:p=0", marks=pytest.mark.slow)])
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


@pytest.mark.fault(60)
def test_the_state_of_another_peer_is_refused_before_anything_is_restored(two: Folder) -> None:
    script = two.script(
        TEN_LINES
        + """
refused = []
with peer:
    train(peer, model, optimizer, 10)
    mine = peer.state_dict()
    for wrong in ({"rank": 1 - peer.rank}, {"peers": 3}, {"rank": None, "peers": None}):
        try:
            peer.load_state_dict({name: value for name, value in {**mine, **wrong}.items() if value is not None})
        except gossipx.errors.UsageError as error:
            refused.append(str(error))
    same = peer.state_dict() == mine
(peer.directory / "notes.txt").touch()
tell(peer, refused=refused, same=same, directory=str(peer.directory))
"""
    )
    run = two.run("--policy", "never", script, two.path)
    for rank in range(2):
        told = two.told(rank)
        assert told["same"] and told["directory"] == str(run.directory / f"peer-{rank:02d}")
        assert told["refused"] == [
            f"this is the state of peer {1 - rank}, not of peer {rank}: each peer resumes from its own",
            "this is the state of a peer in a run with 3 peers, not 2",
            "this is not the state of a peer: load what its state_dict() returned",
        ]


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


@pytest.mark.fault(21)
def test_different_models_are_refused_and_the_first_different_tensor_is_named(two: Folder) -> None:
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
    train(peer, model, optimizer, 43)  # some after the last pull
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
    for _ in range(10):
        optimizer.zero_grad()
        for _ in range(4):
            model(batch(peer)).square().mean().backward()
        optimizer.step()
    counts["accumulated"] = peer.iteration
    for name, one in (("scaled", optimizer), ("fused", fused)):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        peer.join_optimizer(one)
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
    assert ended.code == 2 and ended.errors.endswith(": give rank= or set GOSSIPX_RANK\n"), ended.shown
    assert ended.errors.count("\n") == 1 and ended.output == "", ended.shown

"""``gossipx.join`` in users' scripts, which may fail, be killed or misuse it: real processes, real sockets."""

from __future__ import annotations

import itertools
import signal

import pytest
import torch

from runs import TEN_LINES, Folder, Run, agree, all_end, differences

BRIEF = ("--policy", "tau:5", "--iterations", "40", "--peer-timeout", "20")
MODES = [
    ["--policy", "tau:5"],
    ["--servers", "0"],
    pytest.param(["--policy", "tau:5", "--hub", "0"], marks=pytest.mark.slow),
]
TRAINS = """
with peer:
    train(peer, model, optimizer, 41)
tell(peer, rank=peer.rank, version=torch.__version__)
"""


# --- loops --------------------------------------------------------------------------------------------


def test_the_ten_line_loop(two: Folder) -> None:
    text = """
with peer:
    train(peer, model, optimizer, 40)
tell(peer, arguments=sys.argv[2:], first=first, iteration=peer.iteration,
     last=[float(parameter.detach().sum()) for parameter in model.parameters()], size=peer.size)
"""
    run = two.run(*two.training(text, *BRIEF, "--blocking"), "--epochs", "3", "-x")
    one, other = two.told(0), two.told(1)
    assert one["arguments"] == other["arguments"] == ["--epochs", "3", "-x"]
    assert one["first"] == other["first"] != one["last"]  # all start with one peer's weights
    assert one["last"] == pytest.approx(other["last"], abs=1e-5)
    assert one["iteration"] == other["iteration"] == 40 and one["size"] == 2
    assert agree(run, 2)
    assert run.summary["task"] is None and run.summary["test_accuracy"] == [None, None]
    assert sum(run.summary["retrievals"]) > 0


def test_parts_by_label_are_disjoint_and_cover(three: Folder) -> None:
    text = """
class Labelled(torch.utils.data.TensorDataset):
    targets = torch.arange(100) % 10

with gossipx.join(nn.Linear(4, 1)) as peer:
    tell(peer, part=[int(row[0]) for row in peer.shard(Labelled(torch.arange(100)))])
"""
    three.run(*three.training(text, *BRIEF, "--partition", "dirichlet:alpha=1", start=""))
    assert sorted(itertools.chain(*(three.told(rank)["part"] for rank in range(3)))) == list(range(100))


def test_a_restored_state_continues_as_if_uninterrupted(two: Folder) -> None:
    """Iterations, the policy's state (through JSON) and later deltas are equal: restoring is not a step."""
    text = """
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
    run = two.run(*two.training(text, "--policy", "drift:distance=1000", "--peer-timeout", "20"))
    for rank in range(2):
        told = two.told(rank)
        assert told["resumed"] == 15 and told["straight"] == told["again"]
        assert told["straight"][0]["sync"]["since"]["travelled"] > 0
    assert agree(run, 2)


@pytest.mark.fault(60)
def test_the_state_of_another_peer_is_refused_before_anything_is_restored(two: Folder) -> None:
    text = """
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
    run = two.run(*two.training(text, "--policy", "never"))
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
    run = two.run(*two.training(ZOO, *BRIEF, "--buffers", buffers, start=""))
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


def test_a_lazy_module_is_refused_by_name(two: Folder) -> None:
    lazy = "gossipx.join(nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(2)))"
    line = two.refused(*two.training(lazy, *BRIEF, start=""))
    assert "'1.weight'" in line and "lazy module" in line


# --- peers that are started by hand -------------------------------------------------------------------


def test_peers_started_by_hand_with_a_custom_policy(two: Folder) -> None:
    text = """
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
    ended = all_end([two.start(*two.training(text, start=""), str(rank)) for rank in (0, 1)])
    assert all(one.errors == "" for one in ended)
    assert two.told(0)["asked"] == list(range(1, 21))
    assert two.told(0)["retrievals"] == two.told(1)["retrievals"] == 5
    assert two.told(0)["weight"] == pytest.approx(two.told(1)["weight"], abs=1e-6)
    assert all((two.path / "hand" / f"peer-{rank:02d}" / "model.safetensors").exists() for rank in (0, 1))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "start the script by 'gossipx run --peers hosts.txt SCRIPT'"),
        (", peers='hosts.txt'", ": give rank= or set GOSSIPX_RANK\n"),
    ],
)
def test_what_join_needs_without_gossipx_run_is_said_in_one_line(two: Folder, given: str, told: str) -> None:
    ended = two.start(two.script(f"gossipx.join(nn.Linear(4, 1){given})\n"), two.path).end()
    assert ended.code == 2 and told in ended.errors, ended.shown
    assert ended.errors.count("\n") == 1 and ended.output == "", ended.shown


AGAIN = """
import gc
import threading
import weakref

RANK, SETTINGS = int(sys.argv[2]), json.loads(sys.argv[3])
os.chdir(FOLDER)
gc.disable()  # what only a gc run would release counts as kept
descriptors, arenas = [], []
for number in range(5):
    # A peer that joins while the other is still leaving meets its last life, and counts it as restarted.
    while number and not (FOLDER / f"{1 - RANK}-over-{number - 1}").exists():
        signal.sigtimedwait([], 0.01)
    model = nn.Linear(4, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    joined = gossipx.join(
        model, optimizer, peers="hosts.txt", rank=RANK, name=f"{number}-{RANK}", **SETTINGS
    )
    with joined as peer:
        # A peer that ends earlier may leave the other without anyone to exchange with.
        while not all_have(peer, f"mixed-{number}", peer._role.sync.retrievals > 0, range(2), 100_000):
            train(peer, model, optimizer, peer.iteration + 20)
    retrievals = peer._role.sync.retrievals
    arenas.append(weakref.ref(peer._arena))
    del joined, peer, model, optimizer
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(10)  # close() tells them to end, and does not wait for all
    descriptors.append(len(os.listdir("/dev/fd")))
    (FOLDER / f"{RANK}-over-{number}").touch()
    assert retrievals > 0, "nothing was exchanged"
(FOLDER / f"{RANK}.json").write_text(
    json.dumps({"descriptors": descriptors, "arenas": sum(arena() is not None for arena in arenas)})
)
"""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param('{"policy": "tau:5", "blocking": true}', marks=pytest.mark.slow),
        pytest.param('{"policy": "tau:5", "hub": 0}', marks=pytest.mark.slow),
        '{"mode": "server", "servers": [0, 1], "checkpoint_every": "5"}',
    ],
)
def test_a_process_that_joins_repeatedly_keeps_no_memory_or_file_of_earlier_runs(two: Folder, settings: str) -> None:
    script = two.script(AGAIN)
    all_end([two.start(script, two.path, str(rank), settings) for rank in range(2)])
    for rank in range(2):
        told = two.told(rank)
        assert told["arenas"] == 0
        # Resources that are opened once per process stay open.
        assert told["descriptors"][1:] == [told["descriptors"][0]] * 4


# --- faults -------------------------------------------------------------------------------------------


@pytest.mark.fault(55)
@pytest.mark.parametrize("block", ["with peer:", pytest.param("if peer:", marks=pytest.mark.slow)])
def test_a_script_that_raises_in_one_peer(three: Folder, block: str) -> None:
    """The user's traceback is shown once, the other peers continue and finish, and the run has failed."""
    text = f"""
{block}
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        raise RuntimeError("a bug of the user's")
    train(peer, model, optimizer, 40)
"""
    run = three.run(*three.training(text, *BRIEF), tracebacks=1, code=1)
    assert f"failed: {three.names[1]}" in run.ended.output and run.summary["agreed"] is True
    assert f"[{three.names[1]}] RuntimeError: a bug of the user's" in run.ended.output
    assert run.summary["lost"] == [three.names[1]]
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


@pytest.mark.fault(76)
def test_a_constant_that_is_not_finite_is_exchanged_like_any_other(two: Folder) -> None:
    limits = 'model.register_buffer("limits", torch.tensor([float("nan"), -torch.inf]))'
    start = TEN_LINES.replace("optimizer =", f"{limits}\noptimizer =")
    run = two.run(*two.training(TRAINS, *BRIEF, "--blocking", start=start))
    assert run.summary["agreed"] is True and run.summary["poisoned"] == [0, 0]
    assert min(run.summary["retrievals"]) >= 1


@pytest.mark.fault(55)
@pytest.mark.parametrize(
    "end",
    [
        "leave(3)",
        "raise ValueError('no')",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("sys.exit(3)", "exit(3)")),
    ],
)
def test_a_script_that_fails_without_a_block_is_not_averaged_in(two: Folder, end: str) -> None:
    """An exit that is caught does not count."""
    text = f"""
train(peer, model, optimizer, 10)
if peer.rank == 0:
    with torch.no_grad():
        model[0].weight.fill_(100.0)
    {end}
try:
    sys.exit(2)
except SystemExit:
    pass
train(peer, model, optimizer, 30)
"""
    given = two.training(text, "--policy", "never", start="from sys import exit as leave\n" + TEN_LINES)
    run = two.run(*given, tracebacks=end.startswith("raise"), code=1)
    assert run.summary["lost"] == [two.names[0]]
    assert float(run.model(1)["0.weight"].abs().max()) < 50


def test_a_peer_killed_during_the_run_leaves_no_part_of_its_model(three: Folder) -> None:
    """[1, 32] It sends a model with extreme values when it dies; the others stay finite and agree."""
    text = """
with peer:
    train(peer, model, optimizer, 20)
    if peer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    train(peer, model, optimizer, 60)
"""
    run = three.run(*three.training(text, "--policy", "tau:1", "--iterations", "60", "--peer-timeout", "5"))
    assert run.summary["lost"] == [three.names[2]]
    assert sum(count or 0 for count in run.summary["suspicions"]) > 0
    assert (run.summary["corrupted"], run.summary["strangers"]) == ([0, 0, None], [0, 0, None])
    assert all(bool(tensor.isfinite().all()) for tensor in run.model(0).values())
    assert max(differences(run.model(0), run.model(1)).values()) <= 1e-6


# --- mistakes in scripts, and their surroundings -------------------------------------------------------


def test_changes_after_the_last_step_take_part_in_the_finish(two: Folder) -> None:
    """An example is a loop that loads averaged weights at the end."""
    text = """
with peer:
    train(peer, model, optimizer, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(peer.rank)
tell(peer, ends=[float(parameter.mean()) for parameter in model.parameters()])
"""
    two.run(*two.training(text, "--policy", "never"))
    assert two.told(0)["ends"] == two.told(1)["ends"] == [0.5] * 4


@pytest.mark.fault(49)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_moved_frozen_and_unfrozen_in_a_short_run_ends_with_equal_models(two: Folder, mode: list[str]) -> None:
    text = """
from torch.nn.utils import parameters_to_vector, vector_to_parameters

with peer:
    model[0].requires_grad_(False)
    train(peer, model, optimizer, 4)
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    model.double().float()
    train(peer, model, optimizer, 8)
tell(peer, moved=float((model[0].weight - before).norm()), iterations=peer.iteration)
"""
    run = two.run(*two.training(text, *mode))
    assert max(differences(run.model(0), run.model(1)).values()) <= 1e-6
    assert all(two.told(rank)["moved"] > 1e-4 and two.told(rank)["iterations"] == 8 for rank in (0, 1))


def test_a_model_moved_after_the_last_step_is_saved_without_the_finish(three: Folder) -> None:
    """The training is not lost, neither this peer's nor that of the others."""
    text = """
with peer:
    train(peer, model, optimizer, 30)
    if peer.rank == 1:
        model.half()
"""
    run = three.run(*three.training(text, "--policy", "never"), code=3)
    assert run.summary["agreed"] is False
    assert run.summary["lost"] == [] and run.model(1)["0.weight"].dtype == torch.float16
    assert "'0.weight' was changed from float32 to float16" in run.ended.output
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


def test_a_wrong_call_of_join(two: Folder) -> None:
    text = """
told = []


def refused(*arguments, **settings):
    try:
        gossipx.join(*arguments, **settings)
    except gossipx.errors.UsageError as error:
        told.append(str(error))


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
refused(optimizer, model)
refused(model, 0.1)
refused(nn.Linear(2, 2), optimizer)
refused(model, optimizer, iteration=7)
with gossipx.join(model, optimizer) as peer:
    refused(model, optimizer)
refused(model, optimizer)
tell(peer, told=told)
"""
    two.run(*two.training(text, "--peer-timeout", "5", start=""))
    causes = (
        "join takes the model first, then the optimizer",
        "float is not a torch optimizer",
        "the optimizer trains none of the model's parameters",
        "unknown setting 'iteration' (did you mean 'iterations'?)",
        "has joined already",
        "under gossipx run a script joins once",
    )
    for cause, line in zip(causes, two.told(0)["told"], strict=True):
        assert cause in line and "\n" not in line


@pytest.mark.fault(66)
@pytest.mark.slow
def test_a_spawned_process_of_a_script_without_a_main_guard_is_told_of_it(two: Folder) -> None:
    """As DataLoader's workers are where processes are not forked: each imports the script anew, and would join."""
    text = """
import multiprocessing
with peer:
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
    raise SystemExit(worker.exitcode)
"""
    ended = two.run(*two.training(text, "--policy", "tau:5", "--peer-timeout", "20"), code=2).ended
    told = "imports the script again: put its training under 'if __name__ == \"__main__\":'"
    assert told in ended.output + ended.errors and "port is in use" not in ended.output, ended.shown


@pytest.mark.fault(4)
def test_a_forked_process_is_not_the_peer(two: Folder) -> None:
    """In a forked process SIGTERM has its default action, and its exit does not finish the peer."""
    text = """
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
    run = two.run(*two.training(text, *BRIEF))
    assert [two.told(rank)["codes"] for rank in range(2)] == [[-signal.SIGTERM, 0]] * 2
    assert [two.told(rank)["seen"] for rank in range(2)] == [28, 28]
    assert agree(run, 2) and run.summary["iterations"] == 10


@pytest.mark.fault(32, 68)
def test_a_peer_without_memory_dies_alone(two: Folder) -> None:
    """Its address space is as large as what it uses, so its next large tensor does not fit."""
    text = """
import resource
with peer:
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24,) * 2)
        torch.zeros(2**28)
    train(peer, model, optimizer, 20)
"""
    ended = two.start_run(*two.training(text, *BRIEF)).end()
    run = Run(two.path / "x", ended)
    assert run.summary["lost"] == [two.names[1]] and run.summary["iterations"] == 20, ended.shown
    assert "can't allocate memory" in ended.output or "MemoryError" in ended.output, ended.shown


@pytest.mark.slow
@pytest.mark.fault(32, 68)
def test_a_peer_whose_threads_cannot_begin_dies_alone(two: Folder) -> None:
    """CPython waits for ever for a thread that has no memory to begin, so nothing may depend on one that starts it."""
    text = """
import threading
from gossipx.comm import client
def dies(thread):
    raise MemoryError
client._WORKER_IDLE = 0.0  # so that each request starts a thread
with peer:
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        threading.Thread._bootstrap = dies
        raise MemoryError
    train(peer, model, optimizer, 20)
"""
    ended = two.start_run(*two.training(text, *BRIEF)).end()
    run = Run(two.path / "x", ended)
    assert run.summary["lost"] == [two.names[1]] and run.summary["iterations"] == 20, ended.shown


def test_training_in_a_thread_continues_after_the_main_thread(two: Folder) -> None:
    text = "import threading\nthreading.Thread(target=train, args=(peer, model, optimizer, 300)).start()\n"
    run = two.run(*two.training(text, "--policy", "tau:5", "--peer-timeout", "20"))
    assert run.summary["iterations"] == 300 and run.summary["lost"] == [] and agree(run, 2)


def test_under_a_run_its_rank_and_settings_apply_but_a_policy_function_is_used(two: Folder) -> None:
    """The summary names the function."""
    settings = "(model, optimizer, rank=0, seed=3, policy=lambda seen: seen.step % 5 == 0)"
    start = TEN_LINES.replace("(model, optimizer)", settings)
    run = two.run(*two.training(TRAINS, "--policy", "tau:10", "--blocking", start=start))
    assert [two.told(rank)["rank"] for rank in range(2)] == [0, 1]
    assert run.summary["policy"] == "function <lambda>" and run.summary["retrievals"] == [8, 8]


def test_a_loop_that_counts_no_iteration_is_warned(two: Folder) -> None:
    run = two.run(*two.training("with gossipx.join(nn.Linear(4, 1)):\n    pass\n", *BRIEF, start=""))
    assert run.ended.output.count("no iteration was counted: pass the optimizer to gossipx.join") == 2


@pytest.mark.fault(67)
def test_peers_of_different_torch_versions_train_together(two: Folder) -> None:
    start = "if os.environ['GOSSIPX_RANK'] == '1':\n    torch.__version__ = '2.4.0'\n" + TEN_LINES
    run = two.run(*two.training(TRAINS, *BRIEF, "--blocking", start=start))
    assert two.told(0)["version"] != two.told(1)["version"] == "2.4.0"
    assert agree(run, 2) and run.summary["retrievals"] == [8, 8]

"""Settings of a run: which exclude each other, also if given as the default, and what peers are built from them."""

from __future__ import annotations

import importlib.util
import queue
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from managers import HERE, LONG, soon
from torch import nn

import gossipx
from gossipx import codecs
from gossipx.assembly import server
from gossipx.assembly.graph import build_schedule
from gossipx.assembly.peer import build_peer
from gossipx.assembly.presets import effective_config
from gossipx.assembly.server import Parts, serve
from gossipx.errors import GossipxError, PeerTimeoutError, PeerUnreachableError, UsageError
from gossipx.hub import rank_of_hub
from gossipx.launch.loops.train import optimizer_of
from gossipx.parts import Conditions, Storages, TransmitBuffer
from gossipx.peer.serving import SAVED, SECONDS_PER_MODEL
from gossipx.protocol import messages
from gossipx.protocol.effects import Answer
from gossipx.protocol.events import Received
from gossipx.runtime.figures.progress import Progress
from gossipx.runtime.optimizers import Optimizers
from gossipx.runtime.place import Place
from gossipx.runtime.training.peer import Peer
from gossipx.server.plan import server_ranks
from gossipx.settings import files
from gossipx.settings.sections import RunConfig
from gossipx.tasks.models import build_model
from gossipx.tasks.presets import PRESETS
from gossipx.topology import topology_from
from gossipx.transports import Address
from gossipx.wire import Bytes

SIZE = 4
OF_PEERS = [
    {"mode": "push"},
    {"mode": "pushpull"},
    {"exchange": "waves"},
    {"topology": "ring"},
    {"schedule": "random"},
    {"weights": "metropolis"},
    {"weights": "push-sum"},
    {"mixing": "aged"},
    {"mixing": "average:beta=0.3"},
    {"mode": "pull"},
    {"exchange": "pulls"},
    {"topology": "full"},
    {"weights": "uniform"},
    {"mixing": "average"},
]
"""Settings for peers that exchange with each other."""


def effective(has_script: bool = False, **given: Any) -> RunConfig:
    return effective_config(files.resolve(given), SIZE, has_script)


def read_again(config: RunConfig, directory: Path) -> RunConfig:
    """Return the configuration that a run has written into its directory, as a peer or a resumed run reads it."""
    file = directory / "config.toml"
    file.write_text(files.dump(config))
    return files.resolve(files.load(file))


def refused(**given: Any) -> str:
    with pytest.raises(UsageError) as caught:
        effective(**given)
    return str(caught.value)


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    "given", [*OF_PEERS, *({"policy": spec} for spec in ("tau:5", "tau", "adaptive:0.5", "adaptive", "never"))]
)
def test_servers_refuse_settings_of_peer_to_peer_exchanges(given: dict[str, str]) -> None:
    ((name, value),) = given.items()
    told = refused(servers="0,1", **given)
    assert told.startswith(f"--{name} {value} is for peers that exchange with each other")
    assert "with --servers 0,1 they exchange only with the servers" in told and "\n" not in told
    if name != "mode":
        assert "with --mode server they" in refused(mode="server", **given)


@pytest.mark.parametrize("has_script", [False, True])
@pytest.mark.parametrize("model", sorted(PRESETS))
def test_servers_refuse_no_default(model: str, has_script: bool, tmp_path: Path) -> None:
    """This includes the defaults of the model's preset and those in the configuration of a resumed run."""
    task = {} if has_script else {"model": model}
    for given in ({}, {"mode": "server"}):
        made = effective(has_script, servers="0", **task, **given)
        effective_config(read_again(made, tmp_path), SIZE, has_script)


@pytest.mark.parametrize("given", OF_PEERS)
@pytest.mark.parametrize("lost", ["gossip", "wait", "stop"])
def test_a_hub_refuses_settings_that_never_have_an_effect(given: dict[str, str], lost: str) -> None:
    """With --hub-lost gossip, workers without the hub pull from each other, so topology and mixing have an effect."""
    ((name, value),) = given.items()
    if lost == "gossip" and name not in ("mode", "exchange") and value != "push-sum":
        effective(hub="0", hub_lost=lost, **given)
        return
    told = refused(hub="0", hub_lost=lost, **given)
    assert "--hub 0" in told or value == "push-sum"
    assert told.startswith(f"--{name} {value} ") and "leave one out" in told and "\n" not in told


MOMENTUM = {"outer": "momentum:0.6"}


@pytest.mark.parametrize(
    ("around", "told"),
    [
        ({"hub": "0"}, "is for peers that exchange with each other, and with --hub 0"),
        ({"servers": "0"}, "is for peers that exchange with each other, and with --servers 0"),
        ({"mode": "push", "weights": "push-sum"}, "is for parts of a model, and --weights push-sum has one weight"),
    ],
)
def test_runs_that_refuse_fragments(around: dict[str, Any], told: str) -> None:
    """They and momentum suit exchanges between peers."""
    for fragments in (1, 4):
        said = refused(fragments=fragments, **around)
        assert said.startswith(f"--fragments {fragments} {told}") and said.endswith("leave one out")
    effective(fragments=4, mode="push")
    nesterov = {"exchange": "waves", "codec": "efsignsgd", "outer": "nesterov:lr=0.8,momentum=0.4"}
    for given in ({}, {"mode": "pushpull"}, {"exchange": "waves"}, {"codec": "3lc"}, nesterov):
        effective(fragments=4, **{**MOMENTUM, **given})


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_codecs_that_need_no_references_are_suggested_and_accepted(mode: str) -> None:
    told = refused(codec="topk", references=0, mode=mode)
    assert told.startswith("--codec topk loses too much of a model to be used without")
    named = told.partition("one of ")[2].split(", ")
    assert named == ["fp16", "bf16", "int8"]
    for codec in (*named, "int8+zlib"):
        effective(codec=codec, references=0, mode=mode)


@pytest.mark.fault(47)
@pytest.mark.parametrize(
    ("given", "has_script", "ran"),
    [
        ("adaptive", False, "adaptive:threshold=0.75,relative=true,max_silence=100"),
        ("adaptive:warmup=9,max_silence=50", False, "adaptive:threshold=0.75,relative=true,warmup=9,max_silence=50"),
        ("adaptive:relative=true", False, "adaptive:threshold=0.75,relative=true,max_silence=100"),
        ("adaptive", True, "adaptive:threshold=0.75,relative=true,max_silence=100"),
        ("adaptive:0.02", True, "adaptive:threshold=0.02"),
        ("tau:10", True, "tau:10"),
        ("tau", False, "tau:period=10"),
        ("never:warmup=3", False, "never:warmup=3"),
    ],
)
def test_the_policy_that_really_runs_is_recorded(given: str, has_script: bool, ran: str) -> None:
    """``adaptive`` alone suits any model; ``travel`` and ``drift`` of a built-in one have distances of their own."""
    made = effective(has_script, policy=given)
    assert made.decides == ran
    assert effective_config(made, SIZE, has_script).decides == ran, "a resumed run has the same"


@pytest.mark.parametrize(
    ("given", "has_script", "ran"),
    [
        ({}, False, ("adaptive:threshold=0.025", True, "none", "none")),
        ({"model": "googlenet"}, False, ("adaptive:threshold=0.02", True, "none", "none")),
        ({}, True, ("adaptive:threshold=0.02", True, "none", "none")),
        ({"policy": "adaptive:warmup=9"}, False, ("adaptive:threshold=0.025,warmup=9", True, "none", "none")),
        ({"policy": "tau:10", "finish": "consensus"}, False, ("tau:10", True, "consensus", "none")),
        ({"blocking": False, "policy": "never"}, True, ("never", False, "none", "none")),
    ],
)  # fmt: skip
def test_the_papers_preset(given: dict[str, Any], has_script: bool, ran: tuple[str, bool, str, str]) -> None:
    """Adaptive Communication: Algorithm 2 with the rule of section IV, Table I; given settings take precedence."""
    values = effective(has_script, preset="paper", **given).values
    assert tuple(values[name] for name in ("policy", "blocking", "finish", "outer")) == ran


WITHOUT_EFFECT = [
    ({"servers": "0", "blocking": False}, "--no-blocking is for peers that exchange with each other, and with"),
    ({"servers": "0", "max_served": 4}, "--max-served 4 is for peers that exchange with each other, and with"),
    ({"mode": "server", "delta": "exact"}, "--delta exact is for peers that keep a copy of their last step"),
    ({"servers": "0", "codec": "none"}, "--codec none is for models, and servers have --push-codec and --pull-codec"),
    ({"exchange": "waves", "mode": "pull"}, "--mode pull is for exchanges between two peers"),
    ({"exchange": "waves", "topology": "full"}, "--topology full limits which peers exchange"),
    ({"exchange": "waves", "weights": "uniform"}, "--weights uniform weights the models of two peers"),
    ({"exchange": "waves", "mixing": "average"}, "--mixing average is for pulled models"),
    ({"exchange": "waves", "max_served": 4}, "--max-served counts pulls, and with --exchange waves all peers average"),
    ({"mode": "pushpull", "mixing": "average"}, "--mode pushpull averages two models equally: leave --mixing out"),
    ({"references": 8}, "--references 8 needs a --codec: give one, or leave it out"),
    ({"max_pushes": 1}, "--max-pushes needs --mode push, not pull"),
    ({"blocking": True, "serve_share": 0.03}, "--serve-share limits how much answers to pulls slow down training"),
    ({"task": "text", "momentum": 0.9}, "--momentum 0.9 is for SGD, and AdamW trains --model transformer: leave it"),
    ({"optimizer": "lars", "lr": 5.0, "nesterov": True}, "--nesterov is for SGD, and LARS trains --model lenet"),
    ({"optimizer": "muon", "nesterov": True}, "--nesterov is for SGD, and Muon trains --model lenet: leave it out"),
    ({"task": "text", "gamma": 0.1}, "--gamma 0.1 is for a learning rate with steps, and that of --model transformer"),
    ({"model": "transformer", "lr_steps": (0.5, 0.7)}, "--lr-steps 0.5,0.7 is for a learning rate with steps, and"),
    ({"task": "text", "model": "lenet"}, "--model lenet cannot train --task text: transformer is for text, and all"),
    ({"task": "mnist", "model": "transformer"}, "--model transformer cannot train --task mnist: transformer is for"),
    ({"codec": "topk2", "exchange": "waves", "references": 3}, "--references are models of other peers"),
    ({"codec": "3lc", "mode": "push", "weights": "push-sum"}, "--codec 3lc is lossy, and --weights push-sum"),
    ({"codec": "dgc"}, "--codec dgc is for gradients only"),
    ({"codec": "3lc", "hub": "0"}, "--codec 3lc is for peers that exchange with each other, and with --hub 0"),
    ({"mixing": "choco", "hub": "0"}, "--mixing choco mixes encoded differences, and with --hub models are sent"),
    ({"pull_codec": "dgc", "servers": "0"}, "--pull-codec dgc is for gradients only: give it as --push-codec"),
    ({"checkpoint_every": "60s", "servers": "0"}, "--checkpoint-every 60s with servers: give iterations"),
    ({"mixing": "choco"}, "--mixing choco mixes encoded differences: give --codec, such as 3lc"),
    ({"mixing": "choco", "codec": "int8", "references": 0}, "--mixing choco mixes encoded differences:"),
    ({"mixing": "choco", "codec": "3lc", "mode": "push"}, "--mixing choco is for pulls and pairs"),
    (
        {**MOMENTUM, "hub": "0"},
        "--outer momentum:0.6 is for peers that exchange with each other, and with --hub 0 they",
    ),
    ({**MOMENTUM, "servers": "0"}, "--outer momentum:0.6 is for peers that exchange with each other, and with"),
    ({**MOMENTUM, "mode": "push"}, "--outer momentum:0.6 acts on exchanges that a peer begins"),
    ({"outer": "nesterov"}, "--outer nesterov needs the mean of all models: give --exchange waves"),
    ({"outer": "nesterov", "exchange": "waves", "init": "own"}, "--outer nesterov needs a common initial model"),
]
"""Settings of which one has no effect, or that exclude each other, and how the refusal begins."""


@pytest.mark.fault(65)
@pytest.mark.parametrize(("given", "told"), WITHOUT_EFFECT, ids=str)
def test_a_given_setting_without_effect_is_refused_as_a_default_too(given: dict[str, Any], told: str) -> None:
    text = refused(**given)
    assert text.startswith(told) and "\n" not in text


@pytest.mark.parametrize(
    ("given", "optimizer", "lr", "momentum"),
    [
        ({}, "sgd", 0.01, 0.9),
        ({"optimizer": "lars", "lr": 5.0}, "lars", 5.0, 0.9),
        ({"optimizer": "adamw", "lr": 0.001}, "adamw", 0.001, None),
        ({"task": "text"}, "adamw", 0.008, None),
        ({"task": "text", "optimizer": "lars", "lr": 5.0}, "lars", 5.0, 0.9),
        ({"model": "alexnet", "optimizer": "muon", "lr": 0.002}, "muon", 0.002, 0.95),
    ],
    ids=str,
)
def test_the_optimizer_is_the_models_or_another_with_a_rate_of_its_own(
    given: dict[str, Any], optimizer: str, lr: float, momentum: float | None
) -> None:
    """A learning rate of SGD suits neither AdamW nor LARS."""
    made = effective(**given).task
    assert (made.optimizer, made.lr, made.momentum) == (optimizer, lr, momentum)
    if optimizer != "muon":
        model = build_model("convnet" if made.model == "lenet" else made.model, classes=10, channels=3, pixels=32)
        assert type(optimizer_of(model, made)).__name__.lower() == optimizer
    if "optimizer" in given:
        given = {name: value for name, value in given.items() if name != "lr"}
        told = f"--optimizer {optimizer} needs --lr: the learning rate of --model {made.model} is for "
        assert refused(**given).startswith(told)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(
    ("given", "rate"), [({}, 0.003), ({"model": "convnet"}, 0.004), ({"task": "text"}, 0.008)], ids=str
)
def test_muon_has_a_rate_of_its_own_where_it_was_measured(given: dict[str, Any], rate: float) -> None:
    """Its momentum and weight decay are settings, too."""
    task = effective(**given, optimizer="muon", momentum=0.8).task
    model = build_model(task.model, classes=10, channels=0 if "task" in given else 1, pixels=28)
    matrices, rest = optimizer_of(model, task).param_groups
    assert (task.lr, matrices["lr"], rest["lr"], matrices["momentum"]) == (rate, rate, rate, 0.8)
    assert matrices["weight_decay"] == rest["weight_decay"] == task.weight_decay
    assert effective(**given, optimizer="muon").task.momentum == 0.95


@pytest.mark.parametrize("given", [{"task": "text"}, {"model": "transformer"}])
def test_text_selects_the_transformer_and_the_transformer_text(given: dict[str, Any], tmp_path: Path) -> None:
    made = effective(**given, lr=0.01, weight_decay=0.0, policy="travel")
    task = made.task
    assert (task.task, task.model, task.batch_size) == ("text", "transformer", 16)
    assert (task.lr, task.weight_decay) == (0.01, 0.0)
    assert (task.momentum, task.gamma, task.lr_steps) == (None, None, None)
    assert made.decides == "travel:distance=20"
    assert effective_config(read_again(made, tmp_path), SIZE, has_script=False) == files.absolute(made), (
        "a resumed run has the same"
    )


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({}, 250),
        ({"iterations": 200}, 20),
        ({"iterations": 7}, 1),
        ({"seconds": 60.0}, 250),
        ({"iterations": 200, "eval_interval": 150}, 150),
        ({"task": "text", "iterations": 500}, 50),
    ],
    ids=str,
)
def test_a_short_run_is_evaluated_ten_times(given: dict[str, Any], every: int) -> None:
    """A quick start of 200 iterations drew one dot."""
    config = effective_config(files.resolve(given), 2, has_script=False)
    assert config.run.eval_interval == every
    again = effective_config(files.resolve(vars(config.run)), 2, False)
    assert again.run.eval_interval == every, "a run that resumes reads its file"


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "lenet"),
        ("task", "fashion-mnist"),
        ("seconds", 60.0),
        ("lr_steps", (0.5, 0.75)),
        ("nesterov", False),
        ("eval_interval", 250),
    ],
)
def test_settings_of_the_built_in_task_are_refused_with_a_script(name: str, value: Any) -> None:
    option = f"--{name.replace('_', '-')}"
    shown = {"lr_steps": f"{option} 0.5,0.75", "nesterov": "--no-nesterov"}.get(name, f"{option} {value}")
    told = f"{shown} is for the built-in task, and a script decides that itself: leave it out"
    assert refused(has_script=True, **{name: value}) == told
    if name != "model":  # the first argument of join has this name
        with pytest.raises(UsageError, match=re.escape(told)):
            gossipx.join(nn.Linear(2, 1), None, peers="none", **{name: value})
    effective(has_script=True, partition="iid")


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"iterations": 3000}, "--iterations 3000 is for 'gossipx run', and a script decides that itself"),
        ({"threads": 1}, "--threads 1 is for 'gossipx run', and a script decides that itself"),
        ({"device": "cpu"}, "--device cpu is for 'gossipx run', and a script decides that itself"),
        ({"mode": "server", "policy": lambda seen: True}, "a parameter server uses sync= instead of policy="),
    ],
    ids=["iterations", "threads", "device", "policy"],
)
def test_what_join_refuses(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=f"^{told}"):
        gossipx.join(nn.Linear(2, 1), None, peers="none", **given)


@pytest.mark.fault(65)
def test_a_recorded_configuration_knows_what_was_given(tmp_path: Path) -> None:
    """Its defaults are not refused when another setting leaves them without effect, but what was given is, also in a
    file."""
    again = read_again(effective(seed=0), tmp_path)
    assert again.given == {"seed"} and again.decides == "tau:10"
    recorded = files.load(tmp_path / "config.toml")
    effective_config(files.resolve(recorded, {"servers": "0"}), SIZE, has_script=False)
    with pytest.raises(UsageError, match=r"^--topology full is for peers that exchange with each other"):
        effective_config(files.resolve(recorded, {"servers": "0", "topology": "full"}), SIZE, has_script=False)
    (tmp_path / "config.toml").write_text('[sync]\npolicy = "adaptive"\n[server]\nservers = "0"\n')
    with pytest.raises(UsageError, match=r"^--policy adaptive is for peers that exchange"):
        effective_config(files.resolve(files.load(tmp_path / "config.toml")), SIZE, has_script=False)
    for wrong in ('given = ["seed"]', "[given]", '[given]\nsettings = "seed"', '[given]\nsettings = ["sed"]'):
        (tmp_path / "config.toml").write_text(wrong)
        with pytest.raises(UsageError, match=r"config\.toml:1: \[given\] lists settings, as a run writes it"):
            files.load(tmp_path / "config.toml")


NO_BUFFER = r"2 servers have one each.*: give one server, or leave out wait=true$"


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    ("given", "told", "accepted"),
    [
        ({"servers": "0", "sync": "drop:n=9"}, "waits for all of 4 workers: give bsp, or a smaller n$", "drop:n=1"),
        ({"servers": "0,1", "sync": "bsp|drop:n=4"}, "waits for all of 4 workers: give bsp", "bsp|drop:n=1"),
        ({"servers": "0,1", "servers_only": True, "sync": "drop:n=2"}, "waits for all of 2 workers: give", "drop:n=1"),
        ({"servers": "0,1", "sync": "hybrid:wait=true"}, NO_BUFFER, "hybrid"),
    ],
    ids=str,
)
def test_a_sync_model_must_suit_the_servers_and_workers(given: dict[str, Any], told: str, accepted: str) -> None:
    """Stragglers that are dropped leave out a worker; with several buffers each could wait for another one's."""
    names = [str(rank) for rank in range(4)]
    with pytest.raises(UsageError, match=told):
        server_ranks(files.resolve(given), names)
    assert server_ranks(files.resolve({**given, "sync": accepted}), names) is not None
    assert server_ranks(files.resolve({"servers": "0", "sync": "hybrid:wait=true"}), names) == (0,)


@pytest.mark.parametrize(
    ("given", "ran"),
    [
        ({}, ("tau:10", "none")),
        ({"policy": "adaptive:threshold=0.5", "outer": "momentum:0.3"}, ("adaptive:threshold=0.5", "momentum:0.3")),
        ({"preset": "paper"}, ("adaptive:threshold=0.025", "none")),
        ({"preset": "paper", "hub": "0", "hub_lost": "wait"}, ("adaptive:threshold=0.025", "none")),
    ],
)  # fmt: skip
def test_settings_that_are_read_again_are_the_same(given: dict[str, Any], ran: tuple[str, str], tmp_path: Path) -> None:
    """By a run's peers, or to resume it; the first are the defaults."""
    made = effective(**given)
    assert (made.decides, made.values["outer"]) == ran
    assert effective_config(read_again(made, tmp_path), SIZE, has_script=False) == files.absolute(made)


# --- The effect of a run's limits of exchanges on the peers that are built from its settings ---------


PEERS = 8
VALUES = 25_000
NOW = 100.0


Make = Callable[..., Peer]


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds a training peer without starting it."""
    addresses = [Address("127.0.0.1", 1)] * PEERS
    names = tuple(f"peer-{rank}" for rank in range(PEERS))

    def made(rank: int = 0, **settings: Any) -> Peer:
        place = Place(rank, names, addresses, HERE, "the same list", None, Progress(None), False)
        given = files.resolve({"policy": "never", "peer_timeout": 20.0, "transport": "tcp", **settings})
        peer = build_peer((module := nn.Linear(VALUES, 1, bias=False)), Optimizers(module, None), given, place)
        undo.callback(peer.close)
        peer._role.stages.stage = messages.Stage.TRAIN
        return peer

    with ExitStack() as undo:
        yield made


def answers(peer: Peer, *requests: messages.Request) -> list[Answer]:
    """Return a peer's answers to simultaneous requests, one from each other peer."""
    role = peer._role
    effects = [role.handle(Received(rank, rank, request), NOW) for rank, request in enumerate(requests, 1)]
    return [effect for some in effects for effect in some if isinstance(effect, Answer)]


@pytest.mark.parametrize(
    ("kind", "settings", "most"),
    [
        (messages.PullRequest(1, 30.0), {}, 4),
        (messages.PullRequest(1, 30.0), {"max_served": 2}, 2),
        (messages.PullRequest(1, 30.0), {"max_served": 6}, 6),
        (messages.PushRequest(7, 1), {"mode": "push"}, 1),
        (messages.PushRequest(7, 1), {"mode": "push", "max_pushes": 3}, 3),
    ],
)
def test_the_number_of_requests_served_at_once(
    make: Make, kind: messages.Request, settings: dict[str, Any], most: int
) -> None:
    found = [type(answer.reply) for answer in answers(make(**settings), *[kind] * 7)]
    served = messages.ModelReply if isinstance(kind, messages.PullRequest) else messages.AcceptReply
    assert found == [served] * most + [messages.BusyReply] * (7 - most)


@pytest.mark.parametrize(
    ("settings", "apart"),
    [({}, SECONDS_PER_MODEL / 0.03), ({"serve_share": 0.001}, SECONDS_PER_MODEL / 0.001), ({"serve_share": 1.0}, 0.0)],
)
def test_the_time_between_answers_to_pulls(make: Make, settings: dict[str, Any], apart: float) -> None:
    """The unused share of an earlier period is available at once; after that each answer waits."""
    found = answers(make(max_served=7, **settings), *[messages.PullRequest(1, 30.0)] * 7)
    turns = [NOW - SAVED + number * apart for number in range(7)]
    assert [answer.begins for answer in found] == pytest.approx([max(turn, NOW) for turn in turns])


@pytest.mark.parametrize(("settings", "patience"), [({}, LONG), ({"max_rate": "8kbit"}, 1.0)])
def test_a_model_is_sent_at_the_maximum_rate(make: Make, settings: dict[str, Any], patience: float) -> None:
    """100 kB at 1 kB/s do not arrive within a second; without a limit they do."""
    sender, receiver = make(0, **settings), make(1)
    for rank, peer in enumerate((sender, receiver)):
        peer._comm.start()
        receiver._comm._member.addresses[rank] = peer._comm.address
    came: queue.Queue[messages.Reply | GossipxError] = queue.Queue()
    buffer = bytearray(receiver._arena.nbytes())
    request = messages.PullRequest(1, patience)
    receiver._comm.request(0, request, deadline=soon(patience), payload=Bytes(memoryview(buffer)), done=came.put)
    reply = came.get(timeout=2 * LONG)
    assert isinstance(reply, PeerTimeoutError | PeerUnreachableError if settings else messages.ModelReply)
    whole = sender._arena.slots[0].tensor.detach().numpy().tobytes()
    assert (buffer[: len(whole)] == whole) is not bool(settings)


@pytest.mark.parametrize(("settings", "seconds"), [({}, 20.0), ({"max_rate": "8kbit"}, 2 * 4 * VALUES / 1000)])
def test_the_timeout_of_a_model_follows_the_maximum_rate(make: Make, settings: dict[str, Any], seconds: float) -> None:
    assert make(**settings)._role.members.patience(1) == pytest.approx(seconds, rel=1e-3)


# --- The topology and the schedule that are built from a run's settings --------------------------------


HOSTS = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_sites_are_the_hosts_unless_the_topology_has_its_own() -> None:
    settings = files.resolve({"schedule": "inner-outer"})
    assert build_schedule(settings, 4, HOSTS).topology.sites == (0, 0, 2, 0)
    assert build_schedule(settings, 4, HOSTS).frequency(1) == pytest.approx({0: 0.45, 3: 0.45, 2: 0.1})
    own = files.resolve({"topology": "hierarchical:sites=2", "schedule": "inner-outer"})
    assert build_schedule(own, 4, HOSTS).topology.sites == (0, 0, 1, 1)


def test_the_topologys_schedule_unless_one_is_given() -> None:
    """A random graph uses the run's seed, and weights have to fit."""
    of_file = build_schedule(files.resolve({"topology": "one-peer-exponential"}), 8)
    given = build_schedule(files.resolve({"topology": "one-peer-exponential", "schedule": "random"}), 8)
    assert of_file.partner(0, 1, of_file.topology.neighbours[0], None, {}) == 2  # type: ignore[arg-type]  # the generator is not used
    assert type(given) is not type(of_file)
    made = [build_schedule(files.resolve({"topology": "regular", "seed": seed}), 20).topology for seed in (3, 4)]
    assert made[0].neighbours == topology_from("regular", 20, 3).neighbours != made[1].neighbours
    with pytest.raises(UsageError, match="metropolis needs an undirected graph"):
        build_schedule(files.resolve({"topology": "exponential", "weights": "metropolis"}), 8)


# --- Server settings that the handshake compares: it refuses a peer that differs, and names the option -


NAMES = ("a", "b", "c")


def alike(parts: Parts | None = None, **given: Any) -> dict[str, str]:
    """Return the settings that must be equal on all peers, by option."""
    module = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    served = serve(files.resolve({"servers": "0,1", **given}), NAMES, 0, module, [optimizer], parts or Parts())
    assert served is not None
    return served.alike


def differ(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [option for option in one if one[option] != other[option]]


@pytest.mark.parametrize(
    ("option", "value", "is_compared"),
    [
        ("servers", "0,2", True),
        ("servers_only", True, True),
        ("sync", "ssp:staleness=3", True),
        ("sync", "bsp|asp", True),
        ("apply", "push", True),
        ("pulls", "soft", True),
        ("placement", "sliced", True),
        ("bucket", 0, True),
        ("wait_free", False, False),
        ("overlap", False, False),
        ("server_lost", "stop", False),
        ("journal", False, False),
        ("checkpoint_every", "100", False),
    ],
)
def test_settings_shared_by_shards_and_workers_are_compared(option: str, value: Any, is_compared: bool) -> None:
    """Those of a single peer are not."""
    assert differ(alike(), alike(**{option: value})) == [f"--{option.replace('_', '-')}"] * is_compared


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"servers": "0,3"}, "--servers '3' is not a peer: give a rank from 0 to 2, or a name"),
        ({"servers": "0,0"}, "--servers 0,0 names a peer twice"),
        ({"servers": "0,1,2", "servers_only": True}, "--servers-only leaves no peer that trains"),
        ({"servers": "0", "hub": "1"}, "--hub and --servers exclude each other: leave one out"),
        ({"sync": "asp"}, "--sync needs a parameter server: name its peers with --servers, or leave --sync out"),
        ({"servers": "0", "sync": "bsp|asp"}, "--sync has 2 sync models for 1 shards: give one for all, or one per"),
        ({"servers": "0", "sync": "hybrid", "apply": "tick"}, "applies gradients by its threshold, not 'tick'"),
        ({"hub_only": True}, "--hub-only needs a hub: name it with --hub, or leave --hub-only out"),
        ({"hub": "0", "beta": 4.0}, "--beta 4 moves the centre past a worker's model: at most 3, 1 per worker"),
    ],
    ids=str,
)
def test_servers_and_hubs_that_a_run_refuses(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        config = effective_config(files.resolve(given), len(NAMES), has_script=False)
        server_ranks(config, NAMES), rank_of_hub(config.mode, NAMES)


class Sparse(TransmitBuffer):
    """A custom storage."""


def test_custom_parts_are_compared() -> None:
    assert differ(alike(), alike(Parts(storages=Storages(transmit=Sparse)))) == ["parts"]
    own = Conditions(pull=lambda view, pull: True, push=lambda view: True)
    assert differ(alike(), alike(Parts(sync=own))) == ["--sync"]


def test_a_codec_says_that_it_was_compiled_only_if_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow import of numba, or of a codec without loops, was called compiling."""
    monkeypatch.setattr(server, "SLOW_COMPILE", 0.0)
    codec = codecs.parse("3lc")
    server.warm_up(codec)
    caplog.clear()
    server.warm_up(codec)
    assert caplog.text == ""
    counts = iter([0, 3])
    monkeypatch.setattr(codecs, "compilations", lambda: next(counts))
    server.warm_up(codec)
    assert "compiling 3lc took" in caplog.text


def test_compiled_loops_are_counted_and_those_read_from_the_cache_are_not(tmp_path: Path) -> None:
    path = tmp_path / "doubled.py"
    path.write_text("from gossipx.codecs.loops import loop\n\n\n@loop\ndef doubled(x):\n    return 2 * x\n")
    codecs.parse("3lc").init(torch.zeros(1))
    for expected in (1, 0):
        before = codecs.compilations()
        spec = importlib.util.spec_from_file_location("doubled", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.doubled(2) == 4
        assert codecs.compilations() - before == expected

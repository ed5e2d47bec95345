"""The parameter server's API with the paper's names, and custom parts, in real processes with real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import places

import gossipx
from gossipx.errors import UsageError
from gossipx.launch.loops.initialize import ParameterServer
from gossipx.parts import Parts, ServerStorage, Storages, TransmitBuffer
from runs import Folder, differences

EXAMPLES = Path(__file__).parents[1] / "examples"
BRIEF = ("--servers", "0,1", "--peer-timeout", "20")


@pytest.fixture
def initialize(tmp_path: Path) -> Iterator[Callable[..., ParameterServer]]:
    """Call ``gossipx.initialize`` in this process, for a run of one peer."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"{places(1)[0]}\n")
    made: list[ParameterServer] = []

    def initialized(**settings: Any) -> ParameterServer:
        given = {"peers": hosts, "rank": 0, "logdir": str(tmp_path), "peer_timeout": 20.0, **settings}
        made.append(gossipx.initialize(**given))
        return made[-1]

    yield initialized
    for one in made:
        if one._peer is not None:
            one._peer.close()


# --- the paper's program ----------------------------------------------------------------------------------


def test_the_papers_program_with_all_of_its_parts(two: Folder) -> None:
    """Code 4.1 to 4.5 in real processes: gossipx run --servers 0,1 program.py."""
    run = two.run(*BRIEF, EXAMPLES / "program.py")
    summary = run.summary
    assert summary["iterations"] == 600 and summary["lost"] == []
    assert summary["policy"] == "SSPConsistency:staleness=3"
    assert summary["merged_by_hub"] == [1200, 1200]  # each of the two shards got every gradient
    assert sum(summary["retrievals"]) < 1000, "the slower worker's tables are recent enough in three of four iterations"
    assert max(differences(run.model(0), run.model(1)).values()) == 0
    truth = torch.ones(20, 20).triu()[:, ::2]
    assert float((run.model(0)["weight"] - truth).abs().max()) < 0.5
    assert run.ended.output.count("weights are off by 0.") == 2


LOOPS = {
    "torch": """
torch.manual_seed(3)
model = nn.Linear(4, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    while peer.iteration < 25:
        train(peer, model, optimizer, peer.iteration + 1)
        scheduler.step()
""",
    "names": """
import functools
torch.manual_seed(3)
model = nn.Linear(4, 3)
with gossipx.initialize(optimizer=functools.partial(torch.optim.Adam, lr=0.05)) as ps:
    tables = [ps.create_table(one, name) for name, one in model.named_parameters()]
    ps.start()
    scheduler = torch.optim.lr_scheduler.StepLR(ps.optimizer, 5, 0.5)
    while ps.peer.iteration < 25:
        pulls = [ps.pull(table) for table in tables]
        leaves = [pull.wait().requires_grad_() for pull in pulls]
        loss = (torch.nn.functional.linear(batch(ps.peer), *leaves).double() - 1).square().mean()
        for table, gradient in zip(tables, torch.autograd.grad(loss, leaves)):
            ps.update(table, gradient)
        ps.clock()
        scheduler.step()
""",
}


def test_a_torch_loop_and_a_program_have_the_same_result_with_and_without_wait_free(two: Folder) -> None:
    """Two workers use bsp, which fixes the order of sums, and a learning rate schedule."""
    models = []
    for name, loop in LOOPS.items():
        script = two.script(loop, f"train_{name}.py")
        for free in ([], ["--no-wait-free"]):
            run = two.run(*BRIEF, *free, script, two.path, name=f"{name}{len(free)}")
            models += [run.model(0), run.model(1)]
    assert all(max(differences(models[0], other).values()) == 0 for other in models[1:])


def test_a_pull_is_of_one_iteration(initialize: Callable[..., ParameterServer]) -> None:
    """FluentPS, Algorithm 1, line 5: kv.wait(kv.sPull(key, &w, i))."""
    kv, table = started(initialize)
    with kv:
        first = kv.pull(table)
        assert torch.equal(first.wait(), torch.zeros(2, 3)) and torch.equal(first.wait(), kv.sync(table))
        kv.update(table, torch.ones(2, 3))
        kv.clock()
        with pytest.raises(UsageError, match="this pull is of iteration 0, which is over: pull the table again"):
            first.wait()
        assert torch.equal(kv.pull(table).wait(), torch.full((2, 3), -0.1))
        with pytest.raises(UsageError, match="unknown table 1: tables are numbered 0 to 0"):
            kv.pull(1)
    with pytest.raises(UsageError, match="available only from start to the end of the with block"):
        kv.pull(table)


# --- each mistake is reported in one line ---------------------------------------------------------------------


def started(initialize: Callable[..., ParameterServer], **settings: Any) -> tuple[ParameterServer, int]:
    server = initialize(**settings)
    table = server.create_table(torch.zeros(2, 3), name="w")
    server.start()
    return server, table


def test_values_clock_and_the_end(initialize: Callable[..., ParameterServer]) -> None:
    """The default is the paper's SGD with learning rate 0.1; a table without an update keeps its values.

    Synced values are constant until the next sync, which writes into the same tensor.
    """
    server = initialize()
    with server:
        one, two = server.create_table(torch.ones(2, 3)), server.create_table([])
        assert (one, two) == (0, 1) and torch.equal(server.values(one), torch.ones(2, 3))
        server.start()
        for step in range(3):
            assert server.peer.iteration == step
            torch.testing.assert_close(server.sync(one), torch.full((2, 3), 1 - 0.1 * step))
            server.update(one, torch.ones(2, 3))
            server.clock()
        values = server.sync(one)
        server.optimizer.param_groups[0]["lr"] = 1.0
        server.update(one, torch.ones(2, 3))
        server.clock()
        torch.testing.assert_close(values, torch.full((2, 3), 0.7))
        server.update(two, torch.zeros(()))  # without sync
        server.clock()
        torch.testing.assert_close(server.sync(one), torch.full((2, 3), -0.3))
        assert server.sync(one).data_ptr() == values.data_ptr()
    torch.testing.assert_close(server.values(one), torch.full((2, 3), -0.3))
    assert float(server.values(two)) == 0
    with pytest.raises(UsageError, match="from start to the end of the with block"):
        server.sync(one)


Use = Callable[[ParameterServer], object]


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda ps: ps.update(0, torch.zeros(2, 3)), "from start to the end of the with block"),
        (lambda ps: ps.sync(0), "from start to the end of the with block"),
        (lambda ps: ps.clock(), "from start to the end of the with block"),
        (lambda ps: ps.peer, "from start to the end of the with block"),
        (lambda ps: ps.optimizer, "the optimizer is available after start"),
        (lambda ps: ps.create_table([2], "w"), "'w' is in use or not a name for a table"),
        (lambda ps: ps.create_table([2], "a.b"), "'a.b' is in use or not a name for a table"),
        (lambda ps: ps.create_table(torch.zeros(2, dtype=torch.int64)), "floating-point numbers"),
        (lambda ps: ps.values(1), "unknown table 1: tables are numbered 0 to 0"),
    ],
)
def test_misuse_before_the_start(initialize: Callable[..., ParameterServer], use: Use, told: str) -> None:
    server = initialize()
    server.create_table(torch.zeros(2, 3), name="w")
    with pytest.raises(UsageError, match=told) as raised:
        use(server)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda ps: [ps.update(0, torch.zeros(2, 3)) for _ in range(2)], "table 'w' has two updates in one iteration"),
        (lambda ps: ps.update(1, torch.zeros(2, 3)), "unknown table 1: tables are numbered 0 to 0"),
        (lambda ps: ps.sync(-1), "unknown table -1"),
        (lambda ps: ps.sync("w"), "unknown table 'w'"),
        (lambda ps: ps.update(0, torch.zeros(3, 2)), r"gradient of table 'w' is \[3, 2\], but the table is \[2, 3\]"),
        (lambda ps: ps.update(0, 1.0), r"gradient of table 'w' is float, but the table is \[2, 3\]"),
        (lambda ps: ps.create_table([2]), "call create_table before start"),
        (lambda ps: ps.start(), "start may be called only once"),
    ],
)
def test_misuse_after_the_start(initialize: Callable[..., ParameterServer], use: Use, told: str) -> None:
    server, _ = started(initialize)
    with pytest.raises(UsageError, match=told), server:
        use(server)


def test_misuse_of_initialize(initialize: Callable[..., ParameterServer]) -> None:
    with pytest.raises(UsageError, match="no table exists"):
        initialize().start()
    with pytest.raises(UsageError, match="no parameter server: name its servers by --servers"):
        initialize(mode="pull")
    with pytest.raises(UsageError, match="did you mean 'servers'"):
        initialize(server="0")


# --- parts that fail --------------------------------------------------------------------------------------------


class CannotEncode(TransmitBuffer):
    def encode(self) -> bytes:
        raise IndexError("the encoder's own fault")


class CannotDecode(ServerStorage):
    def decode(self, encoded: memoryview) -> torch.Tensor:
        raise IndexError("the decoder's own fault")


class CannotTell(ServerStorage):
    def encode(self) -> bytes:
        raise IndexError("the teller's own fault")


@pytest.mark.parametrize("storages", [{"transmit": CannotEncode}, {"server": CannotDecode}, {"server": CannotTell}])
def test_a_failing_part_ends_training_with_one_line(
    initialize: Callable[..., ParameterServer], storages: dict[str, Any]
) -> None:
    server = initialize(parts=Parts(storages=Storages(**storages)))
    table = server.create_table([4])
    with pytest.raises(UsageError, match=r"a part of the parameter server failed: IndexError: the \w+'s own fault"):
        server.start()
        for _ in range(3):
            server.update(table, torch.ones(4))
            server.clock()
        server.peer.close()

"""Changes of servers against FluentPS, section III-A: elastic parameter slicing rebalances, and changes nothing else.

"When the number of servers changes, EPS can also rebalance the workloads among the alive servers."
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import served
import torch
from seeds import some
from served import models
from transcripts import LoggedWorld

from gossipx.optimizers import LARS
from gossipx.server.mode import ServerMode
from gossipx.server.placement import BUILT_IN, Layout, Layouts, Partition, Sliced, Table, common_pieces, server_order

OPTIMIZERS: dict[str, served.Optimizer] = {
    "sgd": served.plain,
    "momentum": served.sgd,  # with weight decay
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, amsgrad=True),
    "lars": lambda parameters: LARS(parameters, lr=5.0, weight_decay=0.01),  # needs whole tensors
    **({"muon": served.muon} if hasattr(torch.optim, "Muon") else {}),  # as does this
}


def servers(made: LoggedWorld, rank: int = 0) -> tuple[int, ...]:
    """Return the servers of a peer's current layout."""
    exchange = made.peers[rank].role.exchange
    assert isinstance(exchange, ServerMode)
    return exchange.migration.layout.servers


def changed(made: LoggedWorld, times: Sequence[float] = (3.5, 7.5)) -> LoggedWorld:
    """Two servers become three, then one; checks that every peer follows."""
    for time, wanted in zip(times, ([0, 1, 2], [2]), strict=True):
        made.change_servers(1, time, wanted)
    served.ended(made)
    assert [servers(made, rank) for rank in made.peers] == [(2,)] * len(made.peers)
    assert len([entry for entry in made.log if entry.what.startswith("the servers are")]) == 2
    return made


# --- bsp is one process, under any layout -----------------------------------------------------------------


WHOLE = ("lars", "muon")
"""Optimizers that need whole tensors, which ``sliced`` cuts; tests/scenarios/test_server_faults.py has the refusal."""
HEURISTIC = [f"heuristic {name}" for name in OPTIMIZERS]
SLICED = [f"sliced {name}" for name in OPTIMIZERS if name not in WHOLE]


@pytest.mark.parametrize("case", some([*HEURISTIC, *SLICED], *HEURISTIC))
def test_bsp_stays_one_process_on_the_joined_batch(case: str) -> None:
    """Values, momenta and step counts move with their elements: the run ends as one without changes."""
    placed, name = case.split()
    options = {"servers": "0,1", "placement": placed, "optimizer": OPTIMIZERS[name]}
    made = changed(served.world(4, slow={1: 1.7}, **options))
    stayed = served.ended(served.world(4, slow={1: 1.7}, **options))
    expected = served.joined(range(4), optimizer=OPTIMIZERS[name])
    torch.testing.assert_close(models(made), expected.expand(4, -1), rtol=1e-9, atol=1e-9)
    # Pushes are summed in 64 bits in any order, so not a bit depends on the servers.
    torch.testing.assert_close(models(made), models(stayed), rtol=1e-14, atol=1e-14)
    assert served.clocks(made) == {0: served.ITERATIONS}


@pytest.mark.parametrize("placed", BUILT_IN)
@pytest.mark.parametrize("bucket", some([0, 100, 10**6], 100))
def test_every_placement_is_rebalanced(placed: str, bucket: int) -> None:
    made = changed(served.world(3, servers="0,1", placement=placed, bucket=bucket))
    torch.testing.assert_close(models(made), served.joined(range(3)).expand(3, -1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("only", [True, False])
def test_servers_that_train_or_do_not_and_a_barrier_of_all_shards(overlap: bool, only: bool) -> None:
    """The set of training peers is fixed: a worker that becomes a server keeps training; a former server waits for the
    end.
    """
    made = changed(served.world(4, servers="0,1", servers_only=only, overlap=overlap, slow={3: 2.0}), (5.5, 11.5))
    workers = [2, 3] if only else range(4)
    torch.testing.assert_close(models(made), served.joined(workers).expand(4, -1), rtol=1e-9, atol=1e-9)


def test_the_switched_sync_model_is_kept() -> None:
    made = served.world(3, servers="0")
    made.switch_sync(1, 2.5, "ssp:staleness=2")
    made.change_servers(2, 4.5, [1, 2])
    served.ended(made)
    clocks = [shard.clock for shard in served.shards(made).values()]
    assert [clock.settings["model"] for clock in clocks] == ["ssp:staleness=2"] * 2
    assert [clock.clock for clock in clocks] == [served.ITERATIONS] * 2


def test_the_count_of_gradients_continues() -> None:
    """Pushes before and after the change count once each, on any peer."""
    made = changed(served.world(3, servers="0,1"))
    counted = [peer.role.server.contributions for peer in made.peers.values()]
    stayed = served.ended(served.world(3, servers="2"))
    assert counted[0] < counted[2] < stayed.peers[2].role.server.contributions == 3 * served.ITERATIONS


# --- moves -------------------------------------------------------------------------------------------------

TABLES = [Table(str(number), size) for number, size in enumerate([500, 3, 0, 1200, 77, 40, 900, 1])]


def layouts(least: int = 100) -> Layouts:
    return Layouts(TABLES, Sliced(), lambda table: (None, 4), least)


def elements(pieces: Sequence[Partition]) -> int:
    return sum(one.stop - one.start for one in pieces)


def moved(before: Layout, after: Layout) -> int:
    return sum(elements(batch.pieces) for batch in layouts().batches(before, after))


@pytest.mark.parametrize("wanted", [{0, 1, 2}, {1, 2, 3}, {0}, {3}, {0, 1, 2, 3, 4}])
def test_only_elements_that_change_holders_move(wanted: set[int]) -> None:
    before = layouts().make([0, 1])
    after = layouts().make(server_order(before.servers, wanted))
    stays = sum(elements(common_pieces(before.held_by(rank), after.held_by(rank))) for rank in wanted)
    assert moved(before, after) == sum(table.size for table in TABLES) - stays


def test_remaining_servers_keep_their_order_and_new_ones_are_seated_in_the_middle() -> None:
    """Where least moves (Sliced): unit/test_placement.py compares all orders."""
    assert server_order((0, 1, 2), {0, 1, 2, 3}) == [0, 3, 1, 2]
    assert server_order((3, 1, 2), {1, 3}) == [3, 1]
    assert server_order((0,), {1, 2}) == [2, 1]


def test_a_batch_has_one_source_and_target_and_a_limited_size() -> None:
    before, after = layouts().make([0, 1]), layouts().make([1, 2, 0])
    for batch in layouts(100).batches(before, after):
        assert batch.source != batch.target and batch.pieces
        assert len(batch.pieces) == 1 or 4 * elements(batch.pieces) <= 100

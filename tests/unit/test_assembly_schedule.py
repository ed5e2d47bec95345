"""The topology and the schedule that are built from a run's settings."""

from __future__ import annotations

import pytest

from gossipx.assembly.graph import build_schedule
from gossipx.errors import UsageError
from gossipx.settings import files
from gossipx.topology import topology_from

HOSTS = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_sites_are_the_hosts_unless_the_topology_has_its_own() -> None:
    settings = files.resolve({"schedule": "inner-outer"})
    assert build_schedule(settings, 4, HOSTS).topology.sites == (0, 0, 2, 0)
    assert build_schedule(settings, 4, HOSTS).frequency(1) == pytest.approx({0: 0.45, 3: 0.45, 2: 0.1})
    own = files.resolve({"topology": "hierarchical:sites=2", "schedule": "inner-outer"})
    assert build_schedule(own, 4, HOSTS).topology.sites == (0, 0, 1, 1)


def test_a_random_graph_uses_the_runs_seed() -> None:
    made = [build_schedule(files.resolve({"topology": "regular", "seed": seed}), 20).topology for seed in (3, 4)]
    assert made[0].neighbours == topology_from("regular", 20, 3).neighbours != made[1].neighbours


def test_the_topologys_schedule_unless_one_is_given() -> None:
    of_file = build_schedule(files.resolve({"topology": "one-peer-exponential"}), 8)
    given = build_schedule(files.resolve({"topology": "one-peer-exponential", "schedule": "random"}), 8)
    assert of_file.partner(0, 1, of_file.topology.neighbours[0], None, {}) == 2  # type: ignore[arg-type]  # the generator is not used
    assert type(given) is not type(of_file)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="metropolis needs an undirected graph"):
        build_schedule(files.resolve({"topology": "exponential", "weights": "metropolis"}), 8)

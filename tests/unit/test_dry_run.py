"""``gossipx run --dry-run``: the plan and expected traffic of a run that is not started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from summaries import summary_of

from gossipx import policies
from gossipx.assembly.presets import effective_config
from gossipx.cli import main
from gossipx.errors import UsageError
from gossipx.figures import PER_PEER
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import nbytes
from gossipx.server.placement import Table
from gossipx.settings import files
from gossipx.sync import SyncManager
from gossipx.tasks.models import MODELS, build_model
from gossipx.tools import earlier, traffic
from gossipx.tools.dry_run import ASSUMED, DryRun, dry_run, parse_size
from gossipx.tools.traffic import ObservedRetrievals

LENET = 411_648
"""Bytes of its 102,882 values, each tensor from a cache line on."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a working directory with hosts files."""
    (tmp_path / "hosts.txt").write_text("localhost slots=4\n", encoding="utf-8")
    (tmp_path / "two.txt").write_text("10.0.0.1 slots=2 name=a\n10.0.0.2 slots=2 name=b\n", encoding="utf-8")
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look(
    *script: str, hosts: str = "hosts.txt", link: str | None = None, size: str | None = None, **given: Any
) -> DryRun:
    """Dry-run with the settings ``given``, and assert that nothing was written."""
    before = sorted(Path().rglob("*"))
    found = dry_run(files.resolve(given), Path(hosts), list(script), link, size)
    assert sorted(Path().rglob("*")) == before
    return found


def gossipx(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", "--dry-run", *arguments], prog_name="gossipx")


# --- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["never", "tau:10", "tau:7", "tau:10,warmup=25", "tau:1,warmup=400"])
def test_policies_without_weights_have_the_sync_managers_counts(spec: str) -> None:
    sync = SyncManager(policies.parse(spec))
    fired = sum(sync.step(step, 1.0) for step in range(1, 301))
    (count,) = traffic.counts(policies.parse(spec), 300, None, None)
    assert (count.least, count.most) == (fired, fired)


@pytest.mark.parametrize("spec", ["tau:10,max_silence=4", "never:max_silence=9", "tau:50,max_silence=30,warmup=70"])
def test_a_longest_silence_gives_bounds(spec: str) -> None:
    sync = SyncManager(policies.parse(spec))
    fired = 0
    for step in range(1, 301):
        if sync.step(step, 1.0):
            sync.requested()
            sync.completed()
            fired += 1
    (count,) = traffic.counts(policies.parse(spec), 300, None, None)
    assert 0 < count.least <= fired <= count.most


def test_a_random_policy_has_its_expected_count() -> None:
    (count,) = traffic.counts(policies.parse("random:p=0.1,warmup=100"), 1100, None, None)
    assert (count.source, count.least, count.most) == ("expected", 100.0, 100.0)


def test_exchanges_that_other_peers_begin_count_too() -> None:
    """In pairs, the partner's decisions; in waves those of all. A period counts from the last one in any case."""
    for deciders, expected in ((1, 100.0), (2, 200.0), (4, 400.0), (20, 1000.0)):
        (count,) = traffic.counts(policies.parse("random:p=0.1"), 1000, None, None, deciders)
        assert (count.source, count.least, count.most) == ("expected", expected, expected)
        (count,) = traffic.counts(policies.parse("tau:10"), 1000, None, None, deciders)
        assert (count.least, count.most) == (100, 100)
    of = {"mode": "pull"}, {"mode": "push"}, {"mode": "pushpull"}, {"exchange": "waves"}
    assert [traffic.deciders(files.resolve(given), 8) for given in of] == [1, 1, 2, 8]


def test_policies_on_weights_are_estimated_by_the_paper_by_runs_and_by_bounds() -> None:
    """Adaptive Communication, Table II: AlexNet makes 365 of 5,000 retrievals in 50,000 iterations."""
    adaptive = policies.parse("adaptive:threshold=0.02")
    paper, bounds = traffic.counts(adaptive, 5000, "alexnet", None)
    assert (paper.least, paper.most) == (36.5, 36.5) and "365 of 5000" in paper.source
    assert (bounds.least, bounds.most) == (0, 5000)
    other, _ = traffic.counts(adaptive, 5000, "lenet", None)
    assert (other.least, other.most) == (25.0, 53.2)
    run, _ = traffic.counts(adaptive, 5000, "alexnet", ObservedRetrievals(("mine", "yours"), 0.01, 0.02))
    assert (run.least, run.most) == (50, 100) and "mine, yours" in run.source
    eager, _ = traffic.counts(policies.parse("adaptive:threshold=0.02,max_silence=10"), 5000, "alexnet", None)
    assert (eager.least, eager.most) == (500, 500), "kept to what is sure"
    never, _ = traffic.counts(policies.parse("adaptive:threshold=0.02,warmup=5000"), 5000, "alexnet", None)
    assert (never.least, never.most) == (0, 0)
    (bounds,) = traffic.counts(policies.parse("adaptive:threshold=9"), 5000, "alexnet", None)
    assert bounds.source == "at least, at most", "the paper has no such threshold"
    for spec in ("travel:distance=2,max_silence=100", "adaptive"):
        (found,) = traffic.counts(policies.parse(spec), 5000, "alexnet", None)
        assert (found.least, found.most) == (50, 5000), "no run of the paper was like it"
    for spec, least, most in (("auto:budget=1%", 0, 54), ("auto:1%,max_silence=500", 10, 64), ("auto:100%", 0, 5000)):
        (found,) = traffic.counts(policies.parse(spec), 5000, "alexnet", None)
        assert (found.least, found.most) == (least, most)


# --- traffic --------------------------------------------------------------------------------------


def test_traffic_follows_the_mode() -> None:
    """In a star all peers exchange with rank 0, which exchanges with each of the others in turn."""
    pulled = traffic.gossip(files.resolve({"topology": "star"}), ["h"] * 4)
    third = 1 / 3
    expected = np.array([[0, third, third, third], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    assert np.allclose(pulled, expected)
    pushed = traffic.gossip(files.resolve({"topology": "star", "mode": "push"}), ["h"] * 4)
    assert np.allclose(pushed, expected.T)
    both = traffic.gossip(files.resolve({"topology": "star", "mode": "pushpull"}), ["h"] * 4)
    assert np.allclose(both, (expected + expected.T) / 2)
    coded = traffic.gossip(files.resolve({"exchange": "waves", "codec": "topk2"}), ["h"] * 4)
    assert np.allclose(coded, 1 - np.eye(4)), "each peer receives the changes of all others"
    hub = traffic.around_hub(1, 3)
    assert hub.tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize(("size", "received"), [(2, [1, 1]), (3, [2, 1, 1]), (4, [2, 2, 2, 2])])
def test_models_of_a_wave(size: int, received: list[int]) -> None:
    assert traffic.wave(size).sum(1).tolist() == received


def test_workers_push_to_and_pull_from_the_servers_of_other_peers() -> None:
    tables = [Table("a", 30), Table("b", 10)]
    settings = files.resolve({"servers": "0,1", "placement": "round-robin"})
    models = traffic.with_servers(settings.mode, (0, 1), tables, 3, pushed=0.5, pulled=1.0)
    # Gradients are encoded to half their size; table a is on rank 0, table b on rank 1.
    assert np.allclose(models, [[0, 0.375 + 0.25, 0.375], [0.75 + 0.125, 0, 0.125], [0.75, 0.25, 0]])
    alone = files.resolve({"servers": "0,1", "placement": "round-robin", "servers_only": True})
    assert traffic.with_servers(alone.mode, (0, 1), tables, 3, 1.0, 1.0)[0, 1] == 0


def test_link_seconds_count_traffic_between_machines_in_the_busier_direction() -> None:
    models = np.array([[0, 5, 1, 0], [5, 0, 0, 2], [4, 0, 0, 9], [0, 4, 9, 0]], float)
    assert traffic.link_seconds(models, [0, 0, 1, 1], 2.0, None) == 4  # the first machine receives 3 and sends 8
    assert traffic.link_seconds(models, [0, 1, 2, 3], 1.0, None) == 13  # rank 2 and rank 3 each receive 13
    # Each of its two peers sends 4 of the 8.
    assert traffic.link_seconds(models, [0, 0, 1, 1], 2.0, 0.5) == 8


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lenet", "convnet", "resnet20"])
@pytest.mark.parametrize("mixed", [True, False])
def test_bytes_are_those_that_an_arena_has(name: str, mixed: bool) -> None:
    facts = MODELS[name]
    module = build_model(name, classes=facts.classes, channels=facts.channels, pixels=facts.pixels)
    found = nbytes(module, mixed)
    arena = ParameterArena(module, mix_buffers=mixed)
    assert found == (arena.nbytes(), arena.nbytes(whole=True))


def test_a_codec_has_a_bound_and_a_size_for_normally_distributed_values(place: Path) -> None:
    fixed = look(codec="int8").model
    assert fixed.encoded_at_most is not None and 0 <= fixed.encoded_at_most - fixed.encoded_bytes < 100
    assert fixed.exchanged_bytes / fixed.encoded_bytes == pytest.approx(4, rel=0.02)
    ternary = look(codec="3lc").model
    # 3LC, section 3.2: at most 1.6 bits per value.
    assert ternary.encoded_at_most is not None and ternary.encoded_at_most * 8 / 102_882 == pytest.approx(1.6, rel=0.02)
    assert ternary.encoded_bytes < ternary.encoded_at_most
    sparse = look(codec="topk:ratio=0.01").model
    assert sparse.encoded_at_most is None  # a tensor may have to be sent dense, so that the bound is of no use
    assert sparse.encoded_bytes < 0.05 * LENET


@pytest.mark.parametrize(("text", "size"), [("45MB", 45_000_000), ("1.5 gb", 1_500_000_000), ("500kB", 500_000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["45", "MB", "-1MB", "0MB", "1e9GB", "infMB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--model-size '.*': give bytes with a unit"):
        parse_size(text)


# --- together -------------------------------------------------------------------------------------


def test_peers_of_this_machine_and_of_others(place: Path) -> None:
    (place / "secret").write_bytes(os.urandom(32).hex().encode())
    (place / "secret").chmod(0o600)
    settings = {"advertise": "10.0.0.1", "bind": "0.0.0.0", "secret_file": "secret", "topology": "ring"}
    found = look(hosts="two.txt", link="100mbit", policy="tau:10", iterations=1000, **settings)
    assert [(peer.name, peer.here) for peer in found.peers] == [
        ("a-0", True),
        ("a-1", True),
        ("b-0", False),
        ("b-1", False),
    ]
    (row,) = found.traffic
    assert row.exchanges == (100, 100) and row.received_bytes == (100 * LENET, 100 * LENET)
    # Each of a machine's two peers pulls from the other machine every second time: one model per round each way.
    assert row.link_seconds[0] == pytest.approx(100 * LENET / 12.5e6) and found.between_machines
    assert found.topology is not None and found.topology.degree_max == 2
    slower = look(hosts="two.txt", link="1gbit", policy="tau:10", iterations=1000, max_rate="25mbit", **settings)
    assert (slower.exchange_rate, slower.exchange_seconds) == ("25mbit", LENET / 3.125e6)
    # Each peer sends half a model per round to the other machine, at a quarter of the rate.
    assert slower.traffic[0].link_seconds[0] == pytest.approx(2 * row.link_seconds[0])


def test_an_exchange_of_fragments_moves_a_part(place: Path) -> None:
    """The finish and the start are of the whole model."""
    whole, parts = (look(policy="tau:10", iterations=1000, fragments=number) for number in (1, 4))
    assert parts.traffic[0].received_bytes[0] == whole.traffic[0].received_bytes[0] / 4 == 25 * LENET
    assert parts.exchange_seconds == whole.exchange_seconds / 4
    assert (parts.start_bytes, parts.finish_bytes) == (whole.start_bytes, whole.finish_bytes)
    said = CliRunner().invoke(main, ["run", "--dry-run", "--peers", "hosts.txt", "--fragments", "4"]).output
    assert "an exchange moves one of 4 fragments: 0.1029 MB" in said


def test_figures_of_a_script_are_per_megabyte_or_for_the_given_model_size(place: Path) -> None:
    unknown = look("train.py", policy="tau:10", iterations=1000)
    assert not unknown.model.is_known and unknown.traffic[0].received_bytes == (100 * ASSUMED, 100 * ASSUMED)
    known = look("train.py", size="45MB", policy="tau:10", iterations=1000)
    assert known.model.is_known and known.traffic[0].received_bytes[0] == 4.5e9
    with pytest.raises(UsageError, match="applies only to a script: the built-in task's model is known"):
        look(size="45MB")


def test_a_policy_is_compared_with_the_reference(place: Path) -> None:
    assert [row.policy for row in look(policy="tau:period=10").traffic] == ["tau:period=10"]
    assert [row.policy for row in look(policy="never").traffic] == ["tau:10", "never"]
    assert [row.policy for row in look(servers="0").traffic] == ["bsp"]
    assert {row.policy for row in look(policy="adaptive:0.025").traffic} == {"tau:10", "adaptive:threshold=0.025"}


@pytest.mark.parametrize(
    ("settings", "finish"),
    [
        ({}, 2.0),
        ({"finish": "none"}, 0.0),
        ({"hub": "0"}, 0.75),
        ({"exchange": "waves"}, 2.0),
        ({"servers": "1"}, None),
    ],
)
def test_the_finish_is_an_agreement_or_the_centre(place: Path, settings: dict[str, Any], finish: float | None) -> None:
    found = look(**settings)
    assert found.finish_bytes == (None if finish is None else finish * LENET)
    assert found.start_bytes == LENET


@pytest.mark.parametrize(("peers", "retrievals", "waves"), [(1, [0.0], 0.0), (4, [20.0] * 4, 10.0)])
def test_an_estimate_of_waves_counts_waves(place: Path, peers: int, retrievals: list[float], waves: float) -> None:
    """A summary counts the models that were merged, two in a wave of four peers."""
    figures = dict.fromkeys(PER_PEER, [1.0] * peers)
    named = {"name": "one", "codec": "none", "seed": 0, "peers": peers, "task": "fashion-mnist", "partition": "iid"}
    ends = {"consensus_accuracy": None, "consensus_loss": None, "agreed": True, "wall_seconds": 1.0, "stopped": []}
    policy, given = "adaptive:threshold=0.025", {"exchange": "waves"}
    kept = {"model": "lenet", "policy": policy, "iterations": 1000, "lost": [], "retrievals": retrievals}
    (place / "runs" / "one").mkdir(parents=True)
    summary_of(**{**figures, **named, **ends, **kept}).write(place / "runs" / "one")
    run = effective_config(files.resolve({"policy": policy, **given}), peers, has_script=False)
    (place / "runs" / "one" / "config.toml").write_text(files.dump(run))
    seen = earlier.seen(run, [], policies.parse(policy))
    assert seen is not None and seen.most * 1000 == pytest.approx(waves)


def test_an_estimate_uses_earlier_runs_of_the_same_kind(place: Path) -> None:
    figures = {key: [1.0, 1.0] for key in PER_PEER}
    plain = {"codec": "none", "seed": 0, "peers": 2, "task": "fashion-mnist", "partition": "iid", "lost": []}
    default = "adaptive:threshold=0.025"
    for name, given, policy, iterations, retrievals in (
        ("one", {}, default, 1000, [10.0, 30.0]),
        ("two", {}, default, 500, [20.0, None]),
        ("other-policy", {}, "adaptive:threshold=0.1", 1000, [500.0, 500.0]),
        ("other-model", {"model": "convnet"}, default, 1000, [600.0, 600.0]),
        ("other-rate", {"base_lr": 0.5}, default, 1000, [600.0, 600.0]),
        ("other-mode", {"mode": "push"}, default, 1000, [600.0, 600.0]),
        ("around-a-hub", {"hub": "0"}, default, 1000, [600.0, 600.0]),
    ):
        model = given.get("model", "lenet")
        kept = {**figures, **plain, "name": name, "model": model, "policy": policy, "iterations": iterations}
        results = {"retrievals": retrievals, "consensus_accuracy": None, "consensus_loss": None}
        results |= {"agreed": True, "wall_seconds": 1.0, "stopped": []}
        (place / "runs" / name).mkdir(parents=True)
        summary_of(**{**kept, **results}).write(place / "runs" / name)
        run = effective_config(files.resolve({"policy": policy, **given}), 4, has_script=False)
        (place / "runs" / name / "config.toml").write_text(files.dump(run))
    (place / "runs" / "broken").mkdir()
    (place / "runs" / "broken" / "summary.json").write_text("{")
    _, seen, bounds = look(policy=default, iterations=500).traffic
    assert seen.known == "as in one of 1,000 iterations, two" and seen.exchanges == (10.0, 20.0)
    assert bounds.exchanges == (0, 500)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--policy", "adptive"], "unknown policy 'adptive' (did you mean 'adaptive'?)"),
        (["--min-peers", "9"], "hosts.txt: --min-peers 9 is more than the 4 peers of the run"),
        (["--name", "taken"], "a run 'taken' already exists"),
        (["--name", "a/b"], "letters, digits"),
        (["--link", "fast"], "--link 'fast': not a rate from 8kbit"),
        (["--resume", "taken"], "--dry-run shows a new run"),
        (["--model", "googlnet"], "unknown model 'googlnet' (did you mean 'googlenet'?)"),
        (["missing.py"], "missing.py: script not found"),
        (["--task", "cifar10", "--data-dir", "nowhere"], "nowhere: neither cifar-10-binary.tar.gz"),
        (["--logdir", "hosts.txt/runs"], "cannot write the run"),
    ],
)
def test_a_wrong_setting_gives_the_error_of_a_run(place: Path, arguments: list[str], cause: str) -> None:
    (place / "runs" / "taken").mkdir(parents=True)
    result = gossipx("--peers", "hosts.txt", *arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and cause in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("option", [["--link", "1gbit"], ["--model-size", "1MB"], ["--json"]])
def test_options_that_need_dry_run(place: Path, option: list[str]) -> None:
    result = CliRunner().invoke(main, ["run", "--peers", "hosts.txt", *option], prog_name="gossipx")
    assert result.exit_code == 2 and f"{option[0]} requires --dry-run" in result.stderr


def test_json_and_text_output(place: Path) -> None:
    plain = json.loads(gossipx("--peers", "hosts.txt", "--policy", "tau:10", "--iterations", "100", "--json").stdout)
    assert plain["traffic"][0]["exchanges"] == [10, 10] and plain["topology"]["size"] == 4
    shown = gossipx("--peers", "hosts.txt", "--policy", "tau:10", "--iterations", "100", "--codec", "3lc").stdout
    for word in ("Nothing was started", "localhost:29403", "spectral gap", "tau:10", "s at 1gbit", "at most"):
        assert word in shown
    assert not (place / "runs").exists()

"""The rendezvous: threads in place of processes, at a real TCPStore."""

from __future__ import annotations

import errno
import fcntl
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from summaries import summary_of
from torch.distributed import TCPStore

from gossipx.checkpoint import pack
from gossipx.errors import GossipxError, UsageError
from gossipx.launch.directory import RunDirectory
from gossipx.launch.directory.shared import SharedDirectory
from gossipx.launch.environment import ADDED, ENV_RESUME
from gossipx.launch.hosts import peers_digest
from gossipx.launch.world import multi_process, process_list, rendezvous
from gossipx.launch.world.attempts import joins_again
from gossipx.launch.world.launchers import LaunchWorld
from gossipx.launch.world.multi_process import creator_of
from gossipx.launch.world.process_list import PeerInfo, check_reach, lines_of, peer_info_of, text_of
from gossipx.launch.world.rendezvous import RemoteAbortError, Rendezvous
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary
from gossipx.runtime.checkpoints import PEER, store_of
from gossipx.settings import files
from gossipx.settings.sections import ExchangeSettings


@pytest.fixture(autouse=True)
def _one_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all threads the same key prefix: each stands for a process that joins for the first time."""
    monkeypatch.setattr(rendezvous, "_joins", iter(lambda: 0, 1))


@pytest.fixture
def world() -> LaunchWorld:
    """Return the world of a rank of three, on this machine."""
    return LaunchWorld(0, 3, 0, True, "127.0.0.1", free_ports(1)[0], False, "test", "srun", "SLURM_NODELIST")


def each(world: LaunchWorld, ranks: Sequence[int], act: Callable[[int], Any]) -> list[Any]:
    """Call ``act`` for each rank in its own thread; return the results or exceptions."""

    def one(rank: int) -> Any:
        try:
            return act(rank)
        except GossipxError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_all_make_the_same_list(world: LaunchWorld) -> None:
    def act(rank: int) -> str:
        with Rendezvous(replace(world, rank=rank), 60) as meeting:
            text, held = process_list.agree(meeting, ExchangeSettings(), device=f"cuda:{rank}")
            held.close()
        return text

    first, *others = each(world, range(3), act)
    assert others == [first, first]
    lines = lines_of(first)
    assert [line.host for line in lines] == ["127.0.0.1"] * 3 and len({line.port for line in lines}) == 3
    assert [line.name.rpartition("-")[2] for line in lines] == ["0", "1", "2"]
    assert [line.device for line in lines] == ["cuda:0", "cuda:1", "cuda:2"]
    with socket.create_server(("127.0.0.1", world.port)):
        pass  # rank 0's port is free again for a second join


def test_a_missing_rank_is_named(world: LaunchWorld) -> None:
    def act(rank: int) -> None:
        with Rendezvous(replace(world, rank=rank), 1.0) as meeting:
            meeting.publish("peer", rank)
            meeting.gather("peer")

    for error in each(world, [0, 2], act):
        told = str(error)
        assert re.match(r"(rank \d aborted: )?rank 1 of 3 did not reach", told), told
        assert error.exit_code == 1


@pytest.mark.fault(74)
def test_a_machine_that_was_started_again_alone_is_told_that(world: LaunchWorld) -> None:
    """torchrun with a static rendezvous does so; processes of the attempt before have no use for what these publish."""
    told = r"ranks 0, 1, 2 of 3 did not reach .*: this is attempt 2, for which the launcher has to start all again"
    with pytest.raises(GossipxError, match=told), Rendezvous(replace(world, attempt=2), 0.2) as meeting:
        meeting.gather("peer")


@pytest.mark.parametrize(
    ("is_in_use", "changed", "seconds", "words"),
    [
        (False, {"rank": 1}, 0.5, ("cannot reach rank 0 at 127.0.0.1:PORT (SLURM_NODELIST)", "--rendezvous-timeout")),
        (False, {"rank": 1}, 0.5, ("within 0.5 s", "GOSSIPX_MASTER=host[:port]")),
        (False, {"master": None, "source": "mpirun"}, 5, ("mpirun does not define the host", "mpirun -x MASTER_ADDR")),
        (True, {}, 5, ("cannot listen on port PORT", "GOSSIPX_MASTER")),
        (True, {"rank": 1, "hosted": True, "source": "torchrun"}, 1.0, ("is not a torch store", "--master-port")),
    ],
)
def test_what_keeps_a_rendezvous_from_beginning_is_named(
    world: LaunchWorld, is_in_use: bool, changed: dict[str, Any], seconds: float, words: tuple[str, ...]
) -> None:
    """With what to change. A port may be in use by a web server that never answers what it does not understand."""
    with ExitStack() as stack:
        if is_in_use:
            stack.enter_context(socket.create_server(("127.0.0.1", world.port)))
        with pytest.raises(GossipxError) as caught:
            Rendezvous(replace(world, **changed), seconds)
    told = str(caught.value)
    assert "\n" not in told and all(word.replace("PORT", str(world.port)) in told for word in words), told


def test_two_processes_with_the_same_rank(world: LaunchWorld) -> None:
    def act(number: int) -> None:
        with Rendezvous(replace(world, rank=min(number, 1)), 30) as meeting:
            meeting.get("all here", 2)

    errors = each(world, range(3), act)
    (double,) = (error for error in errors if not isinstance(error, RemoteAbortError))
    assert isinstance(double, UsageError) and "two processes got rank 1 from srun" in str(double)


@pytest.mark.parametrize(
    ("failing", "error", "told", "code"),
    [(0, UsageError("no such policy"), "no such policy", 2), (1, KeyboardInterrupt(), "KeyboardInterrupt", 130)],
)
def test_an_error_of_one_rank_ends_all_with_its_exit_code(
    world: LaunchWorld, failing: int, error: BaseException, told: str, code: int
) -> None:
    """Or Ctrl-C, before all processes have arrived."""

    def act(rank: int) -> None:
        if rank == failing:
            with pytest.raises(type(error)), Rendezvous(replace(world, rank=rank), 60):
                raise error
        else:
            with Rendezvous(replace(world, rank=rank), 60) as meeting:
                meeting.get("never")

    others = [one for one in each(world, range(3), act) if one is not None]
    assert [(str(one), one.exit_code) for one in others] == [(f"rank {failing} aborted: {told}", code)] * 2


def test_a_single_process_needs_no_store_and_is_warned(world: LaunchWorld, caplog: pytest.LogCaptureFixture) -> None:
    with Rendezvous(replace(world, size=1, master=None), 1) as meeting:
        text, held = process_list.agree(meeting, ExchangeSettings())
        held.close()
    assert len(lines_of(text)) == 1 and "srun started one process: this is a run of one peer" in caplog.text


# --- infos --------------------------------------------------------------------------------------------


def peer_info(host: str, reached: str, port: int = 5000, advertised: bool = False) -> PeerInfo:
    return PeerInfo(host, advertised, reached, "box", port, None)


def test_a_process_on_rank_0s_machine_has_the_address_by_which_others_reached_rank_0() -> None:
    """For example, if /etc/hosts maps a machine's own name to 127.0.1.1."""
    here = [peer_info("127.0.0.1", "127.0.1.1", port) for port in (5001, 5002)]
    lines = lines_of(text_of([*here, peer_info("10.0.0.2", "10.0.0.1", 5003)]))
    assert [(line.host, line.port) for line in lines] == [("10.0.0.1", 5001), ("10.0.0.1", 5002), ("10.0.0.2", 5003)]
    there = [peer_info("fd00::1", "fd00::1"), peer_info("fd00::2", "fd00::1")]
    named = peer_info("nat.example.org", "fd00::1", advertised=True)
    assert [line.host for line in lines_of(text_of([*there, named]))] == ["fd00::1", "fd00::2", "nat.example.org"]
    here = [peer_info("127.0.0.1", "127.0.0.1", 5001), peer_info("127.0.0.1", "127.0.0.1", 5002)]
    assert {line.host for line in lines_of(text_of(here))} == {"127.0.0.1"}
    assert len(peers_digest(lines_of(text_of(here)))) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"host": "a\n10.0.0.1 name=x"},
        {"hostname": "#"},
        {"port": 0},
        {"port": "1"},
        {"more": 1},
    ],
)
def test_invalid_peer_information(change: dict[str, Any]) -> None:
    """The value came over the network from any process that can reach the store, and is written to a file."""
    good = {"host": "a", "advertised": False, "reached": "b", "hostname": "c", "port": 1, "device": None}
    assert peer_info_of(good, 0).host == "a"
    with pytest.raises(GossipxError, match="rank 1 published invalid peer information"):
        peer_info_of({**good, **change}, 1)
    with pytest.raises(GossipxError):
        peer_info_of([good], 1)


def test_several_machines_need_bind_and_a_secret(world: LaunchWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSIPX_SECRET", raising=False)
    check_reach(world, ExchangeSettings())
    apart = replace(world, one_host=False)
    with pytest.raises(UsageError, match=r"listen on loopback only: give --bind 0\.0\.0\.0"):
        check_reach(apart, ExchangeSettings())
    with pytest.raises(UsageError, match="--secret-file"):
        check_reach(apart, ExchangeSettings(bind="0.0.0.0"))
    monkeypatch.setenv("GOSSIPX_SECRET", "0123456789abcdef")
    check_reach(apart, ExchangeSettings(bind="0.0.0.0"))


# --- one run ------------------------------------------------------------------------------------------


@contextmanager
def barrier(world: LaunchWorld, rank: int) -> Iterator[Rendezvous]:
    with Rendezvous(replace(world, rank=rank), 60) as meeting:
        yield meeting


def test_settings_that_differ_are_named_and_settings_of_a_machine_may_differ(world: LaunchWorld) -> None:
    def act(rank: int) -> Any:
        given = files.resolve({"name": "x", "advertise": f"host-{rank}", "policy": "tau:5" if rank < 2 else "tau:6"})
        with barrier(world, rank) as meeting:
            agreed = multi_process._one_run(meeting, given, has_script=False, resumed_size=0)
            if rank < 2:
                meeting.get("never")  # the third rank aborts it
            return agreed

    told = [str(error) for error in each(world, range(3), act)]
    cause = "--policy is tau:6 for rank 2, but tau:5 for rank 0: give all processes of a run the same"
    assert told == [f"rank 2 aborted: {cause}"] * 2 + [cause]


def starts_one(world: LaunchWorld, rank: int, folder: Path, **settings: Any) -> Any:
    given = files.resolve({"logdir": str(folder), "iterations": 5, **settings})
    return multi_process.from_world(given, replace(world, rank=rank), None, [], resumed_size=0)


def starts(world: LaunchWorld, folders: Sequence[Path], **settings: Any) -> list[Any]:
    """Return what each rank starts with, where rank r's --logdir is ``folders[r]``."""
    made = each(world, range(world.size), lambda rank: starts_one(world, rank, folders[rank], **settings))
    for one in made:
        if not isinstance(one, GossipxError):
            one.reserved.close()
            one.directory.release()
    return made


def begun(world: LaunchWorld, folder: Path, **settings: Any) -> set[tuple[str, int]]:
    """Return name and resumed size of the run that three processes begin in a shared directory."""
    return {(one.settings.run.name, one.resumed_size) for one in starts(world, [folder] * 3, **settings)}


def test_one_directory_on_a_shared_file_system(world: LaunchWorld, tmp_path: Path) -> None:
    made = starts(world, [tmp_path] * 3)
    assert {(one.settings.run.name, one.directory.path) for one in made} == {("tau", tmp_path / "tau")}
    assert [one.here for one in made] == [[0], [1], [2]]
    assert sorted(entry.name for entry in made[0].directory.path.iterdir()) == ["config.toml", "hosts.txt"]
    assert begun(world, tmp_path) == {("tau-2", 0)}
    refused = starts(world, [tmp_path] * 3, name="tau")
    assert "already exists: give another --name, or --overwrite" in str(refused[0])
    assert all(str(one) == f"rank 0 aborted: {refused[0]}" and one.exit_code == 2 for one in refused[1:])


def checkpoint(run: Path, rank: int, job: str) -> None:
    peer = pack({"job": job}, PEER)
    store_of(run, rank).save(3, {PEER: peer})


@pytest.mark.fault(74)
@pytest.mark.parametrize("given", [{}, {"name": "mine"}])
def test_a_later_attempt_continues_its_jobs_run(world: LaunchWorld, tmp_path: Path, given: dict[str, str]) -> None:
    """If any rank sees a checkpoint: others may have had none yet, or have lost their disk."""
    name = given.get("name", "tau")
    assert begun(world, tmp_path, **given) == {(name, 0)}
    checkpoint(tmp_path / name, 1, "")
    again = starts(replace(world, attempt=1), [tmp_path] * 3, overwrite=True, **given)
    assert {(one.settings.run.name, one.resumed_size) for one in again} == {(name, 3)}
    assert [one.environment(one.here[0], False)[ENV_RESUME] for one in again] == ["1"] * 3
    assert store_of(tmp_path / name, 1).find() == 3
    assert begun(replace(world, attempt=2), tmp_path, **given) == {(name, 3)}


@pytest.mark.fault(74)
def test_a_later_attempt_without_a_checkpoint_or_of_another_job_begins_anew(
    world: LaunchWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the same name; or a run of its own, if the job failed before it began this one, which the counter alone
    does not show."""
    assert begun(world, tmp_path) == begun(replace(world, attempt=1), tmp_path) == {("tau", 0)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["tau"]
    told = "attempt 1 of this srun job: run tau is of an earlier one; without a checkpoint (--checkpoint-every)"
    assert caplog.text.count(told) == 1
    checkpoint(tmp_path / "tau", 0, "")
    other = replace(world, job="other", attempt=1)
    assert begun(other, tmp_path) == {("tau-2", 0)}
    refused = starts(other, [tmp_path] * 3, name="tau")
    assert "already exists" in str(refused[0]) and store_of(tmp_path / "tau", 0).find() == 3


@pytest.mark.fault(74)
def test_a_run_that_its_job_has_completed_is_not_begun_again(world: LaunchWorld, tmp_path: Path) -> None:
    """The script of a job has several runs, and was ended in a later one."""
    starts(world, [tmp_path] * 3)
    figures([]).write(tmp_path / "tau")

    def act(rank: int) -> Any:
        with pytest.raises(SystemExit) as ended:
            starts_one(replace(world, attempt=1), rank, tmp_path)
        return ended.value.code

    assert each(world, range(3), act) == [0, 0, 0]
    assert begun(replace(world, job="test.1", attempt=1), tmp_path) == {("tau-2", 0)}


@pytest.mark.fault(74)
def test_the_mark_of_a_job_of_torchrun_is_kept_by_its_agent(world: LaunchWorld) -> None:
    """Which outlives the attempts. Its identifier is often ``none``, also for other jobs."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = TCPStore("127.0.0.1", port, None, True, master_listen_fd=listening.detach(), use_libuv=False)
    hosted = replace(world, size=1, hosted=True, port=port, source="torchrun", job="none")
    marks = []
    for job, attempt in (("none", 0), ("none", 1), ("other", 0)):
        with Rendezvous(replace(hosted, job=job, attempt=attempt), 60) as meeting:
            marks.append(meeting.mark)
    assert marks[0] == marks[1] != marks[2] and all(marks)
    del store


@pytest.mark.fault(74)
def test_scripts_that_join_resume_from_the_checkpoints_of_their_job(world: LaunchWorld, tmp_path: Path) -> None:
    """Not from those of another job, which a peer of this one has not replaced yet."""
    checkpoint(tmp_path, 0, "test/0")
    checkpoint(tmp_path, 1, "earlier/0")

    def resumes(attempt: int, directory: Path) -> list[Any]:
        def act(rank: int) -> str:
            with Rendezvous(replace(world, rank=rank, attempt=attempt), 60) as meeting:
                return joins_again(meeting, directory, rank)

        return each(world, range(3), act)

    assert resumes(0, tmp_path) == ["", "", ""]
    assert resumes(1, tmp_path) == ["1", ADDED, ADDED]
    assert resumes(1, tmp_path / "elsewhere") == ["", "", ""]


def test_a_directory_on_each_machine(world: LaunchWorld, tmp_path: Path) -> None:
    """Rank 0 is on one machine, ranks 1 and 2 are on another: rank 1 creates the directory there."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    made = starts(world, [tmp_path / "one", tmp_path / "other", tmp_path / "other"], name="x")
    assert [one.directory.path for one in made] == [tmp_path / "one" / "x"] + [tmp_path / "other" / "x"] * 2
    hosts = {(tmp_path / folder / "x" / "hosts.txt").read_bytes() for folder in ("one", "other")}
    assert len(hosts) == 1


def test_a_given_list_has_precedence(world: LaunchWorld, tmp_path: Path) -> None:
    """Rank 0 is then where the list says, unless a variable says otherwise."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"127.0.0.1:{world.port + 1} name=one\n127.0.0.1:{world.port + 2} name=other\n")
    given = files.resolve({"logdir": str(tmp_path), "name": "x"})

    def act(rank: int) -> Any:
        mine = replace(world, rank=rank, size=2, master=None)
        return multi_process.from_world(given, mine, hosts, [], resumed_size=0)

    made = each(world, range(2), act)
    assert [[peer.name for peer in one.peers] for one in made] == [["one", "other"]] * 2
    assert [one.here for one in made] == [[0], [1]]
    for one in made:
        one.directory.release()
    with pytest.raises(UsageError, match=r"hosts\.txt: names 2 peers, but srun started 3 processes"):
        multi_process.from_world(given, world, hosts, [], resumed_size=0)


def test_the_rank_that_creates_the_directory() -> None:
    told = [["a", True], ["a", True], ["b", False], ["b", False], ["c", True]]
    assert [creator_of(rank, told) for rank in range(5)] == [None, None, 2, 2, None]


def test_a_name_that_leads_elsewhere_is_not_followed(world: LaunchWorld, tmp_path: Path) -> None:
    """A process that can write to the store must not choose where others write files."""

    def act(rank: int) -> Any:
        with barrier(replace(world, size=2), rank) as meeting:
            if rank == 0:
                own = {**multi_process._common(files.resolve({})), "a script": False}
                meeting.publish("run", {"settings": own, "name": "../../etc", "token": "x"})
                return meeting.get("never", 1)
            return multi_process._one_run(meeting, files.resolve({}), has_script=False, resumed_size=0)

    assert "--name '../../etc'" in str(each(world, range(2), act)[1])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[RunDirectory]:
    """The directory of a run ``x``."""
    directory = RunDirectory(files.resolve({"name": "x", "logdir": str(tmp_path)}), b"127.0.0.1\n")
    yield directory
    directory.release()


def shared_by(made: RunDirectory, rank: int = 0, **settings: Any) -> SharedDirectory:
    given = files.resolve({"name": "x", "logdir": str(made.path.parent), **settings})
    return SharedDirectory(made.path, None, rank, given)


def test_processes_on_different_machines_record_their_own_settings(made: RunDirectory) -> None:
    shared = shared_by(made, 1, advertise="elsewhere")
    assert shared.config == made.path / "config-01.toml"
    assert files.resolve(files.load(shared.config)).exchange.advertise == "elsewhere"
    assert shared_by(made, 1).config == made.path / "config.toml"
    assert not (made.path / "config-01.toml").exists()
    shared.revert()
    assert made.path.is_dir(), "others may train in it"


def test_the_most_complete_summary_is_kept(made: RunDirectory) -> None:
    figures(["a"]).write(made.path)  # by the run before it was resumed
    first, second, third = (shared_by(made, rank) for rank in range(3))
    assert first.conclude(figures(["a", "b"])) and second.conclude(figures([]))
    assert not third.conclude(figures([])) and not third.conclude(figures(["a"]))
    assert summary.read(made.path).lost == []
    assert not list(made.path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("held", "another process has held it for 0.5 s"),
        ("none", "No locks available"),
        ("removed", "No such file or directory"),
    ],
)
def test_a_summary_that_cannot_be_locked_is_written_and_told(
    problem: str, told: str, made: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that was stopped while it wrote must not hold up the others for ever."""

    def without_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    shared = shared_by(made, peer_timeout=0.5)
    with (made.path / "config.toml").open() as other:
        if problem == "held":
            fcntl.flock(other, fcntl.LOCK_EX)
        elif problem == "none":
            monkeypatch.setattr(fcntl, "flock", without_locks)
        else:
            (made.path / "config.toml").unlink()
        assert shared.conclude(figures(["a"]))
    assert summary.read(made.path).lost == ["a"]
    (line,) = caplog.messages
    assert f"summary.json: writing it without a lock ({told})" in line
    monkeypatch.undo()


def figures(lost: list[str]) -> Summary:
    return summary_of(None, None, lost=lost)


@pytest.mark.parametrize(
    ("name", "local_rank", "gpus", "device"),
    [
        ("cuda", 3, 2, "cuda:1"),
        ("cuda", 0, 1, "cuda:0"),
        ("cuda", None, 2, None),
        ("cuda:1", 0, 2, None),
        ("cpu", 0, 2, None),
        ("cuda", 0, 0, None),
    ],
)
def test_a_gpu_each_in_turn(
    monkeypatch: pytest.MonkeyPatch, name: str, local_rank: int | None, gpus: int, device: str | None
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    world = LaunchWorld(0, 3, local_rank, True, None, 29500, False, "test", "srun", "SLURM_NODELIST")
    assert multi_process._device(name, world) == device

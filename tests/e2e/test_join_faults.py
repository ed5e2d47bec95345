"""Scripts that fail, are killed or misuse ``gossipx.join``: real processes, real sockets."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from runs import TEN_LINES, Folder, Run, agree, differences, one_line

BRIEF = ("--policy", "tau:5", "--iterations", "40", "--peer-timeout", "20")
MODES = [
    ["--policy", "tau:5"],
    ["--servers", "0"],
    pytest.param(["--policy", "tau:5", "--hub", "0"], marks=pytest.mark.slow),
]


# --- faults -------------------------------------------------------------------------------------------


@pytest.mark.fault(55)
@pytest.mark.parametrize("block", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_script_that_raises_in_one_peer(three: Folder, block: bool) -> None:
    """The user's traceback is shown once, the other peers continue and finish, and the run has failed."""
    loop = """
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        raise RuntimeError("a bug of the user's")
    train(peer, model, optimizer, 40)
"""
    script = three.script(TEN_LINES + ("with peer:" if block else "if peer:") + loop)
    run = three.run(*BRIEF, script, three.path, tracebacks=1, code=1)
    assert f"failed: {three.names[1]}" in run.ended.output and run.summary["agreed"] is True
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
    assert sum(count or 0 for count in run.summary["suspicions"]) > 0
    assert (run.summary["corrupted"], run.summary["strangers"]) == ([0, 0, None], [0, 0, None])
    assert all(bool(tensor.isfinite().all()) for tensor in run.model(0).values())
    assert max(differences(run.model(0), run.model(1)).values()) <= 1e-6


@pytest.mark.fault(11)
def test_too_few_peers_left(three: Folder) -> None:
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


@pytest.mark.fault(22)
def test_a_poisoned_model_is_refused_and_counted(three: Folder) -> None:
    """The NaN is in a buffer, not in the weights, so its sender does not notice."""
    script = three.script(
        TEN_LINES.replace("nn.ReLU()", "nn.BatchNorm1d(16)")
        + """
with peer:
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        model[1].running_mean.fill_(float("nan"))
    while not all_have(peer, "refused", peer._role.counts["poisoned"] > 0, (0, 2)):
        train(peer, model, optimizer, peer.iteration + 5)
"""
    )
    run = three.run("--policy", "tau:1", "--blocking", "--peer-timeout", "20", script, three.path, code=1)
    assert run.summary["agreed"] is False
    for rank in (0, 2):
        assert all(bool(tensor.isfinite().all()) for tensor in run.model(rank).values())
        assert run.summary["poisoned"][rank] >= 1
    assert "holds NaN or Inf: not mixed" in run.ended.output, run.ended.shown
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


@pytest.mark.fault(76)
@pytest.mark.parametrize("exchange", [("--blocking",), pytest.param(("--exchange", "waves"), marks=pytest.mark.slow)])
def test_a_constant_that_is_not_finite_is_exchanged_like_any_other(two: Folder, exchange: tuple[str, ...]) -> None:
    limits = 'model.register_buffer("limits", torch.tensor([float("nan"), -torch.inf]))'
    script = two.script(
        TEN_LINES.replace("optimizer =", f"{limits}\noptimizer =")
        + "\nwith peer:\n    train(peer, model, optimizer, 42)\n"
    )
    run = two.run("--policy", "tau:5", *exchange, "--peer-timeout", "20", script, two.path)
    assert run.summary["agreed"] is True and run.summary["poisoned"] == [0, 0]
    assert min(run.summary["retrievals"]) >= 1


# --- mistakes in scripts ------------------------------------------------------------------------------


def test_figures_may_be_tensors(two: Folder) -> None:
    script = two.script(
        TEN_LINES.replace(
            "(model, optimizer)", "(model, optimizer, evaluate=lambda m: torch.tensor(0.75, requires_grad=True))"
        )
        + """
with peer:
    for until in range(5, 45, 5):
        train(peer, model, optimizer, until)
        peer.log("train/loss", torch.tensor(1.5, requires_grad=True))
"""
    )
    run = two.run(*BRIEF, script, two.path)
    assert "UserWarning" not in run.ended.shown
    assert run.summary["test_accuracy"] == [0.75, 0.75] and run.summary["lost"] == []


@pytest.mark.parametrize(
    "given", ["torch.zeros(2)", *(pytest.param(one, marks=pytest.mark.slow) for one in ("float('nan')", "'high'"))]
)
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
    script = two.script(
        "from sys import exit as leave\n"
        + TEN_LINES
        + f"""
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
    )
    run = two.run("--policy", "never", script, two.path, tracebacks=end.startswith("raise"), code=1)
    assert run.summary["lost"] == [two.names[0]]
    assert float(run.model(1)["0.weight"].abs().max()) < 50


@pytest.mark.fault(49)
@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_unfrozen_after_joining_is_refused_at_the_first_step(two: Folder, mode: list[str]) -> None:
    script = two.script(
        TEN_LINES.replace("peer = ", "model[0].requires_grad_(False)\npeer = ")
        + """
with peer:
    train(peer, model, optimizer, 5)
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    train(peer, model, optimizer, 6)
"""
    )
    told = two.refused(*mode, script, two.path)
    assert "'0.weight' was unfrozen after gossipx.join" in told and "unfreeze it before gossipx.join" in told


@pytest.mark.fault(49)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_moved_frozen_and_unfrozen_in_a_short_run_ends_with_equal_models(two: Folder, mode: list[str]) -> None:
    script = two.script(
        TEN_LINES
        + """
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
    )
    run = two.run(*mode, script, two.path)
    assert max(differences(run.model(0), run.model(1)).values()) <= 1e-6
    assert all(two.told(rank)["moved"] > 1e-4 and two.told(rank)["iterations"] == 8 for rank in (0, 1))


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
    run = three.run("--policy", "never", script, three.path, code=3)
    assert run.summary["agreed"] is False
    assert run.summary["lost"] == [] and run.model(1)["0.weight"].dtype == torch.float16
    assert "'0.weight' was changed from float32 to float16" in run.ended.output
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


def test_training_in_a_thread_continues_after_the_main_thread(two: Folder) -> None:
    script = two.script(
        TEN_LINES + "import threading\nthreading.Thread(target=train, args=(peer, model, optimizer, 300)).start()\n"
    )
    run = two.run("--policy", "tau:5", "--peer-timeout", "20", script, two.path)
    assert run.summary["iterations"] == 300 and run.summary["lost"] == [] and agree(run, 2)


def test_a_wrong_call_of_join(two: Folder) -> None:
    script = two.script(
        """
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
    )
    two.run("--peer-timeout", "5", script, two.path)
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
def test_a_spawned_process_of_a_script_without_a_main_guard_is_told_of_it(two: Folder) -> None:
    """As DataLoader's workers are where processes are not forked: each imports the script anew, and would join."""
    script = two.script(
        TEN_LINES
        + """
import multiprocessing
with peer:
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
    raise SystemExit(worker.exitcode)
"""
    )
    ended = two.run("--policy", "tau:5", "--peer-timeout", "20", script, two.path, code=2).ended
    told = "imports the script again: put its training under 'if __name__ == \"__main__\":'"
    assert told in ended.output + ended.errors and "port is in use" not in ended.output, ended.shown


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


def test_a_peer_that_comes_after_the_training_is_warned(two: Folder) -> None:
    for name in ("trained", "joined"):
        os.mkfifo(two.path / name)  # opening it waits for the other side
    script = two.script(
        """
if os.environ["GOSSIPX_RANK"] == "1":
    (FOLDER / "trained").read_text()
"""
        + TEN_LINES
        + """
with peer:
    if peer.rank == 0:
        train(peer, model, optimizer, 20)
        (FOLDER / "trained").write_text("")
        (FOLDER / "joined").read_text()
    else:
        (FOLDER / "joined").write_text("")
"""
    )
    run = two.run("--peer-timeout", "3", script, two.path)
    assert run.ended.output.count("this peer trained no iteration: the model that it started with had seen 20") == 1


@pytest.mark.fault(4)
def test_a_forked_process_is_not_the_peer(two: Folder) -> None:
    """In a forked process SIGTERM has its default action, and its exit does not finish the peer."""
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


@pytest.mark.fault(67)
def test_peers_of_different_torch_versions_train_together(two: Folder) -> None:
    script = two.script(
        "if os.environ['GOSSIPX_RANK'] == '1':\n    torch.__version__ = '2.4.0'\n"
        + TEN_LINES
        + "with peer:\n    train(peer, model, optimizer, 21)\ntell(peer, version=torch.__version__)\n"
    )
    run = two.run(*BRIEF, "--policy", "tau:10", "--blocking", script, two.path)
    assert two.told(0)["version"] != two.told(1)["version"] == "2.4.0"
    assert agree(run, 2) and run.summary["retrievals"] == [2, 2]


@pytest.mark.fault(32, 68)
def test_a_peer_without_memory_dies_alone(two: Folder) -> None:
    """Its address space is as large as what it uses, so its next large tensor does not fit."""
    script = two.script(
        TEN_LINES
        + """
import resource
with peer:
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24,) * 2)
        torch.zeros(2**28)
    train(peer, model, optimizer, 20)
"""
    )
    ended = two.start_run(*BRIEF, script, two.path).end()
    run = Run(two.path / "x", ended)
    assert run.summary["lost"] == [two.names[1]] and run.summary["iterations"] == 20, ended.shown
    assert "can't allocate memory" in ended.output or "MemoryError" in ended.output, ended.shown


def test_a_partition_by_label_needs_labels(two: Folder) -> None:
    script = two.script("with gossipx.join(nn.Linear(4, 1)) as peer:\n    peer.shard(list(range(100)))\n")
    told = two.refused("--partition", "dirichlet:alpha=0.3", script, two.path)
    assert "has no targets or labels" in told

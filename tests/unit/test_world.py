"""Rank, size and addresses from environment variables, in their order of precedence."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from gossipx.errors import UsageError
from gossipx.launch.world.launchers import DEFAULT_PORT, PORTS, LaunchWorld, find, hostnames, rank_among

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "4711",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "node[01-03,7],gpu[1-2,4]x",
    "SLURM_STEP_NODELIST": "node[03,7]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NUM_NODES": "7",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "206045185",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "ƒ2oLkTLb",
}
INTEL_MPI = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
    "I_MPI_HYDRA_UUID": "075c0000-2ac6-bda4-6061-0600ab38b458",
}
"""As mpiexec of Intel MPI 2021 sets them; MPICH 5 sets the same without the UUID."""
PALS = {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2", "PALS_APID": "8f"}
"""Without the variables PMI_RANK and PMI_SIZE that mpiexec of a Cray adds to these."""
OWN = {"GOSSIPX_RANK": "1", "GOSSIPX_SIZE": "2", "GOSSIPX_MASTER": "[fd00::1]:7000"}


def without(given: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in given.items() if name not in names}


def found(environ: Mapping[str, str]) -> LaunchWorld:
    world = find(environ)
    assert world is not None
    return world


def facts(environ: Mapping[str, str], *names: str) -> Any:
    """Return these attributes of the world that is found."""
    return attrgetter(*names)(found(environ))


def test_torchrun_at_its_agents_store() -> None:
    """Without torchrun rank 0 hosts the store, as with ``env://``."""
    world = found(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.source) == (3, 8, 1, "torchrun")
    assert (world.master, world.port, world.hosted, world.one_host) == ("head", 4711, True, False)
    again = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert facts(again, "run") != world.run, "an older attempt's keys are in the store"
    plain = without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT")
    assert facts(plain, "hosted", "master", "port") == (False, "head", DEFAULT_PORT)


def test_a_task_of_a_slurm_step() -> None:
    """The step's numbers of tasks and nodes apply, not the job's."""
    world = found(SLURM)
    assert (world.rank, world.size, world.local_rank, world.source) == (5, 8, 1, "srun")
    assert (world.master, world.master_from, world.one_host) == ("node03", "SLURM_STEP_NODELIST", False)
    assert world.port in PORTS and not world.hosted
    of_job = without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
    assert facts(of_job, "master", "size") == ("node01", 16)
    assert facts({**SLURM, "SLURM_STEP_ID": "3"}, "run", "port") != (world.run, world.port)
    assert facts({**SLURM, "SLURM_RESTART_COUNT": "1"}, "run") != world.run
    assert facts({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, "one_host", "master") == (True, "127.0.0.1")


BODY = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "17", "SLURM_NODELIST": "a"}


@pytest.mark.parametrize(
    "environ",
    [
        BODY,
        without(BODY, "SLURM_PROCID", "SLURM_LOCALID"),
        {**BODY, "SLURM_STEP_ID": str(0xFFFFFFFB)},
        {**BODY, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"},
        {},
        {"RANK": "", "WORLD_SIZE": ""},
        {"GOSSIPX_RANK": "1"},
        {**TORCHRUN, "GOSSIPX_CONFIG": "runs/x/config.toml"},
    ],
    ids=["script", "salloc", "batch step", "shell as a step", "nothing", "empty", "a line's rank", "a peer's child"],
)
def test_a_process_that_is_not_one_of_several(environ: dict[str, str]) -> None:
    """A job's script has SLURM_PROCID 0 and the job's SLURM_NTASKS, but srun has not started the other tasks: using
    these variables would mean waiting for them."""
    assert find(environ) is None


def test_open_mpi_does_not_define_the_host_of_rank_0() -> None:
    assert facts(OPEN_MPI, "rank", "size", "local_rank", "master") == (2, 4, 0, None)
    alone = found({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert alone.one_host and alone.master == "127.0.0.1" and alone.port in PORTS
    said = {**OPEN_MPI, "MASTER_ADDR": "head", "MASTER_PORT": "5"}
    assert facts(said, "master", "port", "source") == ("head", 5, "mpirun")


def test_flux_and_the_process_managers_of_mpich_intel_mpi_and_cray() -> None:
    ranks, hosts = ("rank", "size", "local_rank", "source"), ("master", "one_host")
    assert facts(FLUX, *ranks, *hosts) == (3, 4, 1, "flux run", None, False)
    here = {**FLUX, "FLUX_JOB_NNODES": "1"}
    assert facts(here, *hosts) == ("127.0.0.1", True)
    assert facts({**here, "FLUX_JOB_ID": "ƒ3"}, "port") != facts(here, "port"), "two jobs on one machine do not meet"
    for hydra in (INTEL_MPI, without(INTEL_MPI, "I_MPI_HYDRA_UUID")):
        assert facts(hydra, *ranks, *hosts) == (1, 2, 0, "mpiexec", None, False)
    assert facts({**INTEL_MPI, "MPI_LOCALNRANKS": "2"}, *hosts) == ("127.0.0.1", True)
    cray = {**PALS, "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert facts(cray, "rank", "size", "local_rank", "one_host") == (1, 2, 0, True)
    with pytest.raises(UsageError, match="PALS_RANKID is set but PMI_SIZE is not"):
        find(PALS)


def test_the_tasks_of_srun_that_speak_pmi_are_slurms() -> None:
    """With srun --mpi=pmi2 PMI_RANK and PMI_SIZE are those of the step; with mpiexec in a job they are not."""
    names = ("source", "rank", "size", "master")
    assert facts({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, *names) == ("srun", 5, 8, "node03")
    hydra = {**SLURM, **INTEL_MPI, "PMI_SIZE": "32", "PMI_RANK": "17"}
    assert facts(hydra, *names) == ("mpiexec", 17, 32, "node03")


def test_the_order_of_precedence() -> None:
    """In a SLURM job, SLURM's tasks are the daemons of the other launchers."""
    layers = {
        "GOSSIPX_RANK and GOSSIPX_SIZE": OWN,
        "torchrun": TORCHRUN,
        "mpirun": OPEN_MPI,
        "flux run": FLUX,
        "mpiexec": INTEL_MPI,
        "srun": SLURM,
    }
    for chosen in product([False, True], repeat=6):
        there = [source for source, is_there in zip(layers, chosen, strict=True) if is_there]
        world = find({name: value for source in there for name, value in layers[source].items()})
        assert (world and world.source) == (there[0] if there else None)


def test_gossipx_master_has_precedence() -> None:
    """MASTER_PORT is of it too, unless an agent listens there. What nobody needs is neither read nor blamed."""
    for variables in (TORCHRUN, SLURM, OPEN_MPI, FLUX, INTEL_MPI):
        assert facts({**variables, "GOSSIPX_MASTER": "here:9"}, "master", "port", "hosted") == ("here", 9, False)
    assert facts(OWN, "master", "port", "rank", "size") == ("fd00::1", 7000, 1, 2)
    assert facts({**OWN, "GOSSIPX_MASTER": "localhost"}, "one_host", "port") == (True, DEFAULT_PORT)
    assert facts({**SLURM, "SLURM_STEP_NODELIST": "n[1-", "GOSSIPX_MASTER": "here"}, "master") == "here"
    assert facts({**OWN, "GOSSIPX_MASTER": "head", "MASTER_PORT": "4711"}, "port") == 4711
    assert facts({**TORCHRUN, "GOSSIPX_MASTER": "head"}, "port") == DEFAULT_PORT
    for text, host in (("n1.example.org", "n1.example.org"), ("[fd00::1]", "fd00::1"), ("fd00::1", "fd00::1")):
        assert facts({**TORCHRUN, "MASTER_ADDR": text}, "master") == host
    here = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "MASTER_ADDR": "elsewhere"}
    assert facts(here, "master", "master_from") == ("127.0.0.1", "all processes are on this machine")


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"GOSSIPX_SIZE": "2"}, "GOSSIPX_SIZE is set but GOSSIPX_RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but with WORLD_SIZE 2 ranks are 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', not an integer from 0"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({**TORCHRUN, "MASTER_ADDR": "http://n1:29500"}, "MASTER_ADDR is 'http://n1:29500', not a host name"),
        ({**TORCHRUN, "GOSSIPX_RANK": "1"}, "GOSSIPX_RANK is '1', but by torchrun this process is rank 3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node["}, "SLURM_STEP_NODELIST: 'node[' is not a list of hosts"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node["}, "or set GOSSIPX_MASTER=host[:port]"),
        ({**TORCHRUN, "MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR is 0.0.0.0, by which each machine means itself"),
        ({**OWN, "GOSSIPX_MASTER": "[::]:5"}, "GOSSIPX_MASTER is ::, by which each machine means itself"),
        ({**OWN, "GOSSIPX_MASTER": "a:b:c"}, "GOSSIPX_MASTER is 'a:b:c', not host[:port]"),
    ],
)
def test_contradicting_variables_are_named(environ: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(environ)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_the_rank_in_a_given_list() -> None:
    assert rank_among(TORCHRUN, 8, Path("hosts.txt")) == 3
    assert rank_among({}, 8, Path("hosts.txt")) is None
    assert rank_among({"RANK": "0", "WORLD_SIZE": "1"}, 8, Path("hosts.txt")) is None, "it says nothing of peers"
    with pytest.raises(UsageError, match=r"hosts.txt: names 4 peers, but torchrun started 8 processes"):
        rank_among(TORCHRUN, 4, Path("hosts.txt"))


# --- lists of nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login", ["login"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("gpu[1-2,4]x", ["gpu1x", "gpu2x", "gpu4x"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a[1-2,5]b[3-4],c", ["a1b3", "a1b4", "a2b3", "a2b4", "a5b3", "a5b4", "c"]),
    ],
)
def test_a_node_list(nodelist: str, hosts: list[str]) -> None:
    assert list(hostnames(nodelist)) == hosts


@pytest.mark.parametrize(
    "nodelist",
    ["", ",", "a,", "n[1-2", "n1-2]", "n[]", "n[a-b]", "n[3-1]", "n[1[2]]", "n[1,]", "a b", "n[0-999999999]"],
)
def test_an_invalid_node_list(nodelist: str) -> None:
    """Nor is one that is too long written out."""
    with pytest.raises(UsageError, match="is not a list of hosts"):
        list(hostnames(nodelist))
    assert next(hostnames("n[0-9999]x[0-9999]y[0-9999]")) == "n0x0y0"


def test_as_slurm_itself_reads_them(tmp_path: Path) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol (Debian's slurm-client) not found")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=x\n")
    environment = {"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"}
    for nodelist in ("node[01-03,7]", "n[098-101],m", "a[1-2]b[3-4]", "a[1-2,5]b[3-4]"):
        command = ["scontrol", "show", "hostnames", nodelist]
        shown = subprocess.check_output(command, env=environment, text=True, timeout=60)
        assert shown.split() == list(hostnames(nodelist))

"""``gossipx launch``: its job scripts and manifests, and the options it refuses before a job is queued."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gossipx.cli import main
from gossipx.launch.world.launchers import DEFAULT_PORT, find

GOLDEN = Path(__file__).parents[1] / "golden" / "launch"
JOBS = {
    "one-node.sh": ["slurm", "--peers-per-node", "4", "--gpus-per-peer", "1", "--", "--device", "cpu"],
    "nodes.sh": [
        *("slurm", "--nodes", "4", "--peers-per-node", "2", "--gpus-per-peer", "1", "--time", "1-12"),
        *("--partition", "gpu", "--name", "first", "--"),
        *("--policy", "tau:5", "--threads", "3", "train it.py", "--epochs", "3"),
    ],
    "built-in-task.sh": [
        *("slurm", "--nodes", "2", "--gpus-per-peer", "1", "--", "--secret-file", "secret", "--bind", "::"),
    ],
    "pods.yaml": [
        *("kubernetes", "--peers", "4", "--image", "example.org/train:1", "--gpus-per-peer", "2", "--", "a $(X).py"),
    ],
    "claim.yaml": ["kubernetes", "--peers", "2", "--image", "x", "--claim", "results", "--name", "on"],
    "mounted.yaml": [
        *("kubernetes", "--peers", "2", "--image", "x", "--claim", "results", "--"),
        *("--logdir", "/shared/runs", "--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a"),
    ],
}
"""Arguments of ``gossipx launch``, by the golden file that ``gossipx launch ARGUMENTS > FILE`` writes."""


def launch(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["launch", *arguments], prog_name="gossipx")


def manifest(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the printed Service and Job."""
    yaml = pytest.importorskip("yaml", reason="manifests are read with the package PyYAML")
    done = launch("kubernetes", *arguments)
    assert done.exit_code == 0, done.output
    service, job = yaml.safe_load_all(done.stdout)
    return service, job


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_printed(name: str) -> None:
    """With its GPUs, limits, secret and claim where they are asked for; a script chooses its device itself."""
    done = launch(*JOBS[name])
    assert (done.exit_code, done.stdout) == (0, (GOLDEN / name).read_text(encoding="utf-8"))


def test_a_slurm_script_is_valid_and_makes_a_secret() -> None:
    script = (GOLDEN / "nodes.sh").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
    command = shlex.split(script.partition("exec ")[2])
    assert command[command.index("gossipx") :] == ["gossipx", "run", "--bind", "0.0.0.0", *JOBS["nodes.sh"][-7:]]
    secret = re.search(r"^GOSSIPX_SECRET=.*$", script, re.MULTILINE)
    assert secret is not None
    made = subprocess.check_output(["bash", "-c", f"{secret[0]}; echo $GOSSIPX_SECRET"], text=True, timeout=60)
    assert re.fullmatch(r"[0-9a-f]{64}\n", made)


def test_pods_find_their_peers() -> None:
    """The fields are those of the API reference, batch/v1 and v1."""
    service, job = manifest(*JOBS["pods.yaml"][1:])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None", "text: a headless Service"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"], "the pods' names are under it"
    env = {one["name"]: one for one in pod["containers"][0]["env"]}
    environ = {"GOSSIPX_RANK": "3", **{name: one["value"] for name, one in env.items() if "value" in one}}
    assert all(isinstance(value, str) for value in environ.values()), "Kubernetes refuses numbers there"
    world = find(environ)
    assert world is not None and (world.rank, world.size, world.port) == (3, 4, DEFAULT_PORT)
    assert world.master == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert env["GOSSIPX_SECRET"]["valueFrom"]["secretKeyRef"] == {"name": "gossipx", "key": "secret"}


@pytest.mark.parametrize("text", ["a$$b", "$(GOSSIPX_SIZE)", "$$(X)", "$", "é 😀 ' \"\\"])
def test_arguments_come_to_the_container_as_they_are(text: str) -> None:
    """Kubernetes expands $(NAME), and replaces $$ by $."""
    _, job = manifest("--peers", "2", "--image", "x", "--", "train.py", text)
    given = job["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert re.sub(r"\$(\$|\(\w+\))", lambda found: "$" if found[1] == "$" else "replaced", given) == text


IN_PODS = ["kubernetes", "--peers", "2", "--image", "x"]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["slurm", "--", "--polcy", "tau:5"], "--polcy"),
        (["slurm", "--", "--policy", "tauu:5"], "tauu"),
        (["slurm", "--", "--peers", "hosts.txt"], "--peers does not apply: the job's number of peers"),
        (["slurm", "--time", "1\n#SBATCH -A x"], "--time"),
        (["slurm", "--partition", "a b"], "--partition 'a b'"),
        (["slurm", "--nodes", "0"], "--nodes"),
        (["slurm", "--nodes", "60000", "--peers-per-node", "1024"], "are 61440000 peers: at most 65536"),
        (["slurm", "--name", "é"], "--name 'é'"),
        (["slurm", "--nodes", "2", "--", "--bind", "127.0.0.1"], "--bind 127.0.0.1 is not reachable from other mach"),
        (["slurm", "--nodes", "2", "--", "--bind", "10.0.0.1"], "--bind 10.0.0.1 is one machine's address"),
        (["slurm", "--nodes", "2", "--", "--advertise", "n1"], "--advertise n1 is one machine's address"),
        (["slurm", "--", "--dry-run"], "--dry-run has no use in a job"),
        (["slurm", "--nodes", "2", "--", "--min-peers", "9"], "--min-peers 9 is more than the 2 peers"),
        (["kubernetes", "--image", "x"], "--peers"),
        (["kubernetes", "--peers", "2", "--image", "x y"], "--image 'x y'"),
        ([*IN_PODS, "--", "--advertise", "n1"], "--advertise n1 is one machine's address"),
        ([*IN_PODS, "--claim", "Bad!"], "--claim 'Bad!'"),
        ([*IN_PODS, "--claim", "c", "--", "--logdir", "here"], "--logdir here"),
        ([*IN_PODS, "--name", "A_b"], "--name 'A_b': at most 61 lowercase letters"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], cause: str) -> None:
    done = launch(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert cause in done.stderr and done.stderr.count("\n") == 1

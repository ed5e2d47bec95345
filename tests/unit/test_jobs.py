"""``gossipx launch``: its job scripts and manifests, and the options it refuses before a job is queued."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gossipx.cli import main
from gossipx.launch.cluster.world import DEFAULT_PORT, find


def launch(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["launch", *arguments], prog_name="gossipx")


def manifest(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the printed Service and Job."""
    yaml = pytest.importorskip("yaml", reason="manifests are read with the package PyYAML")
    done = launch("kubernetes", *arguments)
    assert done.exit_code == 0, done.output
    service, job = yaml.safe_load_all(done.stdout)
    return service, job


def test_a_slurm_script() -> None:
    rest = ["--policy", "tau:5", "--threads", "3", "train it.py", "--epochs", "3"]
    size = ["--nodes", "4", "--peers-per-node", "2", "--gpus-per-peer", "1"]
    done = launch("slurm", *size, "--time", "1-12", "--partition", "gpu", "--name", "first", "--", *rest)
    assert done.exit_code == 0
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", done.stdout, re.MULTILINE))
    assert asked == {
        "job-name": "first",
        "nodes": "4",
        "ntasks-per-node": "2",
        "cpus-per-task": "3",
        "gpus-per-task": "1",
        "time": "1-12",
        "partition": "gpu",
        "no-kill": "",
        "requeue": "",
        "open-mode": "append",
    }
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True, timeout=60)
    command = shlex.split(done.stdout.partition("exec ")[2])
    srun, run = command[: command.index("gossipx")], command[command.index("gossipx") :]
    assert {"--export=ALL", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--cpus-per-task=3"} <= set(srun)
    assert run == ["gossipx", "run", "--bind", "0.0.0.0", *rest]
    secret = re.search(r"^GOSSIPX_SECRET=.*$", done.stdout, re.MULTILINE)
    assert secret is not None
    made = subprocess.check_output(["bash", "-c", f"{secret[0]}; echo $GOSSIPX_SECRET"], text=True, timeout=60)
    assert re.fullmatch(r"[0-9a-f]{64}\n", made)


def test_one_node_uses_loopback_and_a_given_secret_is_kept() -> None:
    alone = launch("slurm", "--peers-per-node", "4").stdout
    assert "GOSSIPX_SECRET" not in alone and "--bind" not in alone
    given = launch("slurm", "--nodes", "2", "--", "--secret-file", "secret", "--bind", "10.0.0.1").stdout
    assert "GOSSIPX_SECRET" not in given and "0.0.0.0" not in given


def test_the_built_in_task_trains_on_the_requested_gpu() -> None:
    """A script chooses its device itself."""
    assert "--device cuda" in launch("slurm", "--gpus-per-peer", "1").stdout
    assert "--device" not in launch("slurm", "--gpus-per-peer", "1", "--", "train.py").stdout


def test_a_kubernetes_manifest() -> None:
    """The fields are those of the API reference, batch/v1 and v1."""
    service, job = manifest("--peers", "4", "--image", "example.org/train:1", "--gpus-per-peer", "2", "--", "a $(X).py")
    assert [service["apiVersion"], service["kind"]] == ["v1", "Service"]
    assert [job["apiVersion"], job["kind"]] == ["batch/v1", "Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 4
    assert spec["backoffLimitPerIndex"] == 0 and pod["restartPolicy"] == "Never", "the first needs the second"
    assert service["spec"]["clusterIP"] == "None", "text: a headless Service"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"], "the pods' names are under it"
    (container,) = pod["containers"]
    assert container["image"] == "example.org/train:1"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert container["command"] == ["gossipx", "run", "--bind", "0.0.0.0", "a $$(X).py"], "$ is Kubernetes' own"
    env = {one["name"]: one for one in container["env"]}
    assert env["GOSSIPX_SECRET"]["valueFrom"]["secretKeyRef"] == {"name": "gossipx", "key": "secret"}
    index = env["GOSSIPX_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    environ = {"GOSSIPX_RANK": "3", **{name: one["value"] for name, one in env.items() if "value" in one}}
    assert all(isinstance(value, str) for value in environ.values()), "Kubernetes refuses numbers there"
    world = find(environ)
    assert world is not None and (world.rank, world.size, world.port) == (3, 4, DEFAULT_PORT)
    assert world.master == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert "volumes" not in pod


def test_a_claim_holds_the_run() -> None:
    _, job = manifest("--peers", "2", "--image", "x", "--claim", "results", "--name", "on")
    assert job["metadata"]["name"] == "on", "not true"
    pod = job["spec"]["template"]["spec"]
    (volume,), (container,) = pod["volumes"], pod["containers"]
    (mount,) = container["volumeMounts"]
    assert volume == {"name": mount["name"], "persistentVolumeClaim": {"claimName": "results"}}
    assert container["command"][2:4] == ["--logdir", mount["mountPath"]]
    printed = launch("kubernetes", "--peers", "2", "--image", "x", "--claim", "results").stdout
    assert "# To continue the run when the job has ended, delete the job and apply it with --resume RUN.\n" in printed


def test_a_claim_is_mounted_where_the_run_is_written() -> None:
    _, job = manifest("--peers", "2", "--image", "x", "--claim", "results", "--", "--logdir", "/shared/runs")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["volumeMounts"][0]["mountPath"] == "/shared/runs"
    assert container["command"][-2:] == ["--logdir", "/shared/runs"] and container["command"].count("--logdir") == 1


@pytest.mark.parametrize("text", ["a$$b", "$(GOSSIPX_SIZE)", "$$(X)", "$", "é 😀 ' \"\\"])
def test_arguments_come_to_the_container_as_they_are(text: str) -> None:
    """Kubernetes expands $(NAME), and replaces $$ by $."""
    _, job = manifest("--peers", "2", "--image", "x", "--", "train.py", text)
    given = job["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert re.sub(r"\$(\$|\(\w+\))", lambda found: "$" if found[1] == "$" else "replaced", given) == text


def test_settings_that_are_given_hold() -> None:
    assert "--device cpu" in (made := launch("slurm", "--gpus-per-peer", "1", "--", "--device", "cpu").stdout)
    assert "cuda" not in made


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
        (["slurm", "--time", "١٢"], "--time"),
        (["slurm", "--name", "é"], "--name 'é'"),
        (
            ["slurm", "--nodes", "2", "--", "--bind", "127.0.0.1"],
            "--bind 127.0.0.1 is not reachable from other machines",
        ),
        (["slurm", "--nodes", "2", "--", "--bind", "10.0.0.1"], "--bind 10.0.0.1 is one machine's address"),
        (["slurm", "--nodes", "2", "--", "--advertise", "n1"], "--advertise n1 is one machine's address"),
        (
            ["kubernetes", "--peers", "2", "--image", "x", "--", "--advertise", "n1"],
            "--advertise n1 is one machine's address",
        ),
        (["slurm", "--", "--dry-run"], "--dry-run has no use in a job"),
        (["slurm", "--", "--rank", "0"], "--rank has no use in a job"),
        (["slurm", "--nodes", "2", "--", "--min-peers", "9"], "--min-peers 9 is more than the 2 peers"),
        (["kubernetes", "--peers", "2", "--image", "x y"], "--image 'x y'"),
        (["kubernetes", "--peers", "2", "--image", ""], "--image ''"),
        (["kubernetes", "--peers", "2", "--image", "x", "--claim", "Bad!"], "--claim 'Bad!'"),
        (["kubernetes", "--peers", "2", "--image", "x", "--claim", "c", "--", "--logdir", "here"], "--logdir here"),
        (["kubernetes", "--image", "x"], "--peers"),
        (["kubernetes", "--peers", "2", "--image", "x", "--name", "A_b"], "--name 'A_b': at most 61 lowercase letters"),
        (["kubernetes", "--peers", "2", "--image", "x", "--name", "a" * 62], "--name"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], cause: str) -> None:
    done = launch(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert cause in done.stderr and done.stderr.count("\n") == 1

"""``gossipx launch``: a SLURM job script, or a Kubernetes manifest, that runs one independent process a peer.

Independent: one that fails does not end the others, as torchrun would. Only text is made, and nothing is submitted.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from gossipx.config.security import SECRET_VARIABLE, is_loopback
from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.launch.cluster.world import DEFAULT_PORT, MOST
from gossipx.launch.environment import ENV_MASTER, ENV_RANK, ENV_SIZE

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""Where Kubernetes notes which pod of an Indexed Job a pod is."""
ANYWHERE = ("0.0.0.0", "::", "[::]")
"""What --bind says of all of a machine's addresses."""
RUNS = "/runs"
"""Where a claim is mounted in a pod."""
_LONGEST_LABEL = 63
"""Characters of a pod's hostname (RFC 1123)."""
_SUBDOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Attributes:
        name: of the job.
        nodes: machines; ``peers_per_node``: on each.
        gpus_per_peer: 0: none.
        settings: of the run, as far as they are known here; ``given``: the names of those that are.
        arguments: of ``gossipx run``, its script and that one's arguments included.
        has_script: whether they name a script.
    """

    name: str
    nodes: int
    peers_per_node: int
    gpus_per_peer: int
    settings: RunConfig
    given: frozenset[str]
    arguments: Sequence[str]
    has_script: bool

    def __post_init__(self) -> None:
        if self.peers > MOST:
            raise UsageError(f"{self.nodes} nodes of {self.peers_per_node} peers are {self.peers}: at most {MOST}")

    @property
    def peers(self) -> int:
        """How many there are."""
        return self.nodes * self.peers_per_node


def slurm(job: Job, time: str | None = None, partition: str | None = None) -> str:
    """A script for ``sbatch``.

    Args:
        time: the job's limit as SLURM writes it, ``2:00:00``; None: the partition's.
        partition: None: the default one.

    Raises:
        UsageError: what is asked for does not go together, or is not written so.
    """
    _check(job, several=job.nodes > 1)
    if time is not None and not re.fullmatch(r"\d+(-\d+)?(:\d+){0,2}", time, re.ASCII):
        raise UsageError(f"--time {time!r}: minutes, hours:minutes:seconds or days-hours")
    for option, given in (("--name", job.name), ("--partition", partition)):
        if given is not None and not re.fullmatch(r"[\w.,+-]{1,128}", given, re.ASCII):
            raise UsageError(f"{option} {given!r}: letters, digits and . , + - _")
    threads = job.settings.run.threads
    asked = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.peers_per_node,
        "cpus-per-task": threads,
        "gpus-per-task": job.gpus_per_peer or None,
        "time": time,
        "partition": partition,
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None)]
    lines += ["#SBATCH --no-kill", "", "# A task is a peer: gossipx run takes rank, size and addresses from SLURM."]
    if job.nodes > 1 and not _knows_peers(job):
        lines += [
            "# Peers know each other by a secret of this job, which srun hands on.",
            f"{SECRET_VARIABLE}=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')",
            f"export {SECRET_VARIABLE}",
        ]
    lines += [
        "# A task that fails, or a node, does not end the others; nor does the end of the first.",
        f"exec srun --export=ALL --kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task={threads} \\",
        f"    {shlex.join(_command(job, several=job.nodes > 1))}",
    ]
    return "\n".join(lines) + "\n"


def kubernetes(job: Job, image: str, claim: str | None = None) -> str:
    """A manifest for ``kubectl apply``: an Indexed Job, and a headless Service by which its pods find the first one.

    Args:
        image: of the container, with gossipx in it.
        claim: a PersistentVolumeClaim that all pods can write to, for the run's directory; None: it goes with the pods.

    Raises:
        UsageError: as :func:`slurm`.
    """
    _check(job, several=True)
    longest = _LONGEST_LABEL - len(f"-{job.peers - 1}")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > longest:
        raise UsageError(f"--name {job.name!r}: at most {longest} small letters, digits and -, beginning with a letter")
    if not re.fullmatch(r"[!-~]+", image):
        raise UsageError(f"--image {image!r}: the name of a container's image, as in example.org/train:1")
    if claim is not None and (len(claim) > 253 or not re.fullmatch(_SUBDOMAIN, claim)):
        raise UsageError(f"--claim {claim!r}: small letters, digits, - and ., as claims are named")
    runs, added = _runs(job, claim)
    command = [one.replace("$", "$$") for one in _command(job, several=True, added=added)]  # $ is Kubernetes' own
    text = _KUBERNETES.format(
        name=json.dumps(job.name),  # 'on' would be a truth value
        peers=job.peers,
        image=json.dumps(image),
        command="".join(f"\n            - {json.dumps(one, ensure_ascii=False)}" for one in command),
        env=_env(job),
        resources=_GPUS.format(gpus=job.gpus_per_peer) if job.gpus_per_peer else "",
        mounts="" if claim is None else _MOUNTS.format(path=json.dumps(runs, ensure_ascii=False)),
        volumes="" if claim is None else _VOLUMES.format(claim=json.dumps(claim)),
    )
    if _knows_peers(job):
        return text
    return (
        "# Once, before: the secret by which peers know each other.\n"
        f"#   kubectl create secret generic {job.name} --from-literal=secret=$(openssl rand -hex 32)\n"
    ) + text


def _check(job: Job, several: bool) -> None:
    """``several``: whether peers are on several machines, or in containers of their own."""
    if job.settings.run.peers is not None:
        raise UsageError("--peers lists peers, and here their number says who they are: leave it out")
    bind, advertise = job.settings.exchange.bind, job.settings.exchange.advertise
    if several and "bind" in job.given and is_loopback(bind):
        raise UsageError(f"--bind {bind} is each machine alone, and peers are on several: leave it out")
    one = advertise if advertise is not None else bind if "bind" in job.given and bind not in ANYWHERE else None
    if several and one is not None:
        option = "--advertise" if one is advertise else "--bind"
        raise UsageError(f"{option} {one} is one machine's, and peers are on several: leave it out")


def _runs(job: Job, claim: str | None) -> tuple[str, list[str]]:
    """Where a claim is mounted, and what says so to gossipx run: the run's directory is to be on it."""
    if claim is None or "logdir" not in job.given:
        return RUNS, [] if claim is None else ["--logdir", RUNS]
    logdir = job.settings.run.logdir
    if not logdir.startswith("/"):
        raise UsageError(
            f"--logdir {logdir}: with --claim, which is mounted there, a path from the root; or leave it out"
        )
    return logdir, []


def _knows_peers(job: Job) -> bool:
    exchange = job.settings.exchange
    return exchange.secret_file is not None or exchange.tls_cert is not None


def _command(job: Job, several: bool, added: Sequence[str] = ()) -> list[str]:
    """``gossipx run`` with what the arguments leave open."""
    command = ["gossipx", "run", *added]
    if several and is_loopback(job.settings.exchange.bind):
        command += ["--bind", "0.0.0.0"]
    if job.gpus_per_peer and not job.has_script and "device" not in job.given:
        command += ["--device", "cuda"]
    return [*command, *job.arguments]


def _env(job: Job) -> str:
    first = f"{job.name}-0.{job.name}:{DEFAULT_PORT}"
    env = _ENV.format(rank=ENV_RANK, index=INDEX, size=ENV_SIZE, peers=job.peers, master=ENV_MASTER, first=first)
    # By the environment: a mounted secret is its owner's or its group's, and a container's user is often neither.
    return env if _knows_peers(job) else env + _SECRET.format(variable=SECRET_VARIABLE, name=json.dumps(job.name))


_KUBERNETES = """\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None # headless: a name for each pod
  publishNotReadyAddresses: true
  selector:
    gossipx-run: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {peers}
  parallelism: {peers} # all at once: peers wait for each other
  backoffLimitPerIndex: 0 # a peer that fails is lost, and the others go on; Kubernetes 1.29
  template:
    metadata:
      labels:
        gossipx-run: {name}
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
        - name: peer
          image: {image}
          command:{command}
          env:{env}{resources}{mounts}{volumes}
"""
_ENV = """
            - name: {rank}
              valueFrom:
                fieldRef:
                  fieldPath: {index}
            - name: {size}
              value: "{peers}"
            - name: {master}
              value: {first}"""
_SECRET = """
            - name: {variable}
              valueFrom:
                secretKeyRef:
                  name: {name}
                  key: secret"""
_GPUS = """
          resources:
            limits:
              nvidia.com/gpu: {gpus}"""
_MOUNTS = """
          volumeMounts:
            - name: runs
              mountPath: {path}"""
_VOLUMES = """
      volumes:
        - name: runs
          persistentVolumeClaim:
            claimName: {claim}"""

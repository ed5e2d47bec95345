"""``gossipx launch``: a SLURM job script or a Kubernetes manifest that runs one process per peer.

The processes are independent: unlike with torchrun, the failure of one does not end the others. The functions return
text and submit nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from gossipx.errors import UsageError
from gossipx.launch.cluster.world import DEFAULT_PORT, MOST
from gossipx.launch.environment import ENV_MASTER, ENV_RANK, ENV_SIZE
from gossipx.settings.sections import RunConfig
from gossipx.transports.access import SECRET_VARIABLE, is_loopback

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""The annotation with a pod's index in an Indexed Job."""
ANYWHERE = ("0.0.0.0", "::", "[::]")
"""Values of --bind that mean all addresses of a machine."""
RUNS = "/runs"
"""The default mount path of a claim in a pod."""
_LONGEST_LABEL = 63
"""Maximum length of a pod's hostname, in characters (RFC 1123)."""
_SUBDOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"


@dataclass(frozen=True)
class Job:
    """A job to be described.

    Attributes:
        name: the job's name.
        nodes: number of machines.
        peers_per_node: peers on each machine.
        gpus_per_peer: GPUs for each peer; 0 means none.
        settings: the run's settings that are known here.
        given: names of the settings that the user gave.
        arguments: arguments of ``gossipx run``, including the script and its arguments.
        has_script: whether the arguments name a script.
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
            raise UsageError(
                f"{self.nodes} nodes of {self.peers_per_node} peers are {self.peers} peers: at most {MOST}"
            )

    @property
    def peers(self) -> int:
        """The total number of peers."""
        return self.nodes * self.peers_per_node


def slurm(job: Job, time: str | None = None, partition: str | None = None) -> str:
    """Return a script for ``sbatch``.

    Args:
        job: the job.
        time: the job's time limit in SLURM's format, ``2:00:00``; None: the partition's limit.
        partition: the partition; None: the default one.

    Raises:
        UsageError: options conflict, or a value is malformed.
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
    # A node that fails, or a job with precedence, may end this one; SLURM then starts it again, and the run continues.
    lines += ["#SBATCH --no-kill", "#SBATCH --requeue", "#SBATCH --open-mode=append", ""]
    lines += ["# A task is a peer: gossipx run takes rank, size and addresses from SLURM."]
    if job.nodes > 1 and not _knows_peers(job):
        lines += [
            "# Peers authenticate by a secret of this job, which srun passes on.",
            f"{SECRET_VARIABLE}=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')",
            f"export {SECRET_VARIABLE}",
        ]
    lines += [
        "# A failing task or node does not end the others, nor does the first task that ends.",
        f"exec srun --export=ALL --kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task={threads} \\",
        f"    {shlex.join(_command(job, several=job.nodes > 1))}",
    ]
    return "\n".join(lines) + "\n"


def kubernetes(job: Job, image: str, claim: str | None = None) -> str:
    """Return a manifest for ``kubectl apply``: an Indexed Job, and a headless Service that resolves the first pod.

    Args:
        job: the job.
        image: the container image, with gossipx installed.
        claim: a PersistentVolumeClaim for the run's directory that all pods can write to; None: the directory is lost
            with the pods.

    Raises:
        UsageError: as for :func:`slurm`.
    """
    _check(job, several=True)
    longest = _LONGEST_LABEL - len(f"-{job.peers - 1}")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > longest:
        raise UsageError(
            f"--name {job.name!r}: at most {longest} lowercase letters, digits and -, starting with a letter"
        )
    if not re.fullmatch(r"[!-~]+", image):
        raise UsageError(f"--image {image!r}: not a container image such as example.org/train:1")
    if claim is not None and (len(claim) > 253 or not re.fullmatch(_SUBDOMAIN, claim)):
        raise UsageError(f"--claim {claim!r}: claim names have lowercase letters, digits, - and .")
    runs, added = _runs(job, claim)
    command = [one.replace("$", "$$") for one in _command(job, several=True, added=added)]  # Kubernetes expands $
    text = _KUBERNETES.format(
        name=json.dumps(job.name),  # YAML reads an unquoted 'on' as a boolean
        peers=job.peers,
        image=json.dumps(image),
        command="".join(f"\n            - {json.dumps(one, ensure_ascii=False)}" for one in command),
        env=_env(job),
        resources=_GPUS.format(gpus=job.gpus_per_peer) if job.gpus_per_peer else "",
        mounts="" if claim is None else _MOUNTS.format(path=json.dumps(runs, ensure_ascii=False)),
        volumes="" if claim is None else _VOLUMES.format(claim=json.dumps(claim)),
    )
    if claim is not None:
        text = f"# To continue the run when the job has ended, delete the job and apply it with --resume RUN.\n{text}"
    if _knows_peers(job):
        return text
    return (
        "# Run this once before, to create the secret by which peers authenticate:\n"
        f"#   kubectl create secret generic {job.name} --from-literal=secret=$(openssl rand -hex 32)\n"
    ) + text


def _check(job: Job, several: bool) -> None:
    """Check the options; ``several``: whether peers are on several machines, or in containers of their own."""
    if job.settings.run.peers is not None:
        raise UsageError("--peers does not apply: the job's number of peers determines them; leave it out")
    bind, advertise = job.settings.exchange.bind, job.settings.exchange.advertise
    if several and "bind" in job.given and is_loopback(bind):
        raise UsageError(f"--bind {bind} is not reachable from other machines, and peers are on several: leave it out")
    address = advertise if advertise is not None else bind if "bind" in job.given and bind not in ANYWHERE else None
    if several and address is not None:
        option = "--advertise" if address is advertise else "--bind"
        raise UsageError(f"{option} {address} is one machine's address, and peers are on several: leave it out")


def _runs(job: Job, claim: str | None) -> tuple[str, list[str]]:
    """Return the mount path of a claim, and the arguments by which ``gossipx run`` writes the run's directory there."""
    if claim is None or "logdir" not in job.given:
        return RUNS, [] if claim is None else ["--logdir", RUNS]
    logdir = job.settings.run.logdir
    if not logdir.startswith("/"):
        raise UsageError(
            f"--logdir {logdir}: must be an absolute path with --claim, which is mounted there; or leave it out"
        )
    return logdir, []


def _knows_peers(job: Job) -> bool:
    exchange = job.settings.exchange
    return exchange.secret_file is not None or exchange.tls_cert is not None


def _command(job: Job, several: bool, added: Sequence[str] = ()) -> list[str]:
    """Return the command ``gossipx run``, with defaults for options that the arguments do not set."""
    command = ["gossipx", "run", *added]
    if several and is_loopback(job.settings.exchange.bind):
        command += ["--bind", "0.0.0.0"]
    if job.gpus_per_peer and not job.has_script and "device" not in job.given:
        command += ["--device", "cuda"]
    return [*command, *job.arguments]


def _env(job: Job) -> str:
    first = f"{job.name}-0.{job.name}:{DEFAULT_PORT}"
    env = _ENV.format(rank=ENV_RANK, index=INDEX, size=ENV_SIZE, peers=job.peers, master=ENV_MASTER, first=first)
    # The secret is passed in the environment, because a container's user often may not read a mounted one.
    return env if _knows_peers(job) else env + _SECRET.format(variable=SECRET_VARIABLE, name=json.dumps(job.name))


_KUBERNETES = """\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None # headless: each pod has a DNS name
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
  backoffLimitPerIndex: 0 # a peer that fails is lost, and the others continue; Kubernetes 1.29
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

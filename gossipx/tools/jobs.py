"""``gossipx launch``: a SLURM job script or a Kubernetes manifest that runs one process per peer.

The processes are independent: unlike with torchrun, the failure of one does not end the others. The functions check the
options and fill a template of ``templates/``; they submit nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from gossipx.errors import UsageError
from gossipx.launch.world.launchers import DEFAULT_PORT, MOST
from gossipx.settings.sections import RunConfig
from gossipx.tools.templates import filled
from gossipx.transports.access import is_loopback

ANYWHERE = ("0.0.0.0", "::", "[::]")
"""Values of --bind that mean all addresses of a machine."""
_LONGEST_LABEL = 63
"""Maximum length of a pod's hostname, in characters (RFC 1123)."""
_SUBDOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"


@dataclass(frozen=True)
class ClusterJob:
    """A job to be described.

    Attributes:
        name: the job's name.
        nodes: number of machines.
        peers_per_node: peers on each machine.
        gpus_per_peer: GPUs for each peer; 0 means none.
        settings: the run's settings that are known here.
        arguments: arguments of ``gossipx run``, including the script and its arguments.
        has_script: whether the arguments name a script.
    """

    name: str
    nodes: int
    peers_per_node: int
    gpus_per_peer: int
    settings: RunConfig
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


def slurm_script(job: ClusterJob, time: str | None = None, partition: str | None = None) -> str:
    """Return a script for ``sbatch``.

    A node that fails, or a job with precedence, may end the job; SLURM then starts it again, and the run continues.

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
    several = job.nodes > 1
    return filled(
        "slurm.sh",
        name=job.name,
        nodes=job.nodes,
        peers_per_node=job.peers_per_node,
        threads=job.settings.run.threads,
        gpus=job.gpus_per_peer,
        time=time,
        partition=partition,
        needs_secret=several and _needs_secret(job),
        command=shlex.join(_command(job, several)),
    )


def kubernetes_manifest(job: ClusterJob, image: str, claim: str | None = None) -> str:
    """Return a manifest for ``kubectl apply``: an Indexed Job, and a headless Service that resolves the first pod.

    The secret is passed in the environment, because a container's user often may not read a mounted one. The template
    quotes names, because YAML reads an unquoted ``on`` as a boolean.

    Args:
        job: the job.
        image: the container image, with gossipx installed.
        claim: a PersistentVolumeClaim for the run's directory that all pods can write to; None: the directory is lost
            with the pods.

    Raises:
        UsageError: as for :func:`slurm_script`.
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
    return filled(
        "kubernetes.yaml",
        name=job.name,
        peers=job.peers,
        image=json.dumps(image),
        command="\n            - ".join(json.dumps(one, ensure_ascii=False) for one in command),
        port=DEFAULT_PORT,
        needs_secret=_needs_secret(job),
        gpus=job.gpus_per_peer,
        claim=claim,
        runs=json.dumps(runs, ensure_ascii=False),
    )


def _check(job: ClusterJob, several: bool) -> None:
    """Check the options; ``several``: whether peers are on several machines, or in containers of their own."""
    if job.settings.run.peers is not None:
        raise UsageError("--peers does not apply: the job's number of peers determines them; leave it out")
    bind, advertise = job.settings.exchange.bind, job.settings.exchange.advertise
    if several and "bind" in job.settings.given and is_loopback(bind):
        raise UsageError(f"--bind {bind} is not reachable from other machines, and peers are on several: leave it out")
    address = (
        advertise if advertise is not None else bind if "bind" in job.settings.given and bind not in ANYWHERE else None
    )
    if several and address is not None:
        option = "--advertise" if address is advertise else "--bind"
        raise UsageError(f"{option} {address} is one machine's address, and peers are on several: leave it out")


def _runs(job: ClusterJob, claim: str | None) -> tuple[str, list[str]]:
    """Return the mount path of a claim, and the arguments by which ``gossipx run`` writes the run's directory there."""
    if claim is None or "logdir" not in job.settings.given:
        return "/runs", [] if claim is None else ["--logdir", "/runs"]
    logdir = job.settings.run.logdir
    if not logdir.startswith("/"):
        raise UsageError(
            f"--logdir {logdir}: must be an absolute path with --claim, which is mounted there; or leave it out"
        )
    return logdir, []


def _needs_secret(job: ClusterJob) -> bool:
    """Return whether the job must provide the secret by which peers authenticate, since no setting does."""
    exchange = job.settings.exchange
    return exchange.secret_file is None and exchange.tls_cert is None


def _command(job: ClusterJob, several: bool, added: Sequence[str] = ()) -> list[str]:
    """Return the command ``gossipx run``, with defaults for options that the arguments do not set."""
    command = ["gossipx", "run", *added]
    if several and is_loopback(job.settings.exchange.bind):
        command += ["--bind", "0.0.0.0"]
    if job.gpus_per_peer and not job.has_script and "device" not in job.settings.given:
        command += ["--device", "cuda"]
    return [*command, *job.arguments]

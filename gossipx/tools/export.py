"""``gossipx export``: the trained model of a run as one safetensors file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, no_run, run_directory, settings_in
from gossipx.launch.hosts import read_hosts
from gossipx.metrics import summary
from gossipx.model import safetensors_file
from gossipx.runtime import model_files
from gossipx.runtime.checkpoints import store_of
from gossipx.settings import files as config_files
from gossipx.specs import rank_of, texts


def export(run: str, target: Path, logdir: Path, peer: str | None = None, overwrite: bool = False) -> str:
    """Write the average of the peers' models to a file.

    The average is over the final models of the peers that finished. If the run left no final models, or was resumed
    since, it is over the newest checkpoint that all peers have, or else over each peer's newest checkpoint.

    Args:
        run: the run's directory, or its name in ``logdir``.
        target: the file to write.
        peer: name or number of a peer, whose own model is written instead of the average.
        overwrite: whether to replace an existing file.

    Returns:
        One line that describes the file.

    Raises:
        UsageError: the run, its models or the peer do not exist, the models cannot be read, or the target exists, is
            no safetensors file, or has no directory.
        GossipxError: the file cannot be written.
    """
    path = run_directory(run, logdir)
    if not (path / CONFIG_FILE).is_file():
        raise no_run(run, logdir, CONFIG_FILE)
    texts.check_target("--to", target, (".safetensors",))
    if target.exists() and not overwrite:
        raise UsageError("the file exists: give --overwrite, or another --to", target)
    names = [line.name for line in read_hosts(path / HOSTS_FILE)]
    ranks = range(len(names)) if peer is None else [rank_of(peer, "--peer", names)]
    files, of = _models(path, ranks, () if peer is not None else _lost(path, names))
    sound = model_files.sound_among(files)
    if not sound:
        raise UsageError("all models of this run contain NaN: it has diverged", path)
    settings = config_files.resolve(settings_in(path))
    about = {
        "gossipx.run": path.resolve().name,
        "gossipx.model": of if peer is None else f"{of}, peer {names[ranks[0]]}",
        "gossipx.models_averaged": str(len(sound)),
        "gossipx.policy": settings.values["policy"],
    }
    safetensors_file.write(
        target, dict(model_files.average(sound)), "give another --to", {**safetensors_file.TORCH, **about}
    )
    left_out = f", {len(files) - len(sound)} left out because they contain NaN" if len(files) > len(sound) else ""
    what = f"peer {names[ranks[0]]}'s model" if peer is not None else f"the average of {len(sound)} models{left_out}"
    return f"{target} is {what}, {of}"


def _lost(path: Path, names: Sequence[str]) -> Collection[int]:
    """Return the ranks that did not finish, or were stopped, according to the run's summary."""
    if not (path / summary.FILE).is_file():
        return ()
    found = summary.read(path)
    return [rank for rank, name in enumerate(names) if name in (*found.lost, *found.stopped)]


def _models(path: Path, ranks: Sequence[int], lost: Collection[int]) -> tuple[list[Path], str]:
    """Return the model files of these peers, and the iterations they are from, in words."""
    stores = {rank: store_of(path, rank) for rank in ranks}
    complete = {rank: store.find_complete() for rank, store in stores.items()}
    final: Mapping[int, Path] = {rank: model_files.file_of(path, rank) for rank in ranks if rank not in lost}
    there = [
        file
        for rank, file in final.items()
        # A final model older than a checkpoint precedes a resume of the run.
        if file.is_file() and model_files.iteration_of(file) >= max(complete[rank], default=0)
    ]
    if there:
        return there, "as of the end"
    lacking = [str(rank) for rank, found in complete.items() if not found]
    if lacking:
        cause = f"no final models, and peers {', '.join(lacking)} have no checkpoints"
        raise UsageError(f"{cause}: a run saves models at its end, and with --checkpoint-every", path)
    # Peers that are stopped at the same moment may be at different iterations.
    common = set.intersection(*complete.values())
    at = {rank: max(common or found) for rank, found in complete.items()}
    least, most = min(at.values()), max(at.values())
    of = f"as of iteration {most}" if least == most else f"as of iterations {least} to {most}"
    return [stores[rank].directory / f"{at[rank]:08d}" / model_files.MODEL_FILE for rank in ranks], of

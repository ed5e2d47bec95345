"""Single passes over flat vectors: the delta of a step, the distance of two models, and mixing.

A vector is a contiguous 1-D tensor of any length, real or complex. The vectors of one call have the same length, dtype
and device; any two are either the same memory or disjoint.

Each pass works piece by piece, so that main memory is read once and further work on a piece happens in cache. Squares
are summed in the vector's own precision, at least float32, over blocks of :data:`BLOCK`, and the block sums in float64.
Values are not checked: NaN and Inf make the sum non-finite, which the caller sees. A float32 difference above 1e19 does
so too, because its square overflows; one below 1e-22 counts as zero.

float32 and float64 on a CPU use numpy, whose calls and passes are faster than torch's; everything else uses torch. A
pass fused by a compiler (numba) takes two thirds of numpy's time, but costs 115 MB per process and a pause for
compiling; ``bin/bench overhead`` shows the share of a step that this could save.

The functions ``*_on_device`` work on any device: they return a 0-dim float64 tensor there and do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]
Update: TypeAlias = "Callable[[Tensor, Tensor, Sequence[Tensor]], None]"
"""``update(own, mixed, kept)``, in place; see :class:`gossipx.outer.Outer`."""

PIECE = 1 << 18
"""Bytes per piece on a CPU: pieces of three vectors leave room in a core's second-level cache of 1 or 2 MiB."""
SHARED_PIECE = 1 << 20
"""The same beside a training thread: each piece waits for the interpreter's lock, so fewer and larger ones are
better."""
DEVICE_PIECE = 1 << 24
"""The same on a device: large compared with a kernel launch, but within the second-level cache of a large GPU."""
BLOCK = 1024
"""Elements whose squares are summed in the vector's own precision."""
LINE = 64
"""Bytes of a cache line: the unit in which memory is read and sampled."""
RUN = 16
"""Lines per run; one line is drawn from each run."""
SMALL = 1024
"""Elements below which a tensor is measured whole, even where the delta is sampled.

Biases and normalisation vectors are a hundredth of a model, but can contribute most of its delta: without them the
estimate for a ResNet-20 has an error of 20 % (one standard deviation over draws), with them 0.6 %.
"""
_NUMPY_DTYPES = frozenset((torch.float32, torch.float64))


def squared_norm(vector: Tensor) -> float:
    """Return ‖vector‖₂²."""
    if not _by_numpy(vector):
        return float(sum(_squares_on_device(piece) for (piece,) in _pieces(vector)))
    values, total = vector.numpy(), 0.0
    at_once = PIECE // values.itemsize
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(values), at_once):
            total += _squares(values[start : start + at_once])
    return total


def same(one: Tensor, other: Tensor) -> Tensor:
    """Return which values of two vectors are equal, where NaN equals NaN."""
    return (one == other) | ((one != one) & (other != other))


def advance(x: Tensor, before: Tensor, after: Tensor) -> float:
    """Set ``after ← x``; return ‖x − before‖₂² (Adaptive Communication, Eq. 6, squared).

    Args:
        x: not changed.
        before: x_{t−1}.
        after: may be ``before``. It holds intermediate values during the call, so no other thread may read it then.

    Raises:
        ValueError: the vectors do not match.
    """
    _match(x, before, after)
    if not _by_numpy(x):
        return float(advance_on_device(x, before, after))
    now, old = x.numpy(), before.numpy()
    new = old if after is before else after.numpy()
    at_once, total = PIECE // now.itemsize, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(now), at_once):
            end = start + at_once
            total += _advance(now[start:end], old[start:end], new[start:end])
    return total


def difference(received: Tensor, base: Tensor, out: Tensor) -> float:
    """Set ``out ← received − base``; return ‖out‖₂².

    Thread-safe. It is fastest while ``received`` is still in cache.

    Args:
        received: x_j.
        base: the vector to compare with.
        out: may be ``received`` or ``base``.

    Raises:
        ValueError: the vectors do not match.
    """
    _match(received, base, out)
    if not _by_numpy(out):
        return float(difference_on_device(received, base, out))
    theirs, ours, result = received.numpy(), base.numpy(), out.numpy()
    at_once, total = SHARED_PIECE // result.itemsize, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(result), at_once):
            piece = slice(start, start + at_once)
            np.subtract(theirs[piece], ours[piece], out=result[piece])
            total += _squares(result[piece])
    return total


def commit(x: Tensor, difference: Tensor, share: float, boundary: Tensor | None) -> None:
    """Set ``x ← x + share · difference`` and, if given, ``boundary ← x``, on any device.

    Raises:
        ValueError: the vectors do not match.
    """
    _match(x, difference, x if boundary is None else boundary)
    if len(x):  # torch refuses a float alpha for integer dtypes, even for empty vectors
        x.add_(difference, alpha=share)
    if boundary is not None:
        copy(x, boundary)


def apply_outer(
    x: Tensor,
    own: Tensor,
    mixed: Tensor,
    kept: Sequence[Tensor],
    update: Update,
    share: float | None = None,
) -> None:
    """Set ``x ← x̄ + (x − own)``, where ``update`` makes x̄ of ``mixed`` in place, on any device.

    Without steps since the exchange began, x is exactly x̄. The pass over all vectors goes piece by piece, in cache.

    Args:
        x: the weights.
        own: y_t, the weights as the exchange began.
        mixed: the result of the exchange without an outer optimizer; with ``share``, the received model minus ``own``.
        kept: vectors that the outer optimizer keeps.
        update: see :class:`gossipx.outer.Outer`.
        share: ``mixed`` first becomes own + share · mixed.
    """
    for now, before, target, *state in _pieces(x, own, mixed, *kept):
        if share is not None:
            target.mul_(share).add_(before)
        update(before, target, state)
        now.sub_(before).add_(target)


def copy(x: Tensor, to: Tensor) -> None:
    """Set ``to ← x``, on any device.

    On a CPU bytes are copied: for vectors larger than the cache, this takes two thirds of torch's time.

    Raises:
        ValueError: the vectors do not match.
    """
    _match(x, to, to)
    if x.is_cpu and to.is_cpu:
        np.copyto(to.view(torch.uint8).numpy(), x.view(torch.uint8).numpy())
    else:
        to.copy_(x)


def accumulate(total: Tensor, values: Tensor) -> None:
    """Set ``total ← total + values``, on any device; ``values`` may have a narrower dtype.

    Done at once, torch would convert all values first, in freshly allocated memory: seven times as slow.
    """
    for sum_, added in _pieces(total, values, nbytes=SHARED_PIECE):
        sum_.add_(added)


def follow(rounded: Tensor, master: Tensor) -> None:
    """Update float32 masters of 16-bit values that have changed, keeping what rounding left out, on any device.

    Sets ``master ← rounded + (master − its rounding)`` where that rounds to ``rounded``, else to ``rounded``.

    Args:
        rounded: 16-bit values, not changed.
        master: float32, of the same length.
    """
    for now, exact in _pieces(rounded, master):
        wide = now.float()
        carried = (exact - exact.to(now.dtype)).add_(wide)
        exact.copy_(torch.where(carried.to(now.dtype) == now, carried, wide))


def advance_on_device(x: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the result of :func:`advance` as a 0-dim float64 tensor on the device."""
    _match(x, before, after)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for now, old, new in _pieces(x, before, after):
        # Subtracting in 16 bits would round the difference once more.
        total += _squares_on_device(now.float() - old.float() if x.itemsize == 2 else now - old)
        new.copy_(now)
    return total


def difference_on_device(received: Tensor, base: Tensor, out: Tensor) -> Tensor:
    """Return the result of :func:`difference` as a 0-dim float64 tensor on the device."""
    _match(received, base, out)
    total = torch.zeros((), dtype=torch.float64, device=out.device)
    for theirs, ours, result in _pieces(received, base, out):
        total += _squares_on_device(torch.sub(theirs, ours, out=result))
    return total


class Sampled:
    """The delta estimated from a sixteenth of a vector's cache lines, for models where reading all costs too much.

    One line is drawn from each run of :data:`RUN`, all equally likely, and its square counts for the run. So the
    estimate of Δ² is unbiased over draws; its variance is the sum over runs of RUN² · (variance of ‖line‖² within the
    run), and the relative error of Δ is half that of Δ². In training, with tensors below :data:`SMALL` read whole, one
    standard deviation of Δ's error was 3 % for LeNet, 0.6 % for ResNet-20, 1.4 % for ResNet-110, 1.3 % for GoogLeNet
    and 0.5 % for AlexNet.

    The lines are drawn once. Policies look at how the delta *changes*, which a constant error does not affect; with new
    lines for each step, the estimate would change two to four times as much from step to step.

    Args:
        x: the vector as it is now; later calls get the same vector, or one of the same shape.
        seed: seed of the draw. Give each peer a different one, so that their errors are independent.
        whole: ranges of elements, (start, stop), that are measured in full: where the :data:`SMALL` tensors lie.
    """

    def __init__(self, x: Tensor, seed: int, whole: Iterable[tuple[int, int]] = ()):
        in_full = np.zeros(x.nbytes // LINE, dtype=bool)
        for start, stop in whole:
            in_full[start * x.itemsize // LINE : -(-stop * x.itemsize // LINE)] = True
        others = np.flatnonzero(~in_full)
        runs = others[: len(others) // RUN * RUN].reshape(-1, RUN)
        drawn = runs[np.arange(len(runs)), np.random.default_rng(seed).integers(0, RUN, len(runs))]
        in_full[others[runs.size :]] = True  # too few for a run

        values = _working(x)
        self._line = LINE // values.itemsize  # elements
        self._end = len(in_full) * self._line  # of the last full line; elements behind it are measured in full
        self._at_once = _bytes_at_once(x) // LINE
        lines = drawn, np.flatnonzero(in_full)
        self._lines: list[Any] = [
            indices if _by_numpy(x) else torch.from_numpy(indices).to(x.device) for indices in lines
        ]
        rows = values[: self._end].reshape(-1, self._line)
        self._kept = [rows[indices] for indices in self._lines]
        self._fresh = rows[max(self._lines, key=len)[: self._at_once]]
        self._tail = values[self._end :].copy() if _by_numpy(x) else values[self._end :].clone()

    def keep(self, x: Tensor) -> None:
        """Make the next estimate start from ``x``, which something other than a step has changed."""
        for _, fresh, kept in self._passes(x):
            kept[:] = fresh

    def advance(self, x: Tensor) -> float:
        """Return an estimate of ‖x − x_{t−1}‖₂²; keep the sample of ``x`` for the next call."""
        if not _by_numpy(x):
            return float(self.advance_on_device(x))
        with np.errstate(over="ignore", invalid="ignore"):
            return sum((weight * _advance(fresh, kept, kept) for weight, fresh, kept in self._passes(x)), 0.0)

    def advance_on_device(self, x: Tensor) -> Tensor:
        """Return the result of :meth:`advance` as a 0-dim float64 tensor on the device."""
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for weight, fresh, kept in self._passes(x):
            old = torch.as_tensor(kept)
            total += weight * advance_on_device(torch.as_tensor(fresh), old, old)
        return total

    def _passes(self, x: Tensor) -> Iterator[tuple[int, Any, Any]]:
        """Yield the sample in parts: the weight of a square, the values now (until the next part), and those kept."""
        values = _working(x)
        rows = values[: self._end].reshape(-1, self._line)
        for weight, lines, kept in zip((RUN, 1), self._lines, self._kept, strict=True):
            for start in range(0, len(lines), self._at_once):
                drawn, old = lines[start : start + self._at_once], kept[start : start + self._at_once]
                fresh = self._fresh[: len(drawn)]
                if isinstance(rows, Tensor):
                    torch.index_select(rows, 0, drawn, out=fresh)
                else:
                    np.take(rows, drawn, axis=0, out=fresh, mode="clip")  # other modes buffer the output
                yield weight, fresh.reshape(-1), old.reshape(-1)
        if self._end < len(values):
            yield 1, values[self._end :], self._tail


def _advance(now: Array, old: Array, new: Array) -> float:
    """Run :func:`advance` for one piece. ``new`` holds the difference meanwhile, so no other memory is needed."""
    np.subtract(now, old, out=new)
    squared = _squares(new)
    np.copyto(new, now)
    return squared


def _squares(piece: Array) -> float:
    """Return ‖piece‖₂²."""
    rest = len(piece) % BLOCK
    blocks = piece[: len(piece) - rest].reshape(-1, BLOCK)
    squared: float = sum(np.vecdot(blocks, blocks).tolist(), 0.0)  # Python's floats are float64
    if rest:
        piece = piece[len(piece) - rest :]
        squared += float(np.vecdot(piece, piece))
    return squared


def _squares_on_device(piece: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(_real(piece), dtype=torch.float64)
    return norm.square()


def _pieces(*vectors: Tensor, nbytes: int = PIECE) -> Iterator[tuple[Tensor, ...]]:
    at_once = _bytes_at_once(vectors[0], nbytes) // vectors[0].itemsize
    for start in range(0, len(vectors[0]), at_once):
        yield tuple(vector[start : start + at_once] for vector in vectors)


def _bytes_at_once(vector: Tensor, on_cpu: int = PIECE) -> int:
    return on_cpu if vector.is_cpu else DEVICE_PIECE


def _by_numpy(vector: Tensor) -> bool:
    return vector.is_cpu and vector.dtype in _NUMPY_DTYPES


def _working(vector: Tensor) -> Any:
    """Return the same memory as real numbers, as a numpy array or a tensor, whichever is used for it."""
    return vector.numpy() if _by_numpy(vector) else _real(vector)


def _real(vector: Tensor) -> Tensor:
    """Return a complex vector as alternating real and imaginary parts."""
    return torch.view_as_real(vector).view(-1) if vector.is_complex() else vector


def _match(one: Tensor, two: Tensor, three: Tensor) -> None:
    """Check shapes and dtypes: numpy and torch would broadcast a single element and convert dtypes."""
    if one.shape == two.shape == three.shape and one.dtype == two.dtype == three.dtype and one.dim() == 1:
        return
    found = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in (one, two, three))
    raise ValueError(f"expected vectors of the same length and dtype, not {found}")

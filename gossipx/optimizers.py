"""Optimizers that torch does not have: LARS, and Muon for a model's hidden matrices with AdamW for all else.

A loop uses them like torch's, and a parameter server runs them on its tables, by the class that the loop has given.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.model.layout import NORMS, plain_name
from gossipx.specs import suggest


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose rate follows the length of each tensor, for large batches.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017, arXiv:1708.03888), Algorithm 1::

        λ = η ‖w‖ / (‖g‖ + β ‖w‖);  v ← m v + γ λ (g + β w);  w ← w − v

    A relative step is then about η γ, whatever the gradient's length, so that γ is much larger than SGD's. If w or g is
    zero, λ is η: by the formula a tensor that starts with zeros, such as a bias, would never move.

    Args:
        params: tensors, or groups of tensors.
        lr: γ, at least 0; by default a relative step is a thousandth.
        momentum: m, from 0 to below 1.
        weight_decay: β, at least 0.
        trust: η, above 0; 0.001 in all experiments of the paper.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ):
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0 and trust > 0):
            raise ValueError("LARS: lr and weight_decay are at least 0, momentum is below 1, trust is above 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient, which stays as it is; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)
        return loss

    def _update(self, group: dict[str, float], weights: Tensor, gradient: Tensor) -> None:
        decay, state = group["weight_decay"], self.state[weights]
        wide = torch.promote_types(weights.dtype, torch.float32)  # in 16 bits a length is coarse, and may overflow
        length, steepness = (torch.linalg.vector_norm(one, dtype=wide) for one in (weights, gradient))
        ratio = torch.where((length > 0) & (steepness > 0), length / (steepness + decay * length), 1.0)
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(weights, memory_format=torch.preserve_format)
        step = gradient.add(weights, alpha=decay).mul_(ratio * group["trust"])
        weights.sub_(state["velocity"].mul_(group["momentum"]).add_(step, alpha=group["lr"]))


def muon(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    adamw: str | Iterable[str] | None = None,
) -> MuonAdamW:
    """Return one optimizer of a model: Muon for its hidden matrices, AdamW for everything else, at one learning rate.

    Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM Training",
    2025, arXiv:2502.16982, Eq. 4) makes the momentum of a matrix nearly orthogonal. A step of an A × B matrix is scaled
    by 0.2 √max(A, B), so that its elements are as large as AdamW's and both take one rate.

    *Hidden matrices* are the 2-D parameters named ``weight`` of ``nn.Linear`` and of other layers that are no embedding
    or normalisation, the projections of ``nn.MultiheadAttention``, and the kernels of convolutions without groups, with
    a row per output channel. The last of them in the order of the modules counts as the output layer, which is
    AdamW's, as is one that is tied to an embedding. So are the weights of recurrent layers, and what a module of your
    own holds under another name.

    Args:
        model: the model; of one in ``fully_shard``, after sharding it.
        lr: the learning rate of both, at least 0; a good one for AdamW is a good start.
        weight_decay: of both, at least 0: the decay in one step divided by ``lr``.
        momentum: Muon's, from 0 to below 1, in Nesterov's form. AdamW has torch's betas.
        adamw: names of matrices that AdamW trains in place of the last one, with ``*`` for any text; empty: none, as
            for an encoder without an output layer.

    Raises:
        UsageError: torch is older than 2.9, the model has no hidden matrix, or a name fits no matrix.
        ValueError: a value is out of its range.
    """
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(f"Muon needs torch 2.9, and this is {torch.__version__}: update it, or give another optimizer")
    hidden = _hidden_matrices(model, adamw)
    if not hidden:
        raise UsageError(
            f"{type(model).__name__} has no hidden matrix, and Muon trains only these: use torch.optim.AdamW, or name"
            " the output layers by adamw="
        )
    rest = [parameter for parameter in model.parameters() if id(parameter) not in hidden]
    groups: list[dict[str, Any]] = [{"params": [*hidden.values()], "kind": "muon", "momentum": momentum}]
    if rest:
        groups.append({"params": rest})
    return MuonAdamW(groups, lr=lr, weight_decay=weight_decay)


def _hidden_matrices(model: nn.Module, adamw: str | Iterable[str] | None) -> dict[int, nn.Parameter]:
    """Return the matrices for Muon by id, in the order of the modules; ``adamw`` as for :func:`muon`."""
    found: dict[str, nn.Parameter] = {}
    embedded = set()
    for place, layer in model.named_modules():
        is_embedding = any("Embedding" in kind.__name__ for kind in type(layer).__mro__)
        for name, parameter in layer.named_parameters(recurse=False):
            if is_embedding:
                embedded.add(id(parameter))
            elif _is_matrix(layer, name, parameter):
                found[plain_name(f"{place}.{name}".lstrip("."))] = parameter
    names = [*found][-1:] if adamw is None else [adamw] if isinstance(adamw, str) else list(adamw)
    for name in names:
        if not any(fnmatchcase(one, name) for one in found):
            raise UsageError(f"adamw: '{name}' is the name of no matrix{suggest(name, found)}: correct it")
    others = embedded | {id(one) for key, one in found.items() if any(fnmatchcase(key, name) for name in names)}
    return {id(parameter): parameter for parameter in found.values() if id(parameter) not in others}


def _is_matrix(layer: nn.Module, name: str, parameter: Tensor) -> bool:
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return name == "weight" and layer.groups == 1
    is_named = name == "weight" or (isinstance(layer, nn.MultiheadAttention) and name.endswith("proj_weight"))
    return is_named and parameter.ndim == 2 and not isinstance(layer, NORMS)


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimizer; made by :func:`muon`.

    Each parameter group has a ``kind``, ``muon`` or ``adamw`` (the default), and may set further hyperparameters of
    torch's optimizer of that name. The state is that of torch's optimizers.

    Args:
        params: groups of tensors; those of the kind ``muon`` are matrices, or kernels with a row per output channel.
        lr, weight_decay: of groups without their own, at least 0.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "kind": "adamw"})
        for group in self.param_groups:
            if not (group["lr"] >= 0 and group["weight_decay"] >= 0 and 0 <= group.get("momentum", 0) < 1):
                raise ValueError("MuonAdamW: lr and weight_decay are at least 0, and momentum is below 1")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient, which stays as it is; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        made: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon([{"params": []}], adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW([{"params": []}]),
        }
        for kind, one in made.items():
            own = [{**one.defaults, **group} for group in self.param_groups if group["kind"] == kind]
            kernels = [self._flatten(group) for group in own] if kind == "muon" else []
            one.param_groups, one.state = own, self.state
            # Hooks on the steps of all optimizers, as a profiler has them, shall see one step.
            inspect.unwrap(type(one).step)(one)
            for kernel, matrix in itertools.chain(*kernels):
                kernel.copy_(matrix.view_as(kernel))
                self.state[kernel] = {key: value.view_as(kernel) for key, value in self.state.pop(matrix).items()}
        return loss

    def _flatten(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Replace the kernels of a group that have gradients by matrices, as Muon takes no others; return both."""
        kernels = [one for one in group["params"] if one.ndim > 2 and one.grad is not None]
        matrices = {one: one.detach().flatten(1) for one in kernels}
        for kernel, matrix in matrices.items():
            matrix.grad = kernel.grad.flatten(1)
            if kernel in self.state:
                self.state[matrix] = {key: value.flatten(1) for key, value in self.state[kernel].items()}
        group["params"] = [matrices.get(one, one) for one in group["params"]]
        return list(matrices.items())

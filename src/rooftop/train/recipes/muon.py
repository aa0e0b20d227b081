"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon):
Muon makes the momentum of a matrix nearly orthogonal before it adds the momentum to the weight. The weight of a
convolution counts as a matrix: output channels by all other dimensions. AdamW updates embeddings, the last layer, norms
and biases, as the authors advise. Muon's updates, before the learning rate, are scaled to a root mean square of about
0.2, which is typical of AdamW (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2, arXiv:2502.16982). So
both optimizers use the same learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.train.recipes.parameter_kinds import kinds_of
from rooftop.train.recipes.recipe import Optimizer


class MuonAndAdamW(torch.optim.Optimizer):
    """Combine `torch.optim.Muon` and `torch.optim.AdamW` over the parameter groups of one model.

    `state` holds the state of both optimizers in the shape of each parameter, so that a `state_dict` does not depend on
    memory formats. Muon's groups have `muon=True`.

    Args:
        model: the model whose hidden matrices Muon updates.
        groups: the result of `parameter_groups`; this class splits them between Muon and AdamW.
        given: optimizer options of a recipe: momentum and nesterov for Muon, betas and eps for AdamW.
        how: option of AdamW's implementation: {"fused": True} or {"foreach": True}.

    Raises:
        InputError: the groups contain no hidden matrix of the model.
    """

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]], given: Optimizer, how: dict[str, Any]) -> None:
        hidden = hidden_matrices(model)
        check_trained(model, hidden, (parameter for group in groups for parameter in group["params"]))
        divided = []
        for group in groups:
            for muon in (True, False):
                if own := [parameter for parameter in group["params"] if (parameter in hidden) == muon]:
                    options = {} if muon else {"betas": given.betas, "eps": given.eps, **how}
                    divided.append({**group, "params": own, "muon": muon, **options})
        super().__init__(divided, {"lr": given.lr, "weight_decay": 0.0})
        matrices = [parameter for group in self.param_groups if group["muon"] for parameter in group["params"]]
        self._orders = {each: _order(each) for each in matrices}
        self._flat = {each: nn.Parameter(_flattened(each.detach(), self._orders[each])) for each in matrices}
        options = {"momentum": given.momentum, "nesterov": given.nesterov, "adjust_lr_fn": "match_rms_adamw"}
        self._muon = torch.optim.Muon([self._flat_group(group) for group in self._groups(muon=True)], **options)
        others = self._groups(muon=False)
        self._adamw = torch.optim.AdamW(others, betas=given.betas, eps=given.eps, **how) if others else None
        self._join()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run one step of Muon and AdamW."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, flat in self._flat.items():
            self._follow(parameter, flat)
        for own, inner in zip(self._groups(muon=True), self._muon.param_groups, strict=True):
            inner["lr"], inner["weight_decay"] = own["lr"], own["weight_decay"]
        self._muon.step()
        for parameter, flat in self._flat.items():
            flat.grad = None
            if parameter not in self.state and flat in self._muon.state:
                self._show(parameter, self._muon.state[flat]["momentum_buffer"])
        if self._adamw is not None:
            self._adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in PyTorch's optimizers."""
        super().load_state_dict(state_dict)
        self._muon.state.clear()
        self._join()
        for parameter, flat in self._flat.items():
            if parameter in self.state:
                self._adopt(parameter, flat)

    def _join(self) -> None:
        """Make AdamW update the parameter groups that Muon does not, and share this optimizer's state."""
        if self._adamw is not None:
            self._adamw.param_groups = self._groups(muon=False)
            self._adamw.state = self.state

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] == muon]

    def _flat_group(self, group: dict[str, Any]) -> dict[str, Any]:
        flat = [self._flat[parameter] for parameter in group["params"]]
        return {"params": flat, "lr": group["lr"], "weight_decay": group["weight_decay"]}

    def _follow(self, parameter: Tensor, flat: nn.Parameter) -> None:
        """Make `flat`, Muon's matrix view of a parameter, use the current memory of the parameter and of its
        gradient."""
        order = _order(parameter)
        flat.data = _flattened(parameter.detach(), order)
        if order != self._orders[parameter]:
            self._orders[parameter] = order
            if parameter in self.state:
                self._adopt(parameter, flat)
        if parameter.grad is not None:
            flat.grad = parameter.grad.permute(order).reshape(flat.shape)

    def _adopt(self, parameter: Tensor, flat: nn.Parameter) -> None:
        """Give Muon the momentum of a parameter from this optimizer's `state`, reshaped as Muon's matrix `flat`."""
        momentum = self.state[parameter]["momentum_buffer"].permute(self._orders[parameter]).reshape(flat.shape)
        self._muon.state[flat] = {"momentum_buffer": momentum.contiguous()}
        self._show(parameter, self._muon.state[flat]["momentum_buffer"])

    def _show(self, parameter: Tensor, momentum: Tensor) -> None:
        """Store Muon's momentum of a parameter in this optimizer's `state`, as a view in the parameter's shape."""
        order = self._orders[parameter]
        back = [order.index(axis) for axis in range(len(order))]
        shaped = momentum.view([parameter.shape[axis] for axis in order]).permute(back)
        self.state[parameter] = {"momentum_buffer": shaped}


def check_trained(model: nn.Module, hidden: set[Tensor], trained: Iterable[Tensor]) -> None:
    """Check that Muon has a matrix to train.

    Raises:
        InputError: none of the trained parameters is one of the hidden matrices.
    """
    if hidden.isdisjoint(trained):
        raise InputError(
            f"{type(model).__name__} has no trained matrices in hidden layers, which Muon needs: set "
            "optimizer.name=adamw"
        )


def hidden_matrices(model: nn.Module) -> set[Tensor]:
    """The weights that Muon updates: parameters of kind "weight" that are at least 2 x 2 as a matrix. Embeddings and
    the last such parameter of the model, which belongs to its last layer, are excluded."""
    kinds = kinds_of(model)
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    found = [
        parameter
        for name, parameter in model.named_parameters()
        if kinds[name] == "weight" and id(parameter) not in embeddings and min(_sides(parameter)) > 1
    ]
    return set(found[:-1])


def _sides(parameter: Tensor) -> tuple[int, int]:
    rows = parameter.shape[0]
    return rows, parameter.numel() // max(rows, 1)


def _order(parameter: Tensor) -> tuple[int, ...]:
    """Return a parameter's dimensions: 0 (the rows) first, then the others in memory order, since Muon's result does
    not depend on the order of columns."""
    columns = sorted(range(1, parameter.dim()), key=lambda axis: -parameter.stride()[axis])
    return (0, *columns)


def _flattened(parameter: Tensor, order: tuple[int, ...]) -> Tensor:
    """View a parameter as a matrix in the same memory."""
    return parameter.permute(order).view(parameter.shape[0], -1)

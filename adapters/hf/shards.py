"""A module that is cut in place by ``fully_shard``, whole again at will, and cut anew.

``fully_shard`` replaces the parameters of modules, gives them another class and adds hooks. The
first parameters are kept beside, with or without their bytes: other objects of the script refer to
them, and they come back when the module is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from holdfast.ckpt.torch_private import forget_shards, module_dicts

_FSDP: Final = "torch.distributed.fsdp."

Pairs = list[tuple[Any, Any]]
"""Parameters that are whole, each with the one, a DTensor, that was cut from it."""


class ShardedModel:
    """The shards of ``model``; ``cut(model)`` applies ``fully_shard`` to it and parts of it.

    The optimizer of its parameters gets the shards, with its state cut alike. The bytes of whole
    parameters are those from before the cut, until `drop`.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, cut: Callable[[nn.Module], Any]
    ) -> None:
        self._optimizer = optimizer
        self._places = [_CutModule(module) for module in model.modules()]
        cut(model)
        for place in self._places:
            place.note_cut()
        self.pairs: Pairs = list(
            {
                id(whole): (whole, cut) for place in self._places for whole, cut in place.pairs()
            }.values()
        )
        self._modules = [
            place.module for place in self._places if isinstance(place.module, FSDPModule)
        ]
        self.is_lifted = False
        self._trained: tuple[list[torch.Tensor], dict[Any, Any]] | None = None
        _exchange(optimizer, self.pairs, _cut_state(optimizer, self.pairs))

    def drop(self, *, keep_frozen: bool = False) -> None:
        """Free the bytes of the whole parameters, of those that are not trained only if asked."""
        for whole, _ in self.pairs:
            if whole.requires_grad or not keep_frozen:
                whole.data = whole.data.new_empty(0)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights, so that in the body no forward communicates; collective."""
        for module in self._modules:
            module.unshard()
        yield
        for module in self._modules:
            module.reshard()

    @contextmanager
    def lifted(self, *, here: bool) -> Iterator[None]:
        """Have the model and the optimizer whole in the body, on the ranks with ``here``.

        Collective. The other ranks only give their parts.
        """
        optimizer = self._optimizer
        values = self._gather(keep=here)
        state = _whole_state(optimizer, self.pairs, keep=here)
        if not here:
            yield
            return
        before, own = [whole.data for whole, _ in self.pairs], dict(optimizer.state)
        for (whole, _), value in zip(self.pairs, values, strict=True):
            whole.data = value
        for place in self._places:
            place.lift()
        _exchange(optimizer, [(cut, whole) for whole, cut in self.pairs], state)
        self.is_lifted = True
        try:
            yield
        finally:
            self.is_lifted = False
            _exchange(optimizer, self.pairs, own)
            for place in self._places:
                place.lower()
            for (whole, _), data in zip(self.pairs, before, strict=True):
                whole.data = data

    def collect(self) -> None:
        """Keep what was trained, whole, for `release`; collective, after the last step."""
        state = _whole_state(self._optimizer, self.pairs, keep=True)
        self._trained = (self._gather(keep=True), state)

    def release(self, *, trained: bool) -> None:
        """Make the module the one from before the cut.

        Its weights and the optimizer's state are those of `collect` if they are ``trained``.
        Otherwise the weights are the first ones, or zeros where their bytes were dropped, and there
        is no state.
        """
        values, state = self._trained if trained and self._trained is not None else ([], {})
        for place in self._places:
            place.lift()
            place.forget()
        for whole, cut in self.pairs:
            if whole.shape != cut.shape:
                whole.data = whole.data.new_zeros(cut.shape)
            whole.grad = None
        for (whole, _), value in zip(self.pairs, values, strict=False):
            whole.data = value
        _exchange(self._optimizer, [(cut, whole) for whole, cut in self.pairs], state)

    def share_first(self, broadcast: Callable[[torch.Tensor], None]) -> None:
        """Take the first values of one rank on all: ``broadcast`` fills a tensor from it."""
        with torch.no_grad():
            for whole, cut in self.pairs:
                broadcast(whole.detach())
                cut.to_local().copy_(_cut_like(whole.detach(), cut).to_local())

    def _gather(self, *, keep: bool) -> list[torch.Tensor]:
        """Return the whole values; collective. Without ``keep`` one of them is there at a time."""
        for module in self._modules:
            module.reshard()
        found = []
        for _, cut in self.pairs:
            value = cut.detach().full_tensor()
            if keep:
                is_shard = value.data_ptr() == cut.to_local().data_ptr()
                found.append(value.clone() if is_shard else value)
        return found


class _CutModule:
    """A module as it was before the cut, and as the cut left it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kind, self._keys = type(module), set(vars(module))
        self._parameters = dict(module_dicts(module)[0])
        self._added: set[str] = set()
        self._cut: tuple[type, dict[str, Any]] = (self._kind, self._parameters)
        self._hooks: dict[str, dict[Any, Any]] = {}

    def note_cut(self) -> None:
        """Take down what the cut has changed."""
        self._added = set(vars(self.module)) - self._keys
        self._cut = (type(self.module), dict(module_dicts(self.module)[0]))

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield each parameter that was cut, and its shard."""
        for name, whole in self._parameters.items():
            cut = self._cut[1][name]
            if cut is not whole:
                yield whole, cut

    def lift(self) -> None:
        """Give the module its first class and parameters, and take FSDP2's hooks off."""
        self._put(self._kind, self._parameters)
        self._hooks = {
            name: dict(each)
            for name, each in vars(self.module).items()
            if "hooks" in name and isinstance(each, dict)
        }
        made = {k for each in self._hooks.values() for k, hook in each.items() if _is_fsdp(hook)}
        for name in self._hooks:
            for key in made & vars(self.module)[name].keys():
                del vars(self.module)[name][key]

    def lower(self) -> None:
        """Take `lift` back."""
        self._put(*self._cut)
        for name, hooks in self._hooks.items():
            found = vars(self.module)[name]
            found.clear()
            found.update(hooks)

    def forget(self) -> None:
        """Remove what else the cut has left on the module."""
        for name in self._added & vars(self.module).keys():
            delattr(self.module, name)
        forget_shards(self.module)

    def _put(self, kind: type, parameters: dict[str, Any]) -> None:
        self.module.__class__ = kind
        found = module_dicts(self.module)[0]
        found.clear()
        found.update(parameters)


def _exchange(optimizer: Optimizer, pairs: Pairs, state: dict[Any, Any]) -> None:
    """Let an optimizer have the second parameter of each pair for the first, and this state."""
    other = {id(one): two for one, two in pairs}
    for group in optimizer.param_groups:
        group["params"] = [other.get(id(each), each) for each in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(state)


def _whole_state(optimizer: Optimizer, pairs: Pairs, *, keep: bool) -> dict[Any, Any]:
    """Return an optimizer's state by whole parameters; collective. Without ``keep`` drop it."""
    wholes = {id(cut): whole for whole, cut in pairs}
    found: dict[Any, Any] = {}
    for parameter, values in optimizer.state.items():
        full = {name: _whole(value) for name, value in values.items()}
        if keep:
            found[wholes.get(id(parameter), parameter)] = full
    return found


def _cut_state(optimizer: Optimizer, pairs: Pairs) -> dict[Any, Any]:
    """Return the state of an optimizer of whole parameters by those that were cut from them."""
    cuts = {id(whole): cut for whole, cut in pairs}
    found: dict[Any, Any] = {}
    for parameter, values in optimizer.state.items():
        cut = cuts.get(id(parameter))
        if cut is None:
            found[parameter] = values
            continue
        found[cut] = {
            name: _cut_like(value, cut)
            if isinstance(value, torch.Tensor) and value.shape == cut.shape and value.dim()
            else value
            for name, value in values.items()
        }
    return found


def _cut_like(value: torch.Tensor, cut: DTensor) -> DTensor:
    """Return this rank's part of a whole tensor, cut like another one; no rank is asked."""
    return distribute_tensor(value, cut.device_mesh, cut.placements, src_data_rank=None)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_fsdp(hook: Any) -> bool:
    """Return whether FSDP2 made a hook, which torch may have wrapped."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_FSDP)

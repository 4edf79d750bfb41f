"""State that a module or an optimizer gives through its own ``state_dict()`` alone.

Torch's own classes keep all state in parameters, buffers, ``get_extra_state`` and
``Optimizer.state``, and ``state_dict()`` adds nothing. A class that overrides ``state_dict`` or
``_save_to_state_dict``, or a hook, may add entries. These are taken from there, and given back
through ``load_state_dict``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state.local_boxes import local_of, overlaps_itself
from holdfast.ckpt.state.names import join
from holdfast.ckpt.state.torch_dtypes import as_carrier

OWN_STATE: Final = "_state_dict"
"""Last part of the name under which such state is kept, below the module's or optimizer's."""

_TORCHS_OWN: Final = ("torch.nn.", "torch.distributed.")
"""Modules of torch whose overrides and hooks rename entries, gather them, or add nothing."""

_log = logging.getLogger(__name__)


def has_own(module: nn.Module) -> bool:
    """Say whether ``state_dict()`` of ``module`` itself may give more than torch's own would."""
    return _overrides(
        module,
        nn.Module,
        methods=("state_dict", torch_private.SAVE_METHOD),
        hooks=torch_private.state_dict_hooks_of(module),
    )


def optimizer_has_own(optimizer: Optimizer) -> bool:
    """Say whether ``state_dict()`` of ``optimizer`` may give more than torch's own would."""
    hooks = torch_private.optimizer_state_dict_hooks_of(optimizer)
    return _overrides(optimizer, Optimizer, methods=("state_dict",), hooks=hooks)


def _overrides(
    item: object, base: type, *, methods: tuple[str, ...], hooks: Iterable[Mapping[int, Any]]
) -> bool:
    own = vars(item)
    for name in methods:
        found = getattr(type(item), name)
        if name in own or (found is not getattr(base, name) and not _is_torchs(found)):
            return True
    return not all(_is_torchs(hook) for found in hooks for hook in found.values())


def _is_torchs(function: Callable[..., Any]) -> bool:
    """Say whether torch itself defines a method or a hook."""
    where = getattr(function, "__module__", None) or type(function).__module__
    return f"{where}.".startswith(_TORCHS_OWN)


class OwnModuleState:
    """The entries of a module's ``state_dict()`` that no parameter, buffer or extra state holds.

    Entries that a module inside it adds belong to that one. ``name`` is the module's in the state.
    Raises ``StateError`` for a module that contains FSDP1 modules: its ``state_dict()`` would
    gather them.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._entries: dict[str, Any] = {}
        if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
            raise StateError(
                f"{name}: {type(module).__name__} gives state through a state_dict() of its own, "
                "which would gather the FSDP modules inside it; keep that state in buffers, in "
                "get_extra_state(), or in an object with state_dict() beside the model"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the entries, with the keys that they have in the module's ``state_dict()``."""
        self._entries = _state_dict_of(self._name, self._module)
        found = _added(self._module, self._entries)
        for path, child in self._module.named_modules(remove_duplicate=False):
            if path and found and has_own(child):
                for key in _added(child, _state_dict_of(join(self._name, path), child)):
                    found.pop(join(path, key), None)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the entries to the module's ``load_state_dict``, with all else as it is.

        The rest is that of the last ``state_dict``, which refers to the module's own tensors: to
        call it now could overwrite what was restored, by a hook that brings buffers up to date.
        Tensors that it does not take, as the scales of a quantised weight, are filled in place.
        Raises ``StateError`` for one that the module still gives as before.
        """
        entries = copy(self._entries)  # with its attributes, such as the versions of modules
        entries.update(state_dict)
        load = self._module.load_state_dict
        found = load(entries, strict=False) if _takes(load, strict=False) else load(entries)
        refused = getattr(found, "unexpected_keys", None) or ()
        lost = [
            key
            for key in sorted(state_dict.keys() & set(refused))
            if not _is_equal(self._entries.get(key), state_dict[key])
        ]
        if not lost:
            return
        for key in lost:
            _fill(self._entries.get(key), state_dict[key])
        now = _state_dict_of(self._name, self._module)
        lost = [key for key in lost if not _is_equal(now.get(key), state_dict[key])]
        if tensors := [key for key in lost if isinstance(state_dict[key], torch.Tensor)]:
            raise StateError(
                f"{join(self._name, tensors[0])}: state_dict() of {type(self._module).__name__} "
                f"gave it, its load_state_dict() does not take it, and as built here it differs: "
                f"build the module with the saved contents ({len(tensors)} such tensors)"
            )
        if lost:
            _log.warning(
                "%s: its state_dict() gave %s, which its load_state_dict() does not take",
                self._name,
                ", ".join(lost),
            )


def _is_equal(mine: object, saved: object) -> bool:
    if not isinstance(mine, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return type(mine) is type(saved) and mine == saved
    if not _is_alike(mine, saved):
        return False
    one, other = (as_carrier(local_of(each)) for each in (mine, saved))
    return torch.equal(one, other.to(one.device))


def _is_alike(mine: torch.Tensor, saved: torch.Tensor) -> bool:
    return local_of(mine).shape == local_of(saved).shape and mine.dtype == saved.dtype


def _fill(live: object, saved: object) -> None:
    """Write to a tensor that an entry was, if it can take the saved one."""
    if not isinstance(live, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return
    if _is_alike(live, saved) and not overlaps_itself(local_of(live)):
        with torch.no_grad():
            local_of(live).copy_(local_of(saved))


def _added(module: nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the ``entries`` of a module's ``state_dict()`` that nothing else holds."""
    known, tensors = set[str](), list[torch.Tensor]()
    for path, child in module.named_modules(remove_duplicate=False):
        parameters, buffers, _ = torch_private.module_dicts(child)
        transient = torch_private.transient_buffers_of(child)
        own_tensors = {
            key: item
            for key, item in (*parameters.items(), *buffers.items())
            if item is not None and key not in transient
        }
        known |= {join(path, key) for key in own_tensors}
        tensors += own_tensors.values()
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            known.add(join(path, "_extra_state"))
    found = {key: item for key, item in entries.items() if key not in known}
    if not found:
        return found
    places = list(map(_place, tensors))
    return {key: item for key, item in found.items() if not _is_among(item, places)}


def _state_dict_of(name: str, item: nn.Module | Optimizer) -> dict[str, Any]:
    keeps = isinstance(item, nn.Module) and _takes(item.state_dict, keep_vars=True)
    found = item.state_dict(keep_vars=True) if keeps else item.state_dict()  # type: ignore[call-arg]
    if not isinstance(found, dict):
        raise StateError(
            f"{name}: state_dict() of {type(item).__name__} returns a {type(found).__name__}; "
            "return a dict"
        )
    return found


def _takes(function: Callable[..., Any], **arguments: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or p.name in arguments for p in parameters)


def _place(tensor: torch.Tensor) -> tuple[int, int, bool]:
    """Return the first and last address of a tensor's memory, and whether all between is its."""
    local = local_of(tensor)
    reach = sum(
        (n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True) if n
    )
    dense = local.is_contiguous()
    return local.data_ptr(), local.data_ptr() + (reach + 1) * local.itemsize, dense


def _is_among(item: object, places: list[tuple[int, int, bool]]) -> bool:
    """Say whether ``item`` is a tensor in the memory of one of the tensors at ``places``."""
    if not isinstance(item, torch.Tensor) or not local_of(item).numel():
        return False
    if local_of(item).layout != torch.strided:
        return False
    start, end, _ = mine = _place(item)
    return any(
        mine == place or (place[2] and place[0] <= start and end <= place[1]) for place in places
    )


class OwnOptimizerState:
    """The entries of an optimizer's ``state_dict()`` beside ``state`` and ``param_groups``."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name, self._optimizer = name, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the entries.

        Raises ``StateError`` if ``state`` and ``param_groups`` have more than the optimizer itself.
        """
        found = _state_dict_of(self._name, self._optimizer)
        self._check(found)
        return {key: item for key, item in found.items() if key not in ("state", "param_groups")}

    def _check(self, found: Mapping[str, Any]) -> None:
        optimizer = self._optimizer
        groups, states = found.get("param_groups", ()), found.get("state", {})
        if isinstance(groups, list) and len(groups) == len(optimizer.param_groups):
            for i, (given, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
                self._refuse(f"param_groups[{i}]", given, group)
        ours = [p for group in optimizer.param_groups for p in group["params"]]
        for key, given in states.items() if isinstance(states, Mapping) else ():
            known = isinstance(key, int) and key < len(ours)
            live = optimizer.state.get(ours[key] if known else key, {})
            if isinstance(given, Mapping):
                self._refuse(f"state[{key!r}]", given, live)

    def _refuse(self, where: str, given: Mapping[str, Any], live: Mapping[str, Any]) -> None:
        if more := sorted(map(str, given.keys() - live.keys())):
            raise StateError(
                f"{self._name}: state_dict() of {type(self._optimizer).__name__} gives {more[0]!r} "
                f"in {where}, which the optimizer's own {where.partition('[')[0]} does not have; "
                "keep it there, or under a key of its own beside 'state' and 'param_groups'"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the entries to the optimizer's ``load_state_dict``; all else stays as it is.

        Torch's own copies states and casts them to the dtype of the parameters. So the restored
        states and settings are put back afterwards.
        """
        optimizer = self._optimizer
        state, groups = optimizer.state, optimizer.param_groups
        entries = _state_dict_of(self._name, optimizer)
        entries.update(state_dict)
        optimizer.load_state_dict(entries)
        optimizer.state, optimizer.param_groups = state, groups
        now = _state_dict_of(self._name, optimizer)
        for key, saved in state_dict.items():
            if isinstance(saved, torch.Tensor) and not _is_equal(now.get(key), saved):
                raise StateError(
                    f"{join(self._name, key)}: state_dict() of {type(optimizer).__name__} gave it, "
                    "and after its load_state_dict() gives something else; have load_state_dict() "
                    "take it"
                )

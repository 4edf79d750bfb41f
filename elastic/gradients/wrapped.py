"""The tracked modules and their wrappers; takes control of FSDP2's and DDP's own reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.ckpt.state.names import clean, join
from holdfast.ckpt.torch_private import module_dicts
from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.shards import EXPERTS, experts_of, is_reduced_by_fsdp

Parameters = list[tuple[str, nn.Parameter]]


def exact_method(
    exact: Exact, state: Iterable[object], *, unite: Callable[[list[str]], list[str]]
) -> Exact:
    """Return the method that True means for the modules in ``state``; any other as it is.

    ``unite`` returns the names of all ranks for those of one: FSDP2 may shard only some stages.
    """
    if exact is not True:
        return exact
    modules = (each for value in state for each in _modules_of(value))
    sharded = any(isinstance(part, FSDPModule) for each in modules for part in each.modules())
    return "float32" if unite(["sharded"] if sharded else []) else "int64"


def _modules_of(value: object) -> Iterable[nn.Module]:
    if isinstance(value, ModelParts):
        return value
    return (value,) if isinstance(value, nn.Module) else ()


class Wrapped:
    """Tracked modules by name, and the wrappers in them.

    FSDP2 modules sum in the last backward of a pass, and never divide. DDP modules do not
    communicate in a backward: their gradients are summed like a plain module's, so DDP's options
    for its own reduction have no effect. Nor does it broadcast buffers; `PassBuffers` does.
    """

    def __init__(self, modules: Mapping[str, nn.Module | ModelParts]) -> None:
        self._modules = [
            (key, module) for key, tracked in modules.items() for module in _modules_of(tracked)
        ]
        parts = [(key, part) for key, module in self._modules for part in module.modules()]
        for key, part in parts:
            _refuse(key, part)
        self._fsdp = [part for _, part in parts if isinstance(part, FSDPModule)]
        self._ddp = [part for _, part in parts if isinstance(part, DistributedDataParallel)]
        self._unreduced: set[FSDPModule] = set()
        self._refuse_loose()
        self.reshard()
        for fsdp in self._fsdp:
            fsdp.set_reshard_after_forward(False, recurse=False)
            fsdp.set_gradient_divide_factor(1.0)
            fsdp.set_force_sum_reduction_for_comms(True)
            fsdp.set_reduce_scatter_unused_params(True, recurse=False)
        for ddp in self._ddp:
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 communicates for any of the modules."""
        return bool(self._fsdp)

    def parameters(self) -> Parameters:
        """Return every parameter once, with its name without wrappers."""
        seen: set[int] = set()
        found = []
        for key, module in self._modules:
            wrappers = _module_attributes(module)
            for fqn, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found.append((f"{key}.{_bare(fqn, wrappers)}", parameter))
        return found

    def shards(self) -> Iterator[tuple[str, FSDPModule]]:
        """Yield every FSDP2 module, with the prefix of its parameters' names."""
        for key, module in self._modules:
            wrappers = _module_attributes(module)
            for path, part in module.named_modules():
                if isinstance(part, FSDPModule):
                    yield f"{key}.{_bare(path + '.' if path else '', wrappers)}", part

    def begin_microbatch(self, *, last: bool) -> None:
        """Let FSDP2 communicate only in the last backward of the share."""
        for part in self._fsdp:
            reduces = last and part not in self._unreduced
            part.set_requires_gradient_sync(reduces, recurse=False)
            part.set_reshard_after_backward(last, recurse=False)

    def leave_unreduced(self, part: FSDPModule) -> None:
        """Keep FSDP2 from reducing a module's own gradients, which are summed elsewhere.

        If it reduces, torch 2.15 treats the last backward of a pass differently: it adds the
        gradients of a parameter that is used twice in bfloat16, but in float32 in the backwards
        before.
        """
        self._unreduced.add(part)
        part.set_reduce_scatter_unused_params(False, recurse=False)
        part.set_requires_gradient_sync(False, recurse=False)

    def reshard(self) -> None:
        """Shard FSDP2's parameters again if a forward left them whole."""
        for part in self._fsdp:
            part.reshard()

    def _refuse_loose(self) -> None:
        """Raise ``ConfigError`` for parameters whose gradients would not be summed correctly."""
        reduced = {id(p) for part in self._fsdp for p in cast(nn.Module, part).parameters()}
        for name, parameter in self.parameters():
            if not parameter.requires_grad:
                continue
            along = experts_of(parameter)
            if along is not None and not along.is_shard():
                raise ConfigError(
                    f"{name} is a DTensor that lies {along} along the axis {EXPERTS!r}, whose "
                    "ranks see other samples: cut it by Shard, or leave it a plain tensor"
                )
            if is_reduced_by_fsdp(parameter) and id(parameter) not in reduced:
                raise ConfigError(
                    f"{name} is a DTensor over data-parallel axes and not one of fully_shard's, "
                    "so nobody sums its gradient: distribute it along 'tp' or "
                    f"{EXPERTS!r} alone, and give the other axes to fully_shard"
                )


class Parts:
    """Every module in the tracked ones once, with its name without wrappers.

    `renew` is cheap while no module is added or removed.
    """

    def __init__(self, modules: Mapping[str, nn.Module | ModelParts]) -> None:
        self._roots = [
            (key, module)
            for key, tracked in modules.items()
            for module in (tracked if isinstance(tracked, ModelParts) else (tracked,))
        ]
        self._seen: list[nn.Module] = []
        self.named: list[tuple[str, nn.Module]] = []

    def renew(self) -> bool:
        """Look at the modules again; return whether there are others."""
        seen: dict[nn.Module, None] = {}
        stack = [module for _, module in self._roots]
        while stack:
            part = stack.pop()
            if part is not None and part not in seen:
                seen[part] = None
                stack += module_dicts(part)[2].values()
        if len(seen) == len(self._seen) and all(map(is_, seen, self._seen)):
            return False
        self._seen, names = list(seen), dict[nn.Module, str]()
        for key, module in self._roots:
            wrappers = _module_attributes(module)
            for path, part in module.named_modules():
                names.setdefault(part, join(key, _bare(f"{path}.", wrappers).strip(".")))
        self.named = [(name, part) for part, name in names.items()]
        return True


def _module_attributes(module: nn.Module) -> list[str]:
    """Return the prefixes with DDP's attribute ``module`` in names, the innermost first."""
    return [
        f"{path}.module." if path else "module."
        for path, part in reversed(list(module.named_modules()))
        if isinstance(part, DistributedDataParallel)
    ]


def _bare(fqn: str, wrappers: list[str]) -> str:
    for prefix in wrappers:
        if fqn.startswith(prefix):
            fqn = prefix.removesuffix("module.") + fqn.removeprefix(prefix)
    return clean(fqn)


def _refuse(key: str, part: nn.Module) -> None:
    """Raise ``ConfigError`` for wrappers whose own gradient reduction cannot be turned off."""
    if isinstance(part, FullyShardedDataParallel):
        raise ConfigError(
            f"{key} is wrapped in FullyShardedDataParallel, which averages gradients itself: use "
            "fully_shard (FSDP2), whose checkpoints are the same here"
        )
    if not isinstance(part, DistributedDataParallel):
        return
    for option, is_set in (
        ("static_graph=True", part.static_graph),
        ("mixed_precision", part.mixed_precision is not None),
    ):
        if is_set:
            raise ConfigError(
                f"{key} is wrapped in DistributedDataParallel with {option}, which averages "
                f"gradients behind our back: leave it out (torch.autocast works as well)"
            )

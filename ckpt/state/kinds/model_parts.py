"""Several modules of one model as one entry of a state, such as a pipeline rank's stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from torch import nn

from holdfast.ckpt.errors import ArgumentError


class ModelParts(Sequence[nn.Module]):
    """The modules of one model that this rank has, each with the names it has in the whole model.

    A state may hold it wherever it may hold a module. The position of a part does not enter the
    names, so a rank may have one part today and two tomorrow. No two parts may hold an entry of the
    same name. Ranks may hold different parts, as with the stages of
    ``torch.distributed.pipelining``.

    Raises ``ArgumentError`` for an item that is not a module, and for one that is listed twice.
    """

    __slots__ = ("_modules",)

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        if not isinstance(modules, Iterable):
            kind = type(modules).__name__
            raise ArgumentError(f"ModelParts of a {kind}: give a list of modules")
        self._modules = tuple(modules)
        for i, module in enumerate(self._modules):
            if not isinstance(module, nn.Module):
                raise ArgumentError(
                    f"ModelParts: part {i} is {type(module).__name__}, not a module"
                )
            if any(module is other for other in self._modules[:i]):
                raise ArgumentError(f"ModelParts: part {i} was there before; name every part once")

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[nn.Module, ...]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | tuple[nn.Module, ...]:
        return self._modules[index]

    def __len__(self) -> int:
        return len(self._modules)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, with the name it has in the whole model."""
        seen: set[int] = set()
        for module in self._modules:
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter once, as an optimizer wants them."""
        return (parameter for _, parameter in self.named_parameters())

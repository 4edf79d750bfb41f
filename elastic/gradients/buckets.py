"""Sums of plain gradients in buckets, each started during the backward pass that completes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.summing import Reducer
from holdfast.elastic.groups.shards import gradient_dtype, local_of, zero_gradient

BUCKET_BYTES = 25 << 20
"""Largest size of one collective sum, unless one gradient is larger; the same as DDP's."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    """Gradients summed together.

    ``waits_for`` are those that the last backward has not made yet.
    """

    parameters: list[nn.Parameter]
    reducer: Reducer
    waits_for: set[int]
    flat: torch.Tensor | None = None
    wait: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Start the sum; a missing gradient counts as zeros."""
        self.flat = torch.cat([_gradient(p).reshape(-1) for p in self.parameters])
        self.wait = self.reducer.start_sum(self.flat)

    def parts(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Wait for the sum, then yield every parameter with its part."""
        assert self.flat is not None, "the bucket was begun"
        self.wait()
        parts = torch.split(self.flat, [local_of(p).numel() for p in self.parameters])
        yield from zip(self.parameters, parts, strict=True)


class Buckets:
    """The gradients of parameters, each summed over the ranks that hold the same part of it.

    Buckets follow the parameters from the last to the first, as a backward pass does, and are
    started in that order on every rank. With ``early`` complete buckets are started inside the last
    backward of the pass, which hides their communication (Li et al., "PyTorch Distributed").
    """

    def __init__(self, reducer_of: Callable[[nn.Parameter], Reducer], *, early: bool) -> None:
        self._reducer_of, self._early = reducer_of, early
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._begun = 0
        self._is_last = False
        self._hooked: dict[int, weakref.ref[nn.Parameter]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin_pass(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start a pass in which these parameters are expected to get gradients.

        The same on all ranks.
        """
        self._buckets = [
            _Bucket(
                parameters=bucket,
                reducer=self._reducer_of(bucket[0]),
                waits_for=set(map(id, bucket)),
            )
            for bucket in _cut(parameters[::-1], self._reducer_of)
        ]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._begun, self._is_last = 0, False
        if self._early:
            for parameter in parameters:
                self._hook(parameter)

    def _hook(self, parameter: nn.Parameter) -> None:
        known = self._hooked.get(id(parameter))
        if known is None or known() is not parameter:
            self._hooked[id(parameter)] = weakref.ref(parameter)
            handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether the pass sums the gradient of a parameter."""
        return id(parameter) in self._bucket_of

    def begin_microbatch(self, *, last: bool) -> None:
        """Note whether the next backward completes the gradients."""
        self._is_last = last

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or not self._is_last:
            return
        if bucket.flat is not None:
            raise ConfigError(
                "a parameter got two gradients in the last backward of the pass, the second when "
                "the first was being summed: use non-reentrant activation checkpointing"
            )
        bucket.waits_for.discard(id(parameter))
        while self._begun < len(self._buckets) and not self._buckets[self._begun].waits_for:
            self._begin_next()

    def _begin_next(self) -> None:
        self._buckets[self._begun].begin()
        self._begun += 1

    def end_backward(self) -> None:
        """Start buckets that the last backward left incomplete; some parameters had no gradient."""
        while self._is_last and self._begun < len(self._buckets):
            self._begin_next()

    def finish(self, present: set[int]) -> None:
        """Write the sums into ``.grad`` of the parameters with the ids ``present``.

        Others have none.
        """
        self._is_last = True
        self.end_backward()
        for bucket in self._buckets:
            for parameter, part in bucket.parts():
                if id(parameter) in present:
                    gradient = _gradient(parameter, keep=True)
                    gradient.copy_(part.view(gradient.shape))
        self.drop()

    def drop(self) -> None:
        """Forget the pass."""
        self._buckets, self._bucket_of, self._begun, self._is_last = [], {}, 0, False

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.drop()


def _gradient(parameter: nn.Parameter, *, keep: bool = False) -> torch.Tensor:
    """Return this rank's part of a gradient.

    Zeros if there is none, set as ``.grad`` on ``keep``.
    """
    gradient = parameter.grad
    if gradient is None:
        gradient = zero_gradient(parameter)
        if keep:
            parameter.grad = gradient
    if gradient.is_sparse:
        raise ConfigError(
            f"the gradient of a parameter of shape {list(gradient.shape)} is sparse, and was dense "
            "in the last pass: set sparse=False"
        )
    return local_of(gradient)


def _cut(
    parameters: Sequence[nn.Parameter], reducer_of: Callable[[nn.Parameter], Reducer]
) -> Iterator[list[nn.Parameter]]:
    """Split into runs of one dtype, device and reducer, of limited size."""
    bucket: list[nn.Parameter] = []
    size_bytes = 0
    for parameter in parameters:
        own_bytes = local_of(parameter).nbytes
        fits = size_bytes + own_bytes <= BUCKET_BYTES
        alike = not bucket or (
            bucket[0].device == parameter.device
            and gradient_dtype(bucket[0]) == gradient_dtype(parameter)
            and reducer_of(bucket[0]) is reducer_of(parameter)
        )
        if bucket and not (fits and alike):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(parameter)
        size_bytes += own_bytes
    if bucket:
        yield bucket

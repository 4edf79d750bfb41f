"""The mean gradient of a step over microbatches that several ranks run; exact on request.

Works on FSDP2 modules, HSDP included (their own reductions sum once per step), and on plain and DDP
modules (summed here, in buckets during the last backward). All of them may use tensor parallelism
and experts that are spread over ranks. With ``exact`` every microbatch's gradient is rounded to a
grid before anything is added to it, so the sum is the same in any grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.ckpt import torch_private
from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.buckets import Buckets
from holdfast.elastic.gradients.rounding import NO_GRADIENT, Rounding, Totals
from holdfast.elastic.gradients.sparse import SparseGradients
from holdfast.elastic.gradients.summing import Reducer, Replicas, sum_shards, sums_of
from holdfast.elastic.gradients.users_hooks import UsersHooks
from holdfast.elastic.gradients.wrapped import Parameters, Wrapped
from holdfast.elastic.groups.shards import (
    experts_of,
    gradient_dtype,
    is_reduced_by_fsdp,
    local_of,
    settle,
    with_local,
    zero_gradient,
)

_ABSENT, _WHOLE, _BESIDE, _SPARSE = 0, 1, 2, 3
"""Place of a parameter's gradient in the pass: none (or FSDP2), ``.grad``, or a separate total.

Sparse ones have a place of their own.
"""


class Gradients:
    """The gradients of the tracked modules, over one pass of microbatches at a time.

    ``reducer`` reduces over all ranks; ``replicas`` (default: the same) over the ranks that run
    other microbatches with the same part of the model. ``unite`` returns the names of all ranks for
    those of one, if ranks have different parts of the model. ``bounds`` is the state of `Rounding`,
    for ``exact``. ``check`` is called between the parts of a backward pass and may raise to leave
    it.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module | ModelParts],
        reducer: Reducer,
        *,
        microbatches: int,
        exact: Exact,
        bounds: dict[str, int],
        replicas: Replicas | None = None,
        unite: Callable[[list[str]], list[str]] = list,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._reducer, self._microbatches = reducer, microbatches
        self._replicas = replicas or Replicas(dense=reducer, experts=reducer)
        self.wished, self.alike = 0, True
        self._wrapped = Wrapped(modules)
        self._sparse = SparseGradients(
            modules, self._replicas.dense, microbatches=microbatches, exact=exact
        )
        self._unite, self._mine = unite, [name for name, _ in self._wrapped.parameters()]
        self._names = unite(self._mine)
        # other collectives in the backward have their own order, which the buckets' would have to
        # match
        early = self._replicas.experts is reducer and not self._wrapped.is_sharded
        self._buckets = Buckets(self._reducer_of, early=early)
        self._users = UsersHooks()
        self._expected: dict[int, set[str]] = {}
        self._phase = 0
        self._rounding: Rounding | None = None
        if exact:
            self._rounding = Rounding(
                self._wrapped, exact=exact, terms=microbatches, bounds=bounds, check=check
            )

    def _reducer_of(self, parameter: nn.Parameter) -> Reducer:
        replicas = self._replicas
        return replicas.dense if experts_of(parameter) is None else replicas.experts

    def begin_pass(self, phase: int = 0) -> None:
        """Start a pass over this rank's microbatches, in the step's phase of this number."""
        self._phase = phase
        if self._rounding is not None:
            self._rounding.begin_pass()
        expected, parameters = self._expected.get(phase, ()), self._wrapped.parameters()
        self._sparse.begin_pass(parameters)
        self._users.begin_pass(parameters)
        self._buckets.begin_pass(
            [p for name, p in parameters if name in expected and p.requires_grad]
        )

    def begin_microbatch(self, *, last: bool) -> None:
        """Communicate only in the last backward of the share."""
        self._wrapped.begin_microbatch(last=last)
        self._buckets.begin_microbatch(last=last)

    def begin_schedule(self) -> None:
        """Leave the microbatches to the stages of a pipeline; nothing is complete before the end.

        The stages make FSDP2 communicate at the points of their schedule.
        """
        self._wrapped.begin_microbatch(last=True)
        self._act(True)

    def backward(self, loss: torch.Tensor, *, microbatch: int = 0) -> None:
        """Add a microbatch's gradient. Other backwards in the microbatch are the user's own."""
        self._act(True)
        self._users.begin_backward()
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._act(False)
        self._buckets.end_backward()
        self._sparse.take(microbatch)

    def _act(self, active: bool) -> None:
        if self._rounding is None:
            return
        if active:
            self._rounding.begin_backward()
        else:
            self._rounding.active = False

    def end_pass(self, *, backwards: int, names: int = 0, wish: int = 0) -> None:
        """Make the mean gradients, of ``backwards`` at this rank: none at any, or some at all.

        Afterwards ``alike`` says whether all ranks gave the same ``names``, a signature of 32 bits,
        and ``wished`` is the largest ``wish`` of any. Raises ``NotFiniteError`` on all ranks
        together.
        """
        self._act(False)
        self._wrapped.reshard()
        parameters = self._wrapped.parameters()  # a frozen one too: it may have been trained before
        self._sparse.refuse_left(parameters)
        for _, parameter in parameters:
            if not is_reduced_by_fsdp(parameter):
                settle(parameter)
        rounding = self._rounding
        if rounding is not None and backwards:
            rounding.end_backwards()
            rounding.check_hooks(backwards)
        peaks, places = self._agree(parameters, trains=backwards > 0, names=names, wish=wish)
        if backwards == 0:
            self._buckets.drop()
            return
        totals = {} if rounding is None else self._agree_on_levels(rounding, peaks)
        self._sum_whole([pair for pair in parameters if places[pair[0]] == _WHOLE])
        if rounding is not None:
            apart = [pair for pair in parameters if places[pair[0]] != _BESIDE]
            self._add_levels(apart, rounding, totals)
        self._divide([p for name, p in parameters if places[name] not in (_BESIDE, _SPARSE)])
        if rounding is not None:
            beside = [pair for pair in parameters if places[pair[0]] == _BESIDE]
            self._mean_beside(beside, rounding, totals)
        self._sparse.end_pass([pair for pair in parameters if places[pair[0]] == _SPARSE])

    def end_step(self) -> None:
        """Note that the step is complete."""
        if self._rounding is not None:
            self._rounding.end_step()

    def _agree(
        self, parameters: Parameters, *, trains: bool, names: int, wish: int
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Return every parameter's peak and the place of its gradient, over all ranks."""
        if self._mine != (mine := [name for name, _ in self._wrapped.parameters()]):
            self._mine, self._names = mine, self._unite(mine)
        own = {name: self._place(name, parameter) for name, parameter in parameters}
        places = torch.tensor([own.get(name, _ABSENT) for name in self._names], dtype=torch.float64)
        peaks = torch.full_like(places, NO_GRADIENT)
        if self._rounding is not None:
            peaks = places.new_tensor([self._rounding.peak(name) for name in self._names])
        seen = [wish, names, -names, trains, -trains]
        vector = torch.cat([peaks, places, places.new_tensor(seen)])
        vector.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        self._reducer.max_(vector)
        values = vector.tolist()
        if values[-2] != -values[-1]:
            raise ConfigError(
                "the ranks did different things in the same step: every microbatch of a pass must "
                "call run.backward, or none"
            )
        self.wished, self.alike = int(values[-5]), values[-4] == -values[-3]
        count = len(self._names)
        found = dict(zip(self._names, values[:count], strict=True))
        return found, dict(zip(self._names, map(int, values[count:-5]), strict=True))

    def _agree_on_levels(self, rounding: Rounding, peaks: Mapping[str, float]) -> Totals:
        """Return the levels that some rank has; collective only if a gradient exceeds its bound."""
        levels = rounding.levels(peaks)
        rounding.judge(peaks)
        if not levels:
            return {}
        pairs = [(name, level) for name, each in levels.items() for level in each]
        found = torch.tensor([float(rounding.has_level(*pair)) for pair in pairs])
        self._reducer.max_(found)
        totals: Totals = {}
        for (name, level), is_there in zip(pairs, found.tolist(), strict=True):
            if is_there:
                totals[name] = (*totals.get(name, ()), level)
        return totals

    def _place(self, name: str, parameter: nn.Parameter) -> int:
        if self._sparse.has(name):
            return _SPARSE
        if self._rounding is not None and self._rounding.has_total(name):
            return _BESIDE
        return _ABSENT if parameter.grad is None or is_reduced_by_fsdp(parameter) else _WHOLE

    def _sum_whole(self, present: Parameters) -> None:
        """Finish the buckets; also sum gradients that were not in them and will be next time."""
        late = [parameter for _, parameter in present if not self._buckets.has(parameter)]
        self._buckets.finish({id(parameter) for _, parameter in present})
        for parameter in late:
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
        self._sum_now(late, [local_of(p.grad) for p in late if p.grad is not None])
        self._expected[self._phase] = {name for name, _ in present}

    def _sum_now(self, parameters: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
        """Add up a tensor of each parameter over the ranks with the same part of it, in place."""
        for tensor, total in zip(tensors, self._sums(parameters, tensors), strict=True):
            if total is not tensor:
                tensor.copy_(total)

    def _sums(
        self, parameters: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return these sums; may reuse the tensors."""
        found, replicas = list(tensors), self._replicas
        are_experts = [experts_of(parameter) is not None for parameter in parameters]
        for experts, reducer in ((False, replicas.dense), (True, replicas.experts)):
            own = [at for at, is_expert in enumerate(are_experts) if is_expert == experts]
            for at, total in zip(
                own, sums_of([found[at] for at in own], reducer.sum_), strict=True
            ):
                found[at] = total
        return found

    def _divide(self, parameters: Sequence[nn.Parameter]) -> None:
        gradients = [local_of(p.grad) for p in parameters if p.grad is not None]
        with torch.no_grad():
            if gradients and self._microbatches > 1:
                torch_private.divide_each(gradients, float(self._microbatches))
            if gradients and self._rounding is not None:
                torch_private.add_to_each(gradients, 0.0)  # order can still show in the sign of -0

    def _add_levels(self, parameters: Parameters, rounding: Rounding, totals: Totals) -> None:
        """Add the sums of gradients above their bounds to ``.grad``, the lowest level first."""
        for parameter, _, total in self._summed(parameters, rounding, totals):
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
            local_of(parameter.grad).add_(total)

    def _mean_beside(self, parameters: Parameters, rounding: Rounding, totals: Totals) -> None:
        """Sum the totals kept apart from ``.grad``, and store their means in ``.grad``."""
        levels = {name: (0, *totals.get(name, ())) for name, _ in parameters}
        means: dict[str, torch.Tensor] = {}
        for parameter, (name, level), total in self._summed(parameters, rounding, levels):
            is_last = len(levels[name]) == 1  # else the sum of all levels is rounded
            kind = gradient_dtype(parameter) if is_last else torch.float64
            mean = rounding.mean(name, total, level, dtype=kind)
            means[name] = means[name].add_(mean) if name in means else mean
        for name, parameter in parameters:
            parameter.grad = with_local(parameter, means.pop(name).to(gradient_dtype(parameter)))

    def _summed(
        self, parameters: Parameters, rounding: Rounding, totals: Totals
    ) -> Iterator[tuple[nn.Parameter, tuple[str, int], torch.Tensor]]:
        """Yield the sums over all ranks of the totals at each level, in ascending order."""
        found = [(n, p, level) for n, p in parameters for level in totals.get(n, ())]
        whole = [each for each in found if not is_reduced_by_fsdp(each[1])]
        sharded = [each for each in found if is_reduced_by_fsdp(each[1])]
        sums = self._sums([p for _, p, _ in whole], [rounding.take_total(*w) for w in whole])
        like = [p for _, p, _ in sharded if isinstance(p, DTensor)]
        sums += sum_shards([rounding.take_total(*each) for each in sharded], like)
        for (name, parameter, level), total in zip(whole + sharded, sums, strict=True):
            yield parameter, (name, level), total

    def parameters(self) -> Parameters:
        """Return every tracked parameter once, with its name."""
        return self._wrapped.parameters()

    @property
    def moves_parameters(self) -> bool:
        """True if FSDP2 exchanges parameters in a pass: whole ones for shards."""
        return self._wrapped.is_sharded

    def spoil(self) -> None:
        """Replace all gradients by NaN: they were not finite, and no mean was made of them."""
        self.clear()
        for _, parameter in self._wrapped.parameters():
            if parameter.requires_grad:
                kind = gradient_dtype(parameter)
                parameter.grad = torch.full_like(
                    parameter, torch.nan, dtype=kind, requires_grad=False
                )

    def clear(self) -> None:
        """Drop all gradients."""
        self._buckets.drop()
        self._wrapped.reshard()
        for _, parameter in self._wrapped.parameters():
            parameter.grad = None

    def close(self) -> None:
        """Remove every hook."""
        self._buckets.close()
        if self._rounding is not None:
            self._rounding.close()

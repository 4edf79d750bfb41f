"""A difference in plain words, with its cause as far as the traces show it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.elastic.loop.trace.records import ForeignUse, Use
from holdfast.tools.check.compare import Difference
from holdfast.tools.check.traces import RankTrace
from holdfast.tools.check.variables import CarriedVariables

_SAID: Final[dict[Use, str]] = {
    "loader": "the DataLoader made at {detail} and iterated at {line} is not the run's",
    "generator": "a generator that is not the run's is used at {line}",
    "numpy generator": "a NumPy generator that is not the run's is made at {line}",
    "python generator": "a random.Random that is not the run's is used at {line}",
    "rank": "{detail} is read at {line}",
    "clock": "the clock is read at {line}",
    "environment": "the environment is read at {line}",
    "zero_grad": "gradients {detail} (`zero_grad` at {line})",
    "optimizer by hand": "{detail} is stepped by hand at {line}",
    "carried": "`{detail}` is passed from one microbatch to the next at {line}",
    "untracked optimizer": "{detail} is stepped at {line} and not tracked",
    "untracked scheduler": "{detail} is stepped at {line} and not tracked",
}

_OF_INPUT: Final[tuple[Use, ...]] = (
    "loader", "numpy generator", "python generator", "generator", "rank", "clock", "environment",
)  # fmt: skip
_OF_LOSS: Final[tuple[Use, ...]] = (
    "loader", "generator", "python generator", "rank", "clock", "environment", "numpy generator",
    "zero_grad", "optimizer by hand", "carried",
)  # fmt: skip
_OF_STATE: Final[tuple[Use, ...]] = (
    "zero_grad", "optimizer by hand", "untracked optimizer", "untracked scheduler", "rank",
    "generator", "loader", "clock", "python generator", "numpy generator", "environment",
)  # fmt: skip

_REMEDIES: Final[dict[Use, str]] = {
    "loader": "give the data to run.microbatches, or make the loader by run.loader",
    "generator": "draw from torch's default generator, which the run seeds for each microbatch",
    "numpy generator": "draw from numpy.random, which the run seeds for each microbatch",
    "python generator": "draw from the module random, which the run seeds for each microbatch",
    "rank": "what a microbatch computes must not depend on the rank; use run.microbatch",
    "clock": "count steps instead of seconds, or keep the time out of what is trained",
    "environment": "read it once, on all machines alike, and pass it as an argument",
    "zero_grad": "remove the call: run.step drops the gradients",
    "optimizer by hand": "give every optimizer to run.step",
    "carried": "make each microbatch by itself: ranks run them in any order",
    "untracked optimizer": "name it in run.track",
    "untracked scheduler": "name it in run.track",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A difference in one sentence, with its cause; ``also`` are further things of less weight."""

    text: str
    remedy: str = ""
    also: tuple[str, ...] = ()


def explain(
    difference: Difference,
    *,
    where: str,
    traces: Sequence[RankTrace],
    before: Sequence[RankTrace],
    carried: CarriedVariables,
) -> Explanation:
    """Say what differs and why. ``before`` are the reference's traces, ``where`` names the run."""
    d, causes = difference, _causes(difference, [*traces, *before])
    changed = carried.changed(traces, step=d.moment.step)
    variables = [_variable(*item) for item in changed]
    if d.what == "left":
        return Explanation(
            text=_left(d, where),
            remedy="let all ranks decide alike, from the step or from tracked state",
            also=(*variables, *(text for _, text in causes)),
        )
    if d.what == "carried":
        name = d.names[0].rpartition(".")[2]
        remedy = f"keep it in a dict that run.track names: progress={{{name!r}: ...}}"
        return Explanation(
            text=f"{_place(d)}, after the restore: {_variable(d.names[0], d.here, d.there)}",
            remedy="name it in run.track" if d.here.startswith("#") else remedy,
        )
    if d.what == "own state":
        return Explanation(
            text=f"{_place(d)}, after the restore: {_variable(d.names[0], d.here, d.there)}",
            remedy="let its load_state_dict bring back all that its state_dict returns",
        )
    head = _head(d, _what(d, causes), "after the restore" if d.restored else where)
    lost = [text for text, item in zip(variables, changed, strict=True) if item[1][:1] != "#"]
    strong = [text for use, text in causes if _is_strong(use)]
    ordered = [*strong, *lost, *(text for _, text in causes if text not in strong)]
    ordered += [text for text in variables if text not in ordered]
    if d.what in ("state", "state before") and d.here:
        return Explanation(text=head, remedy=_first_remedy(causes), also=tuple(ordered))
    if not ordered:
        return Explanation(text=f"{head}; {_unknown(d)}")
    return Explanation(
        text=f"{head}; {ordered[0]}", remedy=_first_remedy(causes), also=tuple(ordered[1:])
    )


def _place(d: Difference) -> str:
    moment = d.moment
    text = f"step {moment.step}"
    if moment.phase:
        text += f", phase {moment.phase}"
    return text if moment.microbatch < 0 else f"{text}, microbatch {moment.microbatch}"


def _head(d: Difference, what: str, where: str) -> str:
    """Return place, fault and circumstance; the latter must not seem to tell of the reference."""
    if " where " in what:
        return f"{_place(d)}, {where}: {what}"
    return f"{_place(d)}: {what} {where}"


def _what(d: Difference, causes: Sequence[tuple[Use, str]]) -> str:
    first = causes[0][0] if causes else None
    match d.what:
        case "input":
            return "other input"
        case "draws":
            return f"other draws from {' and '.join(d.names)}'s generator"
        case "loss" if first == "loader":
            return "other input"
        case "loss" if first in ("generator", "numpy generator", "python generator"):
            return "other noise"
        case "loss" if d.here and d.there and d.here != d.there:
            return f"the loss is {d.here} where it was {d.there}"
        case "loss":
            return "another loss"
        case "gradient":
            return f"another gradient of `{d.names[0]}`"
        case "updates":
            return f"{d.here} updates by optimizers where there were {d.there}"
        case _ if d.here:
            return f"`{d.names[0]}` is {d.here} where it was {d.there}"
        case _:
            more = f" and {len(d.names) - 1} more" if len(d.names) > 1 else ""
            return f"`{d.names[0]}`{more} differs"


def _left(d: Difference, where: str) -> str:
    if d.names:
        rank, other = d.names
        return f"rank {rank} left the loop at step {d.moment.step}, rank {other} did not"
    return f"{where} the loop was left at step {d.here}, not at step {d.there}"


def _variable(name: str, here: str, there: str) -> str:
    if not (here and there) or here.startswith("#") or there.startswith("#"):
        return f"`{name}` is not what it was"
    return f"`{name}` is {here} where it was {there}"


def _causes(d: Difference, traces: Iterable[RankTrace]) -> list[tuple[Use, str]]:
    """Return the foreign things that may be the cause, the likeliest first."""
    kinds = _OF_INPUT if d.what in ("input", "draws") else _OF_LOSS
    kinds = _OF_STATE if d.what in ("state", "updates", "gradient") else kinds
    uses = [use for trace in traces for use in trace.of(ForeignUse) if _counts(use, d)]
    found: dict[str, Use] = {}
    for kind in kinds:
        for use in uses:
            if use.use == kind:
                found.setdefault(_said(use), kind)
    return [(kind, text) for text, kind in found.items()]


def misuse(traces: Sequence[RankTrace]) -> tuple[ForeignUse, Explanation] | None:
    """Return the first use that is wrong whatever the runs show, in words."""
    for trace in traces:
        for use in trace.of(ForeignUse):
            if use.use in ("zero_grad", "optimizer by hand"):
                text = f"step {max(use.step, 0)}: {_said(use)}"
                return use, Explanation(text=text, remedy=_REMEDIES[use.use])
    return None


def _counts(use: ForeignUse, d: Difference) -> bool:
    """True if a use can matter for a difference."""
    if use.use in ("rank", "clock", "environment") and d.what in ("loss", "draws", "gradient"):
        return use.place != "build" or d.moment.step == 0
    return use.place == "build" or use.step <= d.moment.step


def _said(use: ForeignUse) -> str:
    detail = use.detail
    if use.use == "loader" and not detail:
        return f"the DataLoader iterated at {use.line} is not the run's"
    return _SAID[use.use].format(line=use.line, detail=detail)


def _is_strong(use: Use) -> bool:
    return use not in ("rank", "clock", "environment", "numpy generator", "carried")


def _first_remedy(causes: Sequence[tuple[Use, str]]) -> str:
    return _REMEDIES[causes[0][0]] if causes else ""


def _unknown(d: Difference) -> str:
    match d.what:
        case "input":
            return (
                f"the data set given to run.microbatches at {d.line} gives other samples: it "
                "depends on something besides the index and the run's random draws"
            )
        case "draws" | "loss" | "gradient":
            return (
                f"the pass at {d.line} depends on something that is neither tracked nor of the "
                "microbatch: a variable, the order of a set, a clock, a file, the rank"
            )
        case _:
            return (
                "it depends on something that is not tracked, or that ranks do not have in common"
            )

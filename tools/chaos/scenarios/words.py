"""Texts of targets and moments for people. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.tools.chaos.scenarios.scenario import StrikeTarget, When


def target_text(target: StrikeTarget, part: str | None) -> str:
    """Return the victims of a fault in words."""
    words: list[str] = [target.which] if target.which != "random" else []
    words += [part] if part else []
    words += [f"of role {target.role}"] if target.role is not None else []
    words += [f"rank {target.rank}"] if target.rank is not None else []
    words += [f"on {', '.join(target.nodes)}"] if target.nodes else []
    text = " ".join(words) or "any"
    return f"{text} × {target.count}" if target.count > 1 else text


def when_text(when: When) -> str:
    """Return the trigger of a fault in words."""
    later = f" + {when.after_s:g} s" if when.after_s else ""
    if when.s is not None:
        return f"{when.s:g} s after the first step{later}"
    if when.step is not None:
        return f"step {when.step} complete{later}"
    if when.state is not None:
        return f"{when.state!r} is seen{later}"
    if when.recovery is not None:
        return f"{when.recovery!r} after the fault before{later}"
    if when.every_s is not None:
        return f"every {when.every_s:g} s{later}"
    return f"every {when.poisson_s:g} s at random{later}"

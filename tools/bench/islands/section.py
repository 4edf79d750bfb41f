"""Sections islands and lines: islands beside DDP, between the same processes on the same cores.

On lines torchft's streaming DiLoCo stands beside them, if torchft can be imported.

Section islands has no limit of bandwidth, and the islands meet in a directory. Section lines trains
in network namespaces, each on a line that a token bucket limits both ways; the islands meet at the
object store that ``--store`` names, across these lines.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from rich.console import Console

from holdfast.elastic.errors import ConfigError
from holdfast.tools.bench.faults.peers import has_torchft
from holdfast.tools.bench.islands import jobs
from holdfast.tools.bench.islands.jobs import SAMPLES, Place
from holdfast.tools.bench.islands.learner import CONTEXT, SmallGPT, parameters_of
from holdfast.tools.bench.islands.lines import Lines, why_not
from holdfast.tools.bench.islands.outcome import Outcome
from holdfast.tools.bench.islands.relay import Relay
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo, by_line

ISLANDS, DDP, TORCHFT = "islands", "DDP", "torchft"
COUNT: Final = 2
"""Islands, and ranks of DDP."""

LIMITS_MBIT: Final = (0.0, 100.0, 20.0, 5.0, 1.0)
"""Limits of the lines, each way; 0: none."""

_QUICK_LIMITS_MBIT: Final = (0.0, 20.0)
_STEPS, _QUICK_STEPS = 240, 40
_PORT: Final = 29511
_DDP_S: Final = 60.0
"""Most seconds that the bytes of DDP take on a line: it trains fewer steps if it must."""

_LEAST_STEPS: Final = 4
_ENDPOINTS: Final = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_BASE_URL",
)
_COLUMNS: Final = {
    "tokens": "tokens/s",
    "times": "× DDP",
    "waits": "waits",
    "sent": "sent",
    "received": "received",
    "fewer": "fewer",
    "line sent": "line up",
    "line received": "line down",
    "line fewer": "fewer",
    "loss": "loss",
}


class Trained(NamedTuple):
    """The figures of one way: tokens of all processes per second, and the loss of the first.

    Bytes are those of one process per parameter and step, the mean of all: of gradients or payloads
    alone, and of the lines, None without lines. ``waits`` is the share of the time in which islands
    waited for merges.
    """

    tokens_per_s: float
    waits: float
    sent: float
    received: float
    line_sent: float | None
    line_received: float | None
    loss: float

    def fewer(self, other: Trained) -> float | None:
        """Return how many times as much the line of another way carries; None without lines."""
        if self.line_sent is None or other.line_sent is None:
            return None
        return other.line_sent / self.line_sent


def trained(found: Sequence[Outcome]) -> Trained:
    """Return the figures of processes that trained together."""
    slowest_s = max(each.window.seconds for each in found)
    tokens = sum(each.window.steps for each in found) * SAMPLES * CONTEXT
    steps = sum(each.parameters * each.window.steps for each in found)
    lines = [each.window.line for each in found if each.window.line is not None]
    return Trained(
        tokens_per_s=tokens / slowest_s,
        waits=sum(each.waited_s for each in found) / sum(each.window.seconds for each in found),
        sent=sum(each.content.sent for each in found) / steps,
        received=sum(each.content.received for each in found) / steps,
        line_sent=sum(each.sent for each in lines) / steps if lines else None,
        line_received=sum(each.received for each in lines) / steps if lines else None,
        loss=found[0].held_out,
    )


def islands(setup: BenchSetup) -> list[Figure]:
    """Train without a limit of bandwidth."""
    steps = _QUICK_STEPS if setup.quick else _STEPS
    with Tempo(setup, total=2) as tempo:
        places, more = [Place()] * COUNT, _words(setup)
        tempo.say(DDP)
        ddp = jobs.ddp(setup.directory / "ddp", places, steps=steps, port=_PORT, more=more)
        tempo.beat()
        tempo.say(ISLANDS)
        sea = setup.directory / "sea"
        found = jobs.islands(
            setup.directory / "islands", places, steps=steps, sea=str(sea), more=more
        )
        tempo.beat()
    return figures_of("islands", "no limit", {DDP: trained(ddp), ISLANDS: trained(found)})


def lines(setup: BenchSetup) -> list[Figure]:
    """Train on lines of several limits.

    Raises ``ConfigError`` without a store that is reached by an address, or without namespaces.
    """
    if reason := why_not():
        raise ConfigError(f"the section lines cannot be measured here: {reason}")
    steps = _QUICK_STEPS if setup.quick else _STEPS
    limits = setup.lines or (_QUICK_LIMITS_MBIT if setup.quick else LIMITS_MBIT)
    ways = (DDP, *((TORCHFT,) if has_torchft() else ()), ISLANDS)
    figures: list[Figure] = []
    with Tempo(setup, total=len(ways) * len(limits)) as tempo:
        for mbit in limits:
            line = f"{mbit:g} Mbit/s" if mbit else "no limit"
            found = {}
            for way in ways:
                tempo.say(f"{way}, {line}")
                found[way] = _on_lines(setup, way, mbit=mbit, steps=steps)
                tempo.beat()
            figures += figures_of("lines", line, found)
    return figures


def _on_lines(setup: BenchSetup, way: str, *, mbit: float, steps: int) -> Trained:
    directory = setup.directory / f"{way}-{mbit:g}"
    with Lines(COUNT, mbit=mbit) as made, _store(made) as env:
        places = [
            Place(
                address=made.address(number),
                within=end.command(),
                device=made.device(number),
                env={**env, "GLOO_SOCKET_IFNAME": made.device(number)},
            )
            for number, end in enumerate(made.ends)
        ]
        more = _words(setup)
        if way == DDP:
            parameters = parameters_of(SmallGPT(width=setup.width))
            few = steps_of_ddp(steps, mbit=mbit, parameters=parameters)
            return trained(jobs.ddp(directory, places, steps=few, port=_PORT, more=more))
        if way == TORCHFT:
            hub = Place(address=made.HUB, within=made.hub.command())
            return trained(jobs.torchft(directory, places, steps=steps, hub=hub, more=more))
        sea = f"{setup.store}/bench-{secrets.token_hex(4)}"
        return trained(jobs.islands(directory, places, steps=steps, sea=sea, more=more))


def _words(setup: BenchSetup) -> list[str]:
    """Return the words of a training's command line that say how large its model is."""
    return ["--width", str(setup.width)]


def steps_of_ddp(steps: int, *, mbit: float, parameters: int) -> int:
    """Return the steps that DDP trains: as many whose bytes pass the line in the allowed time."""
    if not mbit:
        return steps
    step_s = 8 * 4 * parameters * 2 * (COUNT - 1) / COUNT / (mbit * 1e6)
    return max(_LEAST_STEPS, min(steps, int(_DDP_S / step_s)))


@contextmanager
def _store(made: Lines) -> Iterator[dict[str, str]]:
    """Make the store's server reachable from the lines; yield the variables that name it there."""
    variable = next((each for each in _ENDPOINTS if os.environ.get(each)), None)
    address = urlsplit(os.environ[variable]) if variable else None
    if variable is None or address is None or address.scheme != "http" or not address.hostname:
        raise ConfigError(
            "the section lines needs --store on a server of this machine or network without TLS: "
            f"set {_ENDPOINTS[0]}=http://HOST:PORT, or the variable of the other stores"
        )
    listening = made.listen()
    own = address._replace(netloc=f"{made.HUB}:{listening.getsockname()[1]}")
    with Relay(listening, host=address.hostname, port=address.port or 80):
        yield {variable: own.geturl()}


def figures_of(section: str, line: str, found: Mapping[str, Trained]) -> list[Figure]:
    """Return the figures of all ways on one line."""
    ddp, figures = found[DDP], []
    for way, each in found.items():
        values: dict[str, tuple[float | None, str]] = {
            "tokens": (each.tokens_per_s, "tokens/s"),
            "times": (each.tokens_per_s / ddp.tokens_per_s, "×"),
            "waits": (each.waits, "%"),
            "sent": (each.sent, "bytes"),
            "received": (each.received, "bytes"),
            "fewer": (ddp.sent / each.sent if each.sent else None, "×"),
            "line sent": (each.line_sent, "bytes"),
            "line received": (each.line_received, "bytes"),
            "line fewer": (each.fewer(ddp), "×"),
            "loss": (each.loss, ""),
        }
        figures += [
            Figure(
                section=section,
                name=f"{line}, {way}: {what}",
                value=value,
                unit=unit,
                low=value,
                high=value,
            )
            for what, (value, unit) in values.items()
            if value is not None
        ]
    return figures


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print a line for each way and limit."""
    console.print(by_line(figures, columns=_COLUMNS, cell=_cell))
    console.print(
        f"{COUNT} processes of one thread, {SAMPLES} samples of {CONTEXT} tokens a step. sent, "
        "received: bytes of gradients or\npayloads of a process, per parameter and step; line: all "
        "that its line carried. fewer: than DDP "
        "sends.\nloss: on held-out text; DDP trains fewer steps on slow lines.\n"
    )
    if figures[0].section == "lines" and not has_torchft():
        console.print("torchft: not installed\n")


def _cell(figure: Figure) -> str:
    match figure.unit:
        case "tokens/s":
            return f"{figure.value:,.0f}"
        case "%":
            return f"{figure.value:.0%}"
        case "bytes":
            return f"{figure.value:.4f}"
        case "×":
            return f"{figure.value:,.1f}" if figure.value < 10 else f"{figure.value:,.0f}"
        case _:
            return f"{figure.value:.3f}"

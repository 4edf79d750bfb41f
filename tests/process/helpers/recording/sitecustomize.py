"""Recording of the actions that sinks accept from a test's workers and sidecars, with the time.

Python imports this at its start if this folder is on its path. Each action is one line of JSON in a
file per process under ``HOLDFAST_TEST_RECORD``: the time, the sink, the node, the acting
generation. A step counts from the end that its event reports, not from the time of the report.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FOLDER = os.environ.get("HOLDFAST_TEST_RECORD", "")


def record(sink: str, node: str, generation: int, *, t: float | None = None) -> None:
    line = {"t": t or time.time(), "sink": sink, "node": node, "generation": generation}
    with Path(_FOLDER, f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def after(owner: Any, name: str, note: Callable[..., tuple[str, str, int]]) -> None:
    """Record what ``note`` says whenever ``owner.name`` returned without an error."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        record(*note(*args, **kwargs))
        return result

    setattr(owner, name, wrapper)


def in_sidecar() -> None:
    from holdfast.ckpt.checkpoints import commit
    from holdfast.ckpt.sidecar.parity.exchange import ParityExchange
    from holdfast.ckpt.sidecar.writing.operations import WriteOperations

    def of(part: Any) -> str:
        return str(part._core.node)

    after(WriteOperations, "_begin", lambda w, _r, _s, key: ("arena", of(w), key[0]))
    after(ParityExchange, "announce", lambda x, entry: ("arena", of(x), entry.generation))
    after(ParityExchange, "_hear_row", lambda x, _r, body: ("peer", of(x), body.entry.generation))
    after(
        ParityExchange,
        "committed",
        lambda x, snapshot: ("weights", of(x), snapshot.world.generation),
    )
    after(
        ParityExchange,
        "_hear_sealed",
        lambda x, _r, body: ("peer", of(x), max(e.generation for e in body.entries)),
    )
    after(
        commit,
        "_published",
        lambda *_, generation, **__: ("store", "", generation),
    )


def in_worker() -> None:
    from holdfast.elastic.events import Event, StepDone
    from holdfast.elastic.loop.session import Session

    emit = Session.emit

    def emit_and_record(session: Session, event: Event) -> None:
        emit(session, event)
        if isinstance(event, StepDone):
            ended = event.start_s + event.seconds
            record("step", session._channel.node, event.generation, t=ended)

    Session.emit = emit_and_record  # type: ignore[method-assign]


if _FOLDER:
    if "holdfast.ckpt.sidecar" in sys.orig_argv:
        in_sidecar()
    elif any(word.endswith("_training.py") for word in sys.orig_argv):
        in_worker()

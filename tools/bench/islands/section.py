"""Sections islands and lines: islands beside DDP between the same processes.

Section islands trains without a limit of bandwidth; the islands meet in a directory. Section lines
trains in network namespaces whose lines are shaped by token buckets; the islands meet at the object
store that ``--store`` names, across these lines. All processes share the machine's cores.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console

from holdfast.ckpt.store.places import scheme_of
from holdfast.elastic.errors import ConfigError
from holdfast.tools.bench.islands import jobs
from holdfast.tools.bench.islands.jobs import SAMPLES, Place
from holdfast.tools.bench.islands.learner import CONTEXT
from holdfast.tools.bench.islands.lines import Lines, why_not
from holdfast.tools.bench.islands.outcome import Outcome
from holdfast.tools.bench.islands.relay import Relay
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo, by_line

ISLANDS, DDP = "islands", "DDP"
LIMITS_MBIT: Final = (0.0, 100.0, 20.0, 5.0, 1.0)
"""Bandwidth of the lines, each way; 0: no limit."""

COUNT: Final = 2
EVERY: Final = 40
_STEPS: Final = 200
_QUICK_STEPS: Final = 40
_DDP_S: Final = 40.0
"""Most seconds that DDP's bytes may take on a line: it trains fewer steps there."""

_PORT: Final = 29511
_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
_COLUMNS: Final = {
    "tokens": "tokens/s",
    "times": "× DDP",
    "sent": "sent",
    "received": "received",
    "fewer": "fewer",
    "loss": "loss",
}

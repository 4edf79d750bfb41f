"""The wrapped loops of the docs, with deaths at exact points, each of them once in a job.

Every token that was sampled and logged is one byte in the file ``sampled``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from holdfast.adapters.rl.library import Sample

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


class Deaths:
    """Kills this process when a kind of call has come so often, over all lives of the job."""

    def __init__(self, directory: Path, at: dict[str, int]) -> None:
        self._directory, self._at = directory, at

    def count(self, kind: str) -> None:
        path = self._directory / kind
        with path.open("ab") as file:
            file.write(b".")
        if path.stat().st_size == self._at.get(kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, kind: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            found = function(*args)
            self.count(kind)
            return found

        return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=Path, required=True, help="where calls are counted")
    parser.add_argument("--sampled", type=int, default=0, help="die after so many tokens")
    parser.add_argument("--trained", type=int, default=0, help="die after so many losses")
    parser.add_argument("--example", default="wrap_grpo", help="which loop")
    parser.add_argument("--meet", help="the directory of loop and samplers, to be one of these")
    mine, theirs = parser.parse_known_args()
    sys.path.insert(0, str(EXAMPLES))
    deaths = Deaths(mine.count, {"sampled": mine.sampled, "trained": mine.trained})
    Sample.extend = deaths.after("sampled", Sample.extend)  # type: ignore[method-assign]
    example: Any = importlib.import_module(mine.example)
    example.torch.set_num_threads(1)
    if mine.meet:
        example.sample_all(mine.meet)
        return
    example.loss_of = deaths.after("trained", example.loss_of)
    settings = argparse.ArgumentParser()
    settings.add_argument("--steps", type=int)
    settings.add_argument("--seed", type=int, default=0)
    settings.add_argument("--result")
    settings.add_argument("--directory")
    train = example.train if hasattr(example, "train") else example.main
    train(settings.parse_args(theirs))


if __name__ == "__main__":
    main()

"""The wrapped loop of the docs, with deaths at exact points: each happens once in a job.

Every token that was sampled and logged is one byte in the file ``sampled``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

from adapters.rl.library import Sample

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "wrap_grpo.py"


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
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--sampled", type=int, default=0, help="die after so many tokens")
    parser.add_argument("--trained", type=int, default=0, help="die after so many losses")
    mine, theirs = parser.parse_known_args()
    deaths = Deaths(mine.directory, {"sampled": mine.sampled, "trained": mine.trained})
    spec = importlib.util.spec_from_file_location("wrap_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["wrap_grpo"] = example
    Sample.extend = deaths.after("sampled", Sample.extend)  # type: ignore[method-assign]
    spec.loader.exec_module(example)
    example.loss_of = deaths.after("trained", example.loss_of)  # type: ignore[attr-defined]
    settings = argparse.ArgumentParser()
    settings.add_argument("--steps", type=int)
    settings.add_argument("--seed", type=int, default=0)
    settings.add_argument("--result")
    example.torch.set_num_threads(1)
    example.main(settings.parse_args(theirs))


if __name__ == "__main__":
    main()

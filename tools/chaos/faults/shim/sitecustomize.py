"""Entry point for the agent: the first ``sitecustomize`` on the PYTHONPATH of every Python.

It starts the agent, then runs the ``sitecustomize`` that Python would have found without it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import holdfast_inside  # type: ignore[import-not-found]  # beside it, at the path's beginning

holdfast_inside.start()


def _chain() -> None:
    here = Path(__file__).resolve().parent
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_chain()

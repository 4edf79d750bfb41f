"""Gives pytest the fixtures of `tools.chaos.plugin`.

pytest imports this wherever Holdfast is installed. A project may have a package ``tools`` of its
own, which then stands before Holdfast's (``python -m pytest`` begins the path with the current
folder): its tests must run all the same, without the fixtures.
"""

from importlib.util import find_spec


def _is_there() -> bool:
    try:
        return find_spec("tools.chaos.plugin") is not None
    except ModuleNotFoundError:
        return False


pytest_plugins = ["tools.chaos.plugin"] if _is_there() else []

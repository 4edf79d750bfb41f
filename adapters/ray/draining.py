"""The nodes that Ray is about to end: its drains, which the autoscaler and clouds announce.

Ray has no public call for this; the client of its control service, which its own libraries use, has
one. The other way, ``ray._private.state``, ends the process where that service was started anew
without its storage.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from holdfast.elastic.errors import ConfigError

_ANSWER_S: Final = 5.0


def check_drains(ray: Any) -> None:
    """Raise ``ConfigError`` if this Ray, which is connected, cannot say which nodes it drains."""
    try:
        known = hasattr(_connected(ray), "get_draining_nodes")
    except (ImportError, AttributeError):
        known = False
    if not known:
        raise ConfigError(
            f"Ray {ray.__version__} does not say which nodes it drains, so that their state could "
            "not be handed over: pip install 'holdfast[ray]' installs a version that does"
        )


class Drains:
    """Asks Ray whether it drains one node, the one of this id."""

    def __init__(self, ray: Any, node: str) -> None:
        self._ray, self._node = ray, node
        self._asked: Any = None

    def __call__(self) -> bool:
        """Return whether Ray drains the node; False while Ray does not answer.

        The end of a node that is not foretold is that of a lost one, which a job survives as well.
        """
        try:
            if self._asked is None:
                self._asked = _connected(self._ray)
            return self._node in self._asked.get_draining_nodes(timeout=_ANSWER_S)
        except (self._ray.exceptions.RayError, OSError, RuntimeError):
            self._asked = None
            return False


def _connected(ray: Any) -> Any:
    client = importlib.import_module("ray._raylet").GcsClient
    return client(address=ray.get_runtime_context().gcs_address)

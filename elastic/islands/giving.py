"""Weights of the sea that an island gives to others, and their removal once they were read."""

from __future__ import annotations

import logging

from holdfast.ckpt.checkpoints.catalog import committed
from holdfast.ckpt.checkpoints.retention import remove_steps
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.islands.messages import Asked, Given

_log = logging.getLogger(__name__)


class Giving:
    """The answers of the island ``name`` at rank 0."""

    def __init__(self, mailbox: Mailbox, *, name: str) -> None:
        self._mailbox, self._name = mailbox, name
        self._given: list[tuple[Asked, str]] = []

    def answer(self, request: Asked, given: Given, *, root: str) -> None:
        """Answer a request with the weights that were saved below ``root``."""
        self._mailbox.give(request, given)
        self._given.append((request, root))
        self.tidy()

    def tidy(self) -> None:
        """Remove the weights that nobody waits for any more."""
        for request, root in list(self._given):
            answer = self._mailbox.given(request)
            mine = answer is not None and answer.by == self._name
            if not (mine and self._mailbox.is_open(request)):
                remove_given(root)
                self._given.remove((request, root))


def remove_given(root: str) -> None:
    """Remove the weights below a root; trouble is only told."""
    try:
        store = open_store(root)
        remove_steps(store, committed(store))
    except CkptError as error:
        _log.warning("weights that were given stay at %s: %s", root, error)

"""Weights that an island gives stay as long as somebody waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.ckpt import api
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.islands.giving import Giving
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.islands.messages import Asked, Given

REQUEST = Asked(island="c", id="c-1")


@pytest.fixture
def mailbox(tmp_path: Path) -> Mailbox:
    found = Mailbox(LocalStore(tmp_path))
    found.ask(REQUEST)
    return found


def _answered(mailbox: Mailbox, name: str) -> tuple[Giving, Path]:
    giving, root = Giving(mailbox, name=name), mailbox.given_root(REQUEST, by=name)
    api.save(root, {"weights": {"w": torch.ones(3)}}, step=4)
    giving.answer(REQUEST, Given(by=name, tide=4, bases=(2, 2)), root=root)
    return giving, Path(root)


def _manifests(root: Path) -> list[Path]:
    return list(root.glob("step-*/manifest.json"))


def test_weights_stay_until_their_request_is_closed(mailbox: Mailbox) -> None:
    giving, root = _answered(mailbox, "a")
    giving.tidy()
    assert len(_manifests(root)) == 1
    mailbox.close_request(REQUEST)
    giving.tidy()
    assert _manifests(root) == []


def test_who_was_not_the_first_removes_its_answer_at_once(mailbox: Mailbox) -> None:
    _, first = _answered(mailbox, "a")
    _, second = _answered(mailbox, "b")
    assert (len(_manifests(first)), _manifests(second)) == (1, [])

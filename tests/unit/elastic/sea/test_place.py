"""A place in the logbook as text, and the chain of records whose digest it has."""

from __future__ import annotations

import pytest
from doubles import seas

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea import place
from holdfast.elastic.sea.settings import Islands

ISLANDS = Islands(name="a", every=4, portions=2, overlap=1)


def test_a_place_has_all_of_the_view_in_the_order_of_its_islands() -> None:
    view = seas.left(seas.entered(seas.founded(ISLANDS), "c", "a", "b"), "b")
    view = view.after(seas.merged(view, *(seas.work(view, name) for name in "ca")))
    made = place.place_of(view, before="0" * 32, digest="1" * 32, left="silent")
    again = place.decode(place.encode(made))
    assert again == made
    assert view.founded is not None
    assert again.view(view.founded) == view
    assert list(again.members) == ["c", "a"]


def test_the_digest_of_a_chain_tells_its_records_and_their_order() -> None:
    chains = [(b"a", b"b"), (b"b", b"a"), (b"ab",), (b"a", b"b", b"")]
    digests = set()
    for records in chains:
        digest = place.START
        for record in records:
            digest = place.chained(digest, record)
        digests.add(digest)
    assert len(digests) == len(chains)


def test_another_text_is_refused_with_a_remedy() -> None:
    with pytest.raises(SeaError, match="begin with the checkpoint of another step"):
        place.decode('{"length": -1}')

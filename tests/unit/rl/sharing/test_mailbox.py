"""The files of a pool: one for each group, created once, checked when read."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from doubles.memory_store import MemoryStore
from shared_runs import group_of

from holdfast.adapters.rl.samples.borrowed import GroupOrigin, SharedGroup
from holdfast.adapters.rl.sharing.mailbox import GroupMailbox
from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError

NAME = "sharing/groups/oslo/aa/000000000000"


def published(group: SharedGroup) -> GroupMailbox:
    mailbox = GroupMailbox(MemoryStore())
    mailbox.claim("oslo", "aa")
    assert mailbox.publish(msgspec.json.encode(group).decode(), group.origin)
    return mailbox


def test_a_group_that_is_there_stays_as_it_is() -> None:
    group = group_of()
    mailbox = published(group)
    other = msgspec.structs.replace(group, prompt=(7,))
    assert mailbox.publish(msgspec.json.encode(other).decode(), group.origin) == 0
    assert mailbox.islands() == ["oslo"]
    assert mailbox.origins("oslo") == [group.origin]
    assert mailbox.read(group.origin) == group


def test_groups_of_an_earlier_run_of_the_name_are_removed_and_not_offered() -> None:
    group = group_of()
    mailbox = published(group)
    mailbox.claim("oslo", "bb")
    assert mailbox.origins("oslo") == []
    assert mailbox.store.names("sharing/groups/oslo") == []
    with pytest.raises(NotFoundError):
        mailbox.read(group.origin)


def test_a_name_that_nobody_has_offers_nothing() -> None:
    mailbox = GroupMailbox(MemoryStore())
    assert (mailbox.owner("oslo"), mailbox.origins("oslo")) == ("", [])


def test_an_owner_that_is_a_path_owns_nothing() -> None:
    mailbox = published(group_of())
    mailbox.store.write("sharing/owners/oslo", [b"../oslo/aa"])
    assert (mailbox.owner("oslo"), mailbox.origins("oslo")) == ("", [])


def sealed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode() + b"\n" + data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"", "not those of its digest", id="empty"),
        pytest.param(b"\xff\xfe\nx", "not those of its digest", id="no text"),
        pytest.param(sealed(b"{}"), "no group of this version", id="another"),
        pytest.param(
            sealed(
                msgspec.json.encode(group_of()).replace(
                    b'"logprobs":[-1.0,-2.0]', b'"logprobs":[-1.0]'
                )
            ),
            "2 tokens with 1 log-probabilities",
            id="parts",
        ),
        pytest.param(
            sealed(msgspec.json.encode(group_of(ordinal=5))), "it has the group oslo/5", id="origin"
        ),
    ],
)
def test_a_file_that_is_no_such_group_is_refused(data: bytes, said: str) -> None:
    mailbox = published(group_of())
    mailbox.store.write(NAME, [data])
    with pytest.raises(CorruptError, match=said):
        mailbox.read(GroupOrigin(island="oslo", lineage="aa", ordinal=0))


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(StoreError, match="not supported"):
        GroupMailbox.at("ftp://host/pool")

"""The settings of environment processes, and the frames between them and their owner."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.adapters.rl.environments.processes import wire
from holdfast.adapters.rl.environments.registry import EnvironmentConfig, module_of
from holdfast.ckpt.errors import CorruptError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count is 0, needed: at least 1"),
        ({"cpu_s": 0}, "cpu_s is 0.0, needed: above 0, or null"),
        ({"start_s": -1}, "start_s is -1.0, needed: above 0"),
        ({"memory": "much"}, "'much' is not a size"),
        ({"writable": ["here"]}, "writable has 'here', needed: an absolute path"),
        ({"sandbox": "perhaps"}, "Invalid enum value 'perhaps'"),
        ({"colour": "red"}, "unknown field `colour`"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"factory": "a:b", "processes": given}, EnvironmentConfig)


@pytest.mark.parametrize("factory", ["http", "mcp"])
def test_a_service_needs_the_network(factory: str) -> None:
    given: dict[str, Any] = {"factory": factory, "settings": {"url": "http://x"}}
    with pytest.raises(msgspec.ValidationError, match=r"set processes\.network to true"):
        msgspec.convert({**given, "processes": {}}, EnvironmentConfig)
    for processes in ({"network": True}, {"sandbox": "off"}, None):
        msgspec.convert({**given, "processes": processes}, EnvironmentConfig)


def test_a_limit_of_memory_is_a_size() -> None:
    assert ProcessConfig(memory="2GiB").memory_bytes == 2 << 30
    assert ProcessConfig().memory_bytes is None


def test_the_module_of_a_factory_is_what_is_imported_once() -> None:
    assert module_of("guess:Guess") == "guess"
    assert module_of("slow_tool") == "holdfast.adapters.rl.environments.slow_tool"


def test_frames_arrive_whole_and_in_order_however_they_are_cut() -> None:
    ours, theirs = wire.pair()
    sender, receiver = wire.FrameStream(ours), wire.FrameStream(theirs)
    assert receiver.receive() == []
    sent = [(number, bytes([number]) * (number * 40_000)) for number in range(8)]
    for number, message in sent:
        sender.send(number, message)
    assert sender.wants_to_write, "more than the other end takes at once"
    found: list[tuple[int, bytes]] = []
    while len(found) < len(sent):
        sender.flush()
        found += receiver.receive()
    assert found == sent
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.send(1, b"lost")
    assert not receiver.wants_to_write


@pytest.mark.parametrize(
    "garbage",
    [b"neither head nor tail", struct.pack("<III", 0x48_46_45_4E, wire.MOST_BYTES + 1, 1)],
)
def test_garbage_is_noticed_at_once(garbage: bytes) -> None:
    ours, theirs = wire.pair()
    ours.send(garbage)
    with pytest.raises(CorruptError, match="bytes that are no message"):
        wire.FrameStream(theirs).receive()


def test_what_is_no_reply_is_no_message() -> None:
    reply = wire.Replied(call=3, observation=Observation(text="a", state=[1]))
    assert wire.said.decode(wire.encode(reply)) == reply
    for text in (b"{}", b'{"type": "Replied"}', b'{"type": "Replied", "call": 1}'):
        with pytest.raises(msgspec.DecodeError):
            wire.said.decode(text)
    action = Action(ordinal=1, sample=2, turn=3, text="ü", ended=False, state={"a": None})
    asked = wire.AskReply(call=1, action=action)
    assert wire.question.decode(wire.encode(asked)) == asked

"""The units of a program write what a plain pass over the tensors writes, bit for bit."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
from doubles.lanes import FakeLanes
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.geometry.shard_index import encode_index
from holdfast.ckpt.native.sums import sums_of
from holdfast.ckpt.snapshot import copy_program
from holdfast.ckpt.snapshot.copy_job import CopyJob
from holdfast.ckpt.snapshot.copy_program import PayloadBuffer, Program
from holdfast.ckpt.snapshot.pacing import FULL_SPEED
from holdfast.ckpt.snapshot.tearing import ChecksumSample
from holdfast.ckpt.state.capture import CapturePlan, gather_alone
from holdfast.ckpt.state.flatten import flatten

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.float8_e5m2]
KINDS = ["plain", "parameter", "turned", "strided", "conjugate", "negative", "scalar", "empty"]


def make_tensor(kind: str, dtype: torch.dtype, size: int) -> torch.Tensor:
    tensor = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    match kind:
        case "turned":
            return tensor[: size // 2 * 2].view(2, -1).T
        case "strided":
            return tensor[::3]
        case "conjugate" if dtype.is_complex:
            return tensor.conj()
        case "negative" if dtype.is_complex:
            return tensor.conj().imag
        case "scalar":
            return tensor[0].clone()
        case "empty":
            return tensor[:0]
    return tensor


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    torch.manual_seed(draw(st.integers(0, 2**32)))
    state: dict[str, Any] = {"n": draw(st.integers()), 'a"crc32c":7': 'x"tensors":{}'}
    for i in range(draw(st.integers(0, 12))):
        kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES))
        tensor = make_tensor(kind, dtype, draw(st.integers(1, 3000)))
        if kind == "parameter" and dtype.is_floating_point and dtype.itemsize > 1:
            holder = torch.nn.Module()
            holder.register_parameter("weight", torch.nn.Parameter(tensor))
            state[f"module{i}"] = holder
        else:
            state[f"tensor{i}"] = tensor
    return state


@settings(max_examples=examples(60), deadline=None)
@given(state=states(), seed=st.integers(0, 2**32), carried=st.booleans(), two=st.booleans())
def test_a_shared_copy_equals_a_plain_one(
    state: dict[str, Any], seed: int, carried: bool, two: bool
) -> None:
    rng, saved = random.Random(seed), (copy_program.UNIT_BYTES, copy_program.PART_BYTES)
    copy_program.UNIT_BYTES, copy_program.PART_BYTES = (
        rng.choice([64, 1000, 4096]),
        rng.choice([0, 256]),
    )
    try:
        flat = flatten(state)
        plan = CapturePlan.build(flat, rank=0, world_size=1, gather=gather_alone)
        wanted = bytearray(plan.payload_bytes)
        index = plan.write(flat, memoryview(wanted), run="r", step=3, generation=2)
        lanes = FakeLanes(lambda tensor: carried and tensor.numel() % 2 == 0)
        made = Program(plan, flat, lanes=lanes)
    finally:
        copy_program.UNIT_BYTES, copy_program.PART_BYTES = saved
    made.stage(flat, step=3)
    ready = {lanes.lane: lanes.lane.ready()} if made.carried else {}
    job, found = CopyJob(made, ready=ready), bytearray(plan.payload_bytes)
    job.sample = ChecksumSample(made, turn=seed, share=rng.choice([0.0, 0.02, 1.0]))
    helper = threading.Thread(target=job.help, args=[None])
    if two:
        helper.start()
    room = PayloadBuffer.of(memoryview(found))
    job.open(room)
    sums = job.run(speed=FULL_SPEED)
    if two:
        helper.join()
    assert not job.torn
    assert found == wanted
    crcs = made.parts.of_ranges(sums).tolist()
    text = plan.index_text(flat, crcs, run="r", step=3, generation=2)
    assert text == encode_index(index)
    runs = made.cover.of_runs(sums, tail=text)
    assert runs.tolist() == sums_of(bytes(found) + text).tolist()

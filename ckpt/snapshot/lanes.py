"""Copy from a device's memory into a slot, on a CUDA stream beside the training's.

The module keeps these rules of CUDA streams. A stream executes its work later, in order. The side
stream begins only after all work that the training stream had been given when the snapshot was
taken (`Lane.ready`, `Lane.begin`). An event holds the training stream back behind the last copy
(`Lane.hold`); the host never waits for that. Nothing here synchronises a stream or a device. Memory
that a copy reads stays referred to until its event has passed, so that the caching allocator cannot
hand it out again.

The copies are made by a thread of their own, whose current device is CUDA's first. Every call there
names its device, and goes back in a way that makes no context on that first one.
docs/explanation/cuda.md says where torch's source shows each of these rules.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.native import isal
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.copying import resolved
from holdfast.ckpt.state.local_boxes import Leaf, local_of

_log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device

_COPIED_FROM: Final = frozenset({"cpu", "cuda"})


class Mark(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait in the host until the stream has passed it."""
        ...


class Lane(Protocol):
    """Copies from one device on a stream beside the training's."""

    def ready(self) -> Mark:
        """Mark the position of the training stream; call it on the training thread."""
        ...

    def look(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies on the device, made in the training stream.

        Call it on the training thread. They have the carrier dtype and are contiguous.
        """
        ...

    def begin(self, after: Mark) -> None:
        """Let the side stream go on only once ``after`` has passed."""
        ...

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Enqueue a copy into host memory; ``source`` may have any strides."""
        ...

    def mark(self) -> Mark:
        """Mark the end of the work enqueued so far."""
        ...

    def hold(self, mark: Mark) -> None:
        """Make the training stream wait for ``mark``; call it on the training thread."""
        ...

    def pin(self, slot: SlotFile) -> None:
        """Prepare the slot's memory for copies for which the host does not wait."""
        ...

    def close(self) -> None:
        """Undo ``pin``. Call it only when no copy is in progress."""
        ...


class Lanes(Protocol):
    """A choice of the lane by which each tensor is copied."""

    def of(self, tensor: torch.Tensor) -> Lane | None:
        """Return the tensor's lane, or None if it lies in host memory."""
        ...

    def close(self) -> None:
        """Close all lanes."""
        ...


class CudaLanes:
    """One lane for each CUDA device; all lanes share the pinned slots."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane] = {}
        self._pins = PinnedSlots(torch.cuda.cudart, self._in_a_context)

    def _in_a_context(self) -> contextlib.AbstractContextManager[object]:
        """Make a device current that has a context; all devices share what it registers."""
        return torch.cuda.device(next(iter(self._lanes)))

    def of(self, tensor: torch.Tensor) -> Lane | None:
        """Return the lane of the tensor's device."""
        if not tensor.is_cuda:
            return None
        if tensor.device not in self._lanes:
            self._lanes[tensor.device] = _CudaLane(tensor.device, self._pins)
        return self._lanes[tensor.device]

    def close(self) -> None:
        """Unpin the slots."""
        self._pins.close()
        self._lanes.clear()


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaLane:
    def __init__(self, device: torch.device, pins: PinnedSlots) -> None:
        self._device, self._pins = device, pins
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def ready(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self._device))

    def look(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = [torch_dtypes.as_carrier(resolved(source)) for source in sources]
        room = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in parts]
        with torch.no_grad():
            torch_private.copy_each(room, parts)
        return room

    def begin(self, after: Mark) -> None:
        assert isinstance(after, _CudaMark)
        self._stream.wait_event(after.event)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        # Without the first of these, the end of the second would make the thread's former device
        # current by a call that makes a context there: hundreds of MiB on the first device.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # A kernel of the side stream packs the tensor. The packed memory belongs to the side
            # stream, so its next use on this stream comes after the copy.
            packed = torch_dtypes.as_carrier(resolved(source).contiguous())
            into.copy_(packed, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def pin(self, slot: SlotFile) -> None:
        self._pins.pin(slot)

    def close(self) -> None:
        """Do nothing: the pins are shared."""


class PinnedSlots:
    """Slots registered with CUDA, once each, for as long as their files exist.

    A reference keeps a registered slot mapped; the slot is unregistered before the reference is
    dropped. ``runtime`` returns the module that has ``cudaHostRegister`` (`torch.cuda.cudart`). It
    is called within ``context``, and in a thread of its own: CUDA keeps the error of a call that
    failed for the calling thread, and the next kernel that torch starts there would raise it.
    """

    def __init__(
        self,
        runtime: Callable[[], Any],
        context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._runtime, self._context = runtime, context
        self._pinned: dict[tuple[int, int], tuple[Path, memoryview]] = {}
        self._warned = False

    def _call(self, name: str, *args: int) -> int:
        """Call a function of the runtime; return its error code."""
        codes: list[int] = []

        def call() -> None:
            with self._context():
                codes.append(int(getattr(self._runtime(), name)(*args)))

        thread = threading.Thread(target=call, name="ckpt-pin", daemon=True)
        thread.start()
        thread.join()
        return codes[0] if codes else -1

    def __len__(self) -> int:
        return len(self._pinned)

    def pin(self, slot: SlotFile) -> None:
        """Register a slot once; unregister those whose files are gone."""
        self._prune()
        found = slot.path.stat()
        key = (found.st_dev, found.st_ino)
        block = slot.block(slot.capacity)[slot.fixed_bytes :]
        address = isal.address_of(block)
        if key in self._pinned:
            if isal.address_of(self._pinned[key][1]) == address:
                return
            self._unpin(key)  # the file was mapped again
        code = self._call("cudaHostRegister", address, block.nbytes, _PORTABLE)
        if code == 0:
            self._pinned[key] = (slot.path, block)
        elif not self._warned:
            self._warned = True
            _log.warning(
                "cudaHostRegister refused %d bytes of slot memory (error %d): copies from the "
                "device are slower; raise the limit on locked memory (ulimit -l)",
                block.nbytes,
                code,
            )

    def _prune(self) -> None:
        for key, (path, _) in list(self._pinned.items()):
            with contextlib.suppress(OSError):
                found = path.stat()
                if (found.st_dev, found.st_ino) == key:
                    continue
            self._unpin(key)

    def _unpin(self, key: tuple[int, int]) -> None:
        _, block = self._pinned.pop(key)
        self._call("cudaHostUnregister", isal.address_of(block))
        block.release()

    def close(self) -> None:
        """Unregister all."""
        for key in list(self._pinned):
            self._unpin(key)


def host_room(tensor: torch.Tensor, payload: memoryview, at: int) -> torch.Tensor:
    """Return the bytes at ``at`` of a slot as a tensor into which ``tensor`` can be copied."""
    nbytes = tensor.numel() * tensor.itemsize
    room = torch.frombuffer(payload, dtype=torch.uint8, count=nbytes, offset=at)
    return room.view(torch_dtypes.carrier(tensor.dtype)).view(tensor.shape)


def is_captured() -> bool:
    """Return whether the current stream only records its work, for a CUDA graph."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def refuse_captured(doing: str, remedy: str) -> None:
    """Raise ``StateError`` if the current stream is recorded for a CUDA graph."""
    if is_captured():
        raise StateError(f"{doing} while a CUDA graph is captured: {remedy}")


def refuse_devices(tensors: Mapping[str, Leaf]) -> None:
    """Raise ``StateError`` naming a tensor on a device from which no lane copies."""
    for fqn, leaf in tensors.items():
        device = local_of(leaf).device
        if device.type not in _COPIED_FROM:
            raise StateError(
                f"{fqn} is on {device}: snapshots are taken of host memory and of CUDA devices; "
                "move the tensor, or save by holdfast.save, which waits for the device"
            )

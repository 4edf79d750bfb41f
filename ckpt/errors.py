"""The root of Holdfast's errors, and the errors about the bytes of the state.

The tree is grouped by what a caller would do. The first sentence of a class's docstring is its
meaning, ``remedy`` is what helps in general, and ``code`` names it for other processes and other
versions: a code is never given a second meaning. A class without a code of its own is for its
handlers the same as its parent. `docs/hooks/errors_page.py` makes the page of the reference.

Every message says what was found, what was needed and what to do. None of these is a bug in
Holdfast, `InternalError` excepted: a command-line tool prints the message as one paragraph and
exits, without a traceback.
"""

from __future__ import annotations

from typing import ClassVar, Final


class HoldfastError(Exception):
    """Holdfast cannot do what it was asked to do, and no other class says more."""

    code: ClassVar[str] = "HF001"
    remedy: ClassVar[str] = "Follow the message, which names the found value and the needed one."


class InternalError(HoldfastError):
    """Something failed inside Holdfast that no part of it handles.

    Its subclasses are signals between modules: one that reaches a caller is a bug.
    """

    code = "HF002"
    remedy = "Report it, with the traceback."


class CkptError(HoldfastError):
    """Captured, stored or restored state cannot be had, and no other class says more.

    Holds all errors about bytes: code around the training loop handles them as one, apart from the
    errors that end a generation or a job.
    """

    code = "HF003"
    remedy = "Follow the message, which names the step, the file or the peer."


class StateError(CkptError):
    """The state of the caller cannot be captured."""

    code = "HF004"
    remedy = "Change the state at the path that the message names."


class MismatchError(CkptError):
    """Saved and wanted state differ in keys, shapes or dtypes."""

    code = "HF005"
    remedy = "Load into the model that was saved, or pass a strict= that permits the differences."


class CorruptError(CkptError):
    """Bytes are not those that were written: a checksum differs, or some are missing."""

    code = "HF006"
    remedy = "Use another copy or another step."


class NotFoundError(CkptError):
    """Nothing is there under that name or step."""

    code = "HF007"
    remedy = "Correct the path, or choose a step that is listed."


class StoreError(CkptError):
    """The store refused: it is full, read-only or permits too little."""

    code = "HF008"
    remedy = "Make room, correct the target, or give the permission."


class ImmutableError(StoreError, ValueError):
    """A checkpoint was to be changed through Zarr.

    A ``ValueError`` too, which is what zarr-python expects.
    """

    code = "HF009"
    remedy = "Save another step, or copy the group elsewhere."


class CapacityError(CkptError):
    """There is no room for this snapshot now; it is left out, and training goes on."""

    code = "HF010"
    remedy = "None is needed for a single snapshot; raise the memory budget if it happens often."


class BudgetError(CapacityError):
    """The declared host memory can never hold the state."""

    code = "HF011"
    remedy = "Raise the budget, or keep fewer snapshots."


class FencedError(CkptError):
    """A sink refused the caller, whose generation is older than the sink's."""

    code = "HF012"
    remedy = "Stop acting: a newer generation has taken over."


class GivenUpError(CkptError):
    """Another rank gave up the snapshot of this step."""

    code = "HF013"
    remedy = "Go on: the next snapshot is not affected."


class UnsafePathError(CkptError):
    """A path or a name leads to what another user may have prepared."""

    code = "HF033"
    remedy = "Have what lies there removed, or choose another name or place."


class VersionError(CkptError):
    """Holdfast was never tested with the installed torch."""

    code = "HF032"
    remedy = "Install a torch in the tested range, or set HOLDFAST_UNTESTED_TORCH=1."


class ArgumentError(CkptError, ValueError):
    """An argument of a function has a wrong type or a wrong value.

    A ``ValueError`` too, which such a mistake is elsewhere in Python.
    """

    code = "HF034"
    remedy = "Give the argument a value that the message permits."


class PeerError(CkptError):
    """A peer cannot be reached, did not answer in time, or refused.

    ``peer_code`` is the code of the error that the peer raised, empty when none reached us.
    """

    code = "HF014"
    remedy = "Choose another source, or retry."

    def __init__(self, message: str, *, peer_code: str = "") -> None:
        super().__init__(message)
        self.peer_code = peer_code


class BusyError(PeerError):
    """A peer did nothing for the request, because too many bytes are under way to it."""

    code = "HF015"
    remedy = "Retry later."


_ACROSS: Final = {
    kind.code: kind
    for kind in (
        ArgumentError,
        StateError,
        MismatchError,
        CorruptError,
        NotFoundError,
        StoreError,
        CapacityError,
        BudgetError,
        FencedError,
        GivenUpError,
    )
}


def code_of(error: BaseException) -> str:
    """Return the code by which other processes know ``error``."""
    return error.code if isinstance(error, HoldfastError) else InternalError.code


def from_peer(code: str, message: str) -> CkptError:
    """Return the error that a peer raised, of the same class where the peer's class fits here.

    Any other code, one of a newer version included, becomes a `PeerError` with the message.
    """
    kind = _ACROSS.get(code)
    return PeerError(message, peer_code=code) if kind is None else kind(message)

"""What can go wrong with the bytes of the state, grouped by what a caller would do about it.

Every message says what was found, what was needed and what to do. None of these is a bug in
Holdfast: a command-line tool prints the message as one paragraph and exits, without a traceback.
"""


class CkptError(Exception):
    """Any error about captured, stored or restored state."""


class StateError(CkptError):
    """The caller's state cannot be captured: change the state at the path the message names."""


class MismatchError(CkptError):
    """Saved and wanted state differ in keys, shapes or dtypes: load into the right model."""


class CorruptError(CkptError):
    """Bytes are not what was written (checksum, truncation, malformed): use another copy."""


class NotFoundError(CkptError):
    """Nothing is there under that name or step: correct the path or choose a listed step."""


class StoreError(CkptError):
    """The store refused (full, read-only, no permission): make room or correct the target."""


class CapacityError(CkptError):
    """There is no room for this snapshot now: it is left out, training goes on."""


class BudgetError(CapacityError):
    """Declared host memory can never hold the state: raise the budget or keep fewer snapshots."""


class FencedError(CkptError):
    """The caller's generation is older than the sink's: stop acting, a newer one has taken over."""


class GivenUpError(CkptError):
    """Another rank gave this step's snapshot up: go on, the next one is not affected."""


class PeerError(CkptError):
    """A peer cannot be reached, timed out or refused: choose another source.

    ``kind`` is the class name of the error the peer raised, empty when none reached us.
    """

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind

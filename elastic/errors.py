"""The errors around the training loop, grouped by what a caller would do. Pure.

`holdfast.ckpt.errors` has the root of the tree, and says what ``code`` and ``remedy`` are.
"""

from __future__ import annotations

from holdfast.ckpt.errors import HoldfastError


class Stopped(Exception):
    """The job is over for this worker: release everything and return.

    Control flow, as ``KeyboardInterrupt`` is: nothing went wrong. So it is no `HoldfastError`, has
    no code, and a handler of errors in a user's loop lets it pass.
    """


class GenerationOverError(HoldfastError):
    """The generation of this worker is over.

    Raised in the worker itself, so that it unwinds and waits for the next generation. A
    `holdfast.ckpt.FencedError` comes from outside, from a sink that knows a newer one.
    """

    code = "HF016"
    remedy = "Let it pass: the loop enters the next generation."


class RollBackError(GenerationOverError):
    """All ranks leave the generation to go on from ``at_most`` complete steps or fewer."""

    code = "HF017"
    remedy = "Let it pass: the loop restores an earlier step."

    def __init__(self, message: str, *, at_most: int) -> None:
        super().__init__(message)
        self.at_most = at_most


class StateLostError(HoldfastError):
    """The state may be half restored, and nothing is left to restore."""

    code = "HF018"
    remedy = "Let it pass: the loop builds the state again."


class ConfigError(HoldfastError):
    """A setting is wrong or contradicts another."""

    code = "HF019"
    remedy = "Correct the field that the message names."


class CoordinatorError(HoldfastError):
    """The coordinator cannot be reached, or refused."""

    code = "HF020"
    remedy = "Check the coordinator's address, and that it runs."


class LeaseExpiredError(HoldfastError):
    """The lease ran out."""

    code = "HF021"
    remedy = "Stop acting before you ask for a new lease."


class JobFailedError(HoldfastError):
    """The job cannot go on: its own code fails, or too few nodes are left."""

    code = "HF022"
    remedy = "Remove the cause that the message names, then start the job again."


class NotFiniteError(JobFailedError):
    """A gradient is NaN or infinite, and the same step on the same weights would give it again.

    So is the progress that an island would send: its weights are not finite.
    """

    code = "HF023"
    remedy = "Find the parameter that the message names; lower the learning rate, or clip."


class SeaError(HoldfastError):
    """A record, a work or a payload does not fit the sea of islands that it is for."""

    code = "HF035"
    remedy = "Follow the message; an island whose own state is at fault enters the sea anew."

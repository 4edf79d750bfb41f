"""What can go wrong around the training loop, grouped by what a caller would do about it."""


class ElasticError(Exception):
    """Any error of membership, coordination or the training loop."""


class Fenced(ElasticError):
    """This worker's generation is over: unwind, then wait for the next one."""


class RollBack(Fenced):
    """All ranks leave the generation to go on from ``at_most`` complete steps or fewer."""

    def __init__(self, message: str, *, at_most: int) -> None:
        super().__init__(message)
        self.at_most = at_most


class Anew(ElasticError):
    """The state may be half restored, and nothing is left to restore: it has to be built again."""


class Stopped(ElasticError):
    """The job is over for this worker: release everything and return."""


class ConfigError(ElasticError):
    """A setting is wrong or contradicts another: correct the named field."""


class CoordinatorError(ElasticError):
    """The coordinator cannot be reached or refused: check its address and that it runs."""


class LeaseExpired(ElasticError):
    """The lease ran out: the holder must stop acting before it asks for a new one."""


class JobFailed(ElasticError):
    """The job cannot go on (its own code fails, or too few nodes are left): see the reason."""


class NotFinite(JobFailed):
    """A gradient is NaN or infinite: repeating the step on the same weights would not help."""

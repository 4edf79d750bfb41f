"""The rule that a pass over `run.microbatches` is iterated to its end, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.user_code import user_line

_REMEDY = "iterate all of run.microbatches(...), by `for` or `enumerate`"
_CAUGHT = "let it end the function: the other ranks do not skip what this one skips"


class WholePass:
    """The pass that is under way, or was left before its end."""

    def __init__(self) -> None:
        self._begun = self._left = ""

    @contextmanager
    def one(self) -> Iterator[None]:
        """Mark the body of the generator `Run.microbatches` as a pass.

        Raises ``ConfigError`` if another has not come to its end.
        """
        self.check()
        self._begun = user_line()
        try:
            yield
        except GeneratorExit:
            self._left = user_line()
            raise
        self._begun = ""

    def check(self) -> None:
        """Raise ``ConfigError`` if a pass has begun and not come to its end."""
        if self._left:
            raise ConfigError(
                f"the pass over run.microbatches begun at {self._begun} was left at {self._left} "
                f"before its end, so gradients and ranks would be out of step: {_REMEDY}. If an "
                f"exception in the pass was caught, {_CAUGHT}"
            )
        if self._begun:
            raise ConfigError(
                f"the pass over run.microbatches begun at {self._begun} has not come to its end "
                f"at {user_line()}: {_REMEDY}, one pass at a time; a data set may return several "
                "things at once (torch.utils.data.StackDataset). If an "
                f"exception in the pass was caught, {_CAUGHT}"
            )

    def check_left(self) -> None:
        """Raise ``ConfigError`` if a pass was left before its end."""
        if self._left:
            self.check()

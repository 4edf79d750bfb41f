"""The number of examples of a property test; many times as many where somebody explores."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return how many examples to draw where a test asks for ``count``.

    The profile decides: ``explore`` draws many times as many as the others (see ``conftest``).
    """
    return max(1, count * settings.default.max_examples // 100)

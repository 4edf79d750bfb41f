"""Three calls by which any training loop reports steps, samples and state to `holdfast chaos`."""

from holdfast.tools.chaos.hooks import samples, state_hash, step

__all__ = ["samples", "state_hash", "step"]

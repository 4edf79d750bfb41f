"""Three calls that report a training loop's steps, samples and state to `holdfast chaos`."""

from holdfast.tools.chaos.hooks import samples, state_hash, step

__all__ = ["samples", "state_hash", "step"]

"""TRL's GRPOTrainer in Holdfast's loop: rounds of completions that serve one step or several.

A round is sampled at the begin of the step that first needs it, in chunks that the ranks share, and
kept in the state until its last step. A chunk that was sampled lies in a log at once, with copies
on other nodes.
"""

from holdfast.adapters.hf.grpo.microbatches import MicrobatchesOfGrpo
from holdfast.adapters.hf.grpo.settings import is_grpo, settle

__all__ = ["MicrobatchesOfGrpo", "is_grpo", "settle"]

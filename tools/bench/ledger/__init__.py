"""Section ledger of `holdfast bench`: the ledger of an RL job with up to a million samples."""

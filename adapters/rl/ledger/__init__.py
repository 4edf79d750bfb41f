"""The ledger of prompts and samples: bookkeeping that keeps every prompt in one state."""

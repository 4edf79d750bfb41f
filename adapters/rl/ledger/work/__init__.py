"""The open groups of the ledger: their claims, the order they are given out in, and deliveries."""

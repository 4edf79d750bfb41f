"""The state that all parts of a sidecar share: its lock, book, slots, messages and links."""

"""What all parts of a sidecar share: book, slots, lock, messages, links."""

"""A node's fork server: it imports modules once, and the node's workers are forked from it."""

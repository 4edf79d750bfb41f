"""`holdfast run --preload`: a node's fork server imports modules once, and its workers fork from it."""

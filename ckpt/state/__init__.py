"""Live modules and optimizers to named boxes and back (capture, restore)."""

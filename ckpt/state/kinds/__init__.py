"""Kinds of entries of a state that are more than one tensor, and how they are taken apart."""

"""Snapshots: the live state is copied into a slot while training goes on."""

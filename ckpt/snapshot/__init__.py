"""Copies the live state into a slot while training goes on."""

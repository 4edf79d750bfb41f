"""Sections about bytes: snapshot, persist, restore, parity, memory."""

"""Checksums, streaming copies, pages: C and ctypes, outside the GIL."""

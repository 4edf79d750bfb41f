"""Compiled helpers: checksums, streaming copies and memory pages, in C and without the GIL."""

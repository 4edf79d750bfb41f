"""Faults by LD_PRELOAD: disks, clocks."""

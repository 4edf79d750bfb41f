"""Faults by LD_PRELOAD, of disks and clocks."""

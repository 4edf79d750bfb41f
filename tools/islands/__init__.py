"""The command `holdfast islands`: the status of a sea, and the merges of its logbook once more."""

"""The command `holdfast islands`: the status of a sea, its merges once more, and its samples."""

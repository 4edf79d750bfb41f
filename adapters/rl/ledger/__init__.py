"""Every prompt in exactly one state: the pure bookkeeping."""

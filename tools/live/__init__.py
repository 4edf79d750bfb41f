"""A run as it is now: a fold of its events and its nodes' answers, with bounded memory.

`Fold` is pure; `Follower` reads a run directory and asks the nodes. A dashboard, a terminal
view and exporters of metrics read the same `RunView`. None of it writes into a run, or is
needed by one.
"""

"""Lightning's automatic optimization in Holdfast's loop; `fit` is its entry.

Lightning's own Trainer calls the hooks, the callbacks and the validation. The steps, the ranks, the
data and the files are Holdfast's.
"""

"""An island that meets others two by two: its tensors, and the last merge at the end of its run."""

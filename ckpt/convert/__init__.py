"""Conversion: other formats as sources and sinks of tensors, and the rewriting of a checkpoint."""

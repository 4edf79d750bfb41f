"""Other formats, each as a ``TensorSource`` and a ``TensorSink`` of ``ckpt.interchange``."""

"""The adapter for torch.distributed.checkpoint (DCP): our format through DCP, and its directories.

With `HoldfastWriter` and `HoldfastReader`, DCP's ``save``, ``async_save`` and ``load`` write and
read Holdfast checkpoints; `DcpSource` and `DcpSink` read and write the directories that DCP makes
by itself. See docs/how-to/dcp.md.
"""

from holdfast.adapters.dcp.reader import HoldfastReader
from holdfast.adapters.dcp.sink import DcpSink
from holdfast.adapters.dcp.source import DcpSource
from holdfast.adapters.dcp.writer import HoldfastWriter

__all__ = ["DcpSink", "DcpSource", "HoldfastReader", "HoldfastWriter"]

"""torch.distributed.checkpoint (DCP) over our format, and DCP's own directories both ways.

`HoldfastWriter` and `HoldfastReader` make DCP's ``save``, ``async_save`` and ``load`` write and
read checkpoints of ours; `DcpSource` and `DcpSink` read and write the directories that DCP makes
by itself. See docs/dcp.md.
"""

from holdfast.adapters.dcp.reader import HoldfastReader
from holdfast.adapters.dcp.sink import DcpSink
from holdfast.adapters.dcp.source import DcpSource
from holdfast.adapters.dcp.writer import HoldfastWriter

__all__ = ["DcpSink", "DcpSource", "HoldfastReader", "HoldfastWriter"]

"""Free ports of the loopback address."""

from holdfast.tools.ports import free_ports

__all__ = ["free_ports"]

"""Free ports of the loopback address: Holdfast's function, before Holdfast is installed."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location("free_ports", Path(__file__).parents[2] / "tools" / "ports.py")
assert _spec is not None and _spec.loader is not None
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)

free_ports = _module.free_ports

"""The adapter for Ray: it places the nodes of a job, and Holdfast keeps the job going.

`launch` runs a script on the nodes of a Ray cluster. See docs/how-to/ray.md.
"""

from holdfast.adapters.ray.job import RayOptions
from holdfast.adapters.ray.launching import RayJobFailedError, RayResult, launch
from holdfast.adapters.ray.slots import NodeEnd

__all__ = ["NodeEnd", "RayJobFailedError", "RayOptions", "RayResult", "launch"]

"""Boxes, grids, reshard plans: pure arithmetic on shapes."""

"""Boxes, grids and reshard plans: pure arithmetic on shapes."""

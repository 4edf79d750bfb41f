"""Coordinators: key-value stores with leases and watches, through which agents agree."""

"""Environments that are services: behind plain HTTP, or behind the Model Context Protocol."""

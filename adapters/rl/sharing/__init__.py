"""Sharing of finished samples between runs that train apart."""

"""Payloads on their way: paced by the line that is declared, by the store or between islands.

Bulk goes on threads and connections of its own, so that the small files of the sea never wait for
it.
"""

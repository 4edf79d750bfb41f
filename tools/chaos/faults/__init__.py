"""The faults that hurt a job of real processes, one module per family.

Each is an `Injector` that needs a `JobAccess` and nothing else of the world that it strikes.
"""

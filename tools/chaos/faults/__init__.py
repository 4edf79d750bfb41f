"""The faults for jobs of real processes, one module per family.

Each family is an `Injector`. It needs a `JobAccess` and nothing else of the world that it strikes.
"""

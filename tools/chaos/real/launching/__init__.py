"""A job's launcher in a process of its own, which can be killed and started again."""

"""Bugs planted into production code one at a time, to see that the harness finds each of them.

``python -m mutants`` plants them; the table is in docs/how-to/chaos.md. A harness that finds
nothing proves little until it is shown what it does find (mutation testing: DeMillo, Lipton and
Sayward, "Hints on Test Data Selection", Computer 1978).
"""

"""Bugs planted into production code one at a time, to see whether the test harness finds each.

``python -m mutants`` plants them; the table is in docs/how-to/chaos.md. A harness that finds
nothing proves little unless it is known what it can find (mutation testing: DeMillo, Lipton and
Sayward, "Hints on Test Data Selection", Computer 1978).
"""

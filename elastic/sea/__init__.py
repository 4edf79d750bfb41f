"""The sea's arithmetic and decisions: payloads, the outer step, records of the logbook. Pure.

A sea is a number of islands, each a run of its own, that train one model with a few bytes per
parameter between them. `holdfast.elastic.islands` has the effects.
"""

"""The parts of an island in one generation: its contact with the sea, its entry and its tides.

`holdfast.elastic.islands.island` puts them together.
"""

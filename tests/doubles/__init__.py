"""Doubles for tests: sample data, fakes of sidecars and stores, and hypothesis strategies."""

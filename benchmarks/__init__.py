"""Measurements; see benchmarks/__main__.py."""

"""The version, alone in a module so that nothing else is imported to print it."""

__version__ = "0.1.0"

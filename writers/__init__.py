"""One module per format: `holds`, `remembers` and `check` say what it can take, `write(plan, settings)` writes.

A writer imports the core (`convert`) and what it shares with other writers, never a reader.
"""

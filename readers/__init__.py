"""One module per format: `open(path, limits)` gives a `convert.tensor.Checkpoint`.

A reader imports the core (`convert`) and what it shares with other readers, never a writer.
"""

"""Programs that made a committed record. `python -m dev.measure.NAME --help` explains each."""

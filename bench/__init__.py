"""Measuring: a plan, its cells in separate processes, and their records."""

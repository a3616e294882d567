"""Measuring: a plan, its cells in processes of their own, and what is kept of them (`records.py`)."""

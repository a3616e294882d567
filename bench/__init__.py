"""Measuring: a plan, its cells in processes of their own, and their records."""

"""Showing: statistics, comparisons, tables and one module a picture, from a run's records alone."""

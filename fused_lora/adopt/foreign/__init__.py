"""Clever dealings with other people's code. Each file begins with its reason."""

"""Autograd functions that a user may call: one technique a file, from the mathematics to what it
saves.

Add a technique here. Functions know tensors alone: no modules, no PEFT.
"""

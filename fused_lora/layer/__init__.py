"""Whole decoder layers: the autograd function, its operands, its buffers of weights. No PEFT."""

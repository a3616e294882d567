"""Forwards that `fuse` sets on the modules of a layer, and on layers: one kind of module a file,
and what they share.

Add a technique's forward here. On every call each reads its module again, then runs the fused
function or steps aside with a warning.
"""

"""The forwards that `fuse` sets on the modules of a layer, and on layers: one kind of module a
file.

Each reads its module anew in every call, runs a function of `functions/` or `layer/`, or steps
aside and says so.
"""

"""The switches of `Fusion`, setting forwards and taking them back, the report, and the calls beside
`fuse`: `graph_steps` and `shard_base`.

A new switch is a `Part` in `switches.py`, with its sites and what proves that it ran.
"""

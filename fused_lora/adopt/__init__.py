"""Adoption: which modules of a model run fused, why the others do not, and the forwards we set.
Only this package knows the classes of PEFT and transformers.

    switches.py                   each part of `Fusion`, and the kinds of module it applies to
    site.py, setting.py           such a kind; setting one forward on each module
    mlp.py and the like           one file per switch: how it reads a module and runs it
    projection.py, linear.py      a linear layer with its adapter, and groups of them
    families.py, known.py         the classes we know, and whether they are unpatched
    refusal.py, aside.py          why a module does not run fused; stepping aside and warning
    documents.py                  packed and padded rows
    sinks.py                      attention with sinks, which transformers runs on no sdpa
    borders.py, own_memory.py     weights in buffers, and out of them
    fp8/                          weights in FP8
    four_bit/                     in 4 bits, of whole layers and of parts
    shard_base.py                 sharded over ranks
    report.py                     the report of what runs fused now
    foreign/                      clever dealings with other people's code
"""

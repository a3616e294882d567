"""Adoption: which modules of a model run fused, why the others do not, and the forward that is set.
Alone knows the classes of PEFT and transformers.

    switches.py                   each part of `Fusion` and the kinds of module that it concerns
    site.py, setting.py           such a kind; the forward that is set, once on each module
    mlp.py and its like           one file a switch: what it reads of a module, what it runs
    projection.py, linear.py      a linear layer with its adapter, and several of them
    families.py, known.py         the classes that are known, and whether they are as written
    refusal.py, aside.py          why a module does not run fused; what it runs and says instead
    documents.py                  packed and padded rows
    borders.py, fp8/              weights in buffers
    report.py                     what runs fused now
    foreign/                      what has to be clever about other people's code
"""

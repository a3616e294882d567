"""A CUDA graph of what a test runs."""

import torch


def capture(step):
    """Return a function that replays `step`, and the results that each replay overwrites.

    `step` runs once before the capture, on another stream, to set up whatever a first call does.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results

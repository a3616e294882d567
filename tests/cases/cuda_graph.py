"""A CUDA graph of what a test runs."""

import torch


def capture(step):
    """What replays `step`, and its results, into which a replay writes. It runs once before, on
    another stream, so that what a first call sets up is there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results

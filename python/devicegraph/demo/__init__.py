"""A small reference engine: a real language model whose steps run through captured graphs.

It shows how an engine uses the package and checks itself; it is not a server. What of it is about graphs is in
`graphs.py`, which is the place to begin. `engine.py` is what one calls: it asks the scheduler (`scheduler.py`, with the
blocks of `blocks.py`) for a batch (`batches.py`), runs the model (`model.py`, `attention.py`, `kernels.py`) on it, and
chooses tokens (`sampling.py`, `lookup.py`). `serve.py` and `command.py` are the command.
"""

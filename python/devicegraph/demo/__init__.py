"""A small reference engine: a real language model whose decode steps run through captured graphs.

It shows how an engine uses the package and checks itself; it is not a server.
"""

"""Engines: they serve the model under training. The embedded one needs no other server; vLLM is the other.

Importing this package does not import torch; its modules that compute do.
"""

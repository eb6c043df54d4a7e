"""The embedded engine: a model of our own behind the same door as every other, so that learning needs no other server.

Importing this package does not import torch; its modules that compute do.
"""

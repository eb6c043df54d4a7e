"""Patches of agent frameworks and of libraries that call models: one module each, listed in `registry`."""

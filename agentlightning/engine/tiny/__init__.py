"""The tiny model: a transformer of a hundred thousand parameters whose weights travel in the package.

It reads and writes single characters, knows how to copy, to call a tool and to read a tool's result aloud. It was never
shown a solved task, so that what it can do after training it learned from reward.
"""

"""The dialects of models' APIs: their streams, their errors, their token fields, and translation between them.

Everything here is a function of bytes and JSON; nothing touches the network. The gateway decides which dialect a client
and a backend speak, and calls these.
"""

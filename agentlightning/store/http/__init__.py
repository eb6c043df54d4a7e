"""The store over the network: server, client, OTLP ingest, tokens."""

"""The `agl` command."""

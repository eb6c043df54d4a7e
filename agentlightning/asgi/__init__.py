"""What every server of the package does to a request before it serves it: the caller check, and compressed bodies."""

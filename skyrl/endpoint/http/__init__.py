"""The HTTP server of the endpoint."""

"""Commands that answer requests over HTTP until they are stopped."""

"""The embedded engine: decoding with torch in the process that trains."""

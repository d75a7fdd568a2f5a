"""Services that environments call, and their clients."""

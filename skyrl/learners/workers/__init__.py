"""The ranks of each role, and the group through which a driver calls them."""

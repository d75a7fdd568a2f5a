"""One module per kind of run: builds each collaborator from its own part of the configuration and connects them."""

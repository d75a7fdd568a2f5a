"""One module per kind of run: builds the collaborators from their own sub-configs and hands them over."""

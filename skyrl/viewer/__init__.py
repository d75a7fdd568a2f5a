"""Views of a run: the local pages of `skyrl view`, and the file of `skyrl report`. Nothing here imports torch."""

"""Models cut over ranks: tensors and experts."""

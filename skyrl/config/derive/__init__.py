"""Values that follow from others: the rules of `resolve`, sizes, layouts of models, capabilities of engines."""

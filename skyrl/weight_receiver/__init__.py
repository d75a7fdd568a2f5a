"""What engines do with new weights: they receive, verify and load what `weight_sync` sends."""

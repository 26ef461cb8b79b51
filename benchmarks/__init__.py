"""Speed and memory of a fold, as ratios measured in one run."""

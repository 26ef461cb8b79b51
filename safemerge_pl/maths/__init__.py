"""Linear algebra and optimisation on stacks of matrices."""

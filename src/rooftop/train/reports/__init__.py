"""Reports of a training in the terminal, in TensorBoard and as a page, and the effect of each switch of a recipe."""

"""Reports of a training in the terminal, in TensorBoard and as an HTML page, and ablations of a recipe's switches."""

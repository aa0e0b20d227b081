"""Reports of a training in the terminal, in TensorBoard and as an HTML page; ablations, which train a recipe with and
without each of its switches."""

"""Who is told what a training does: the terminal, TensorBoard and a page. And what each switch of a recipe is worth."""

"""Reports of a training in the terminal, in TensorBoard and as a page; ablations, which measure the effect of each
switch.
"""

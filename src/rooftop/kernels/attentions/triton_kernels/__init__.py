"""The Triton kernels of attentions. Each file has the name of the file with its operators in the parent package."""

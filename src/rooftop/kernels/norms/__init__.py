"""Layer norm and RMS norm of rows, and of sums of rows."""

"""ConvLSTM and the network of the next frame; a clip continued by it; weights that Keras saved."""

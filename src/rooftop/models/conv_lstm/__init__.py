"""ConvLSTM and the network that predicts the next frame; continuing a clip with it; weights saved by Keras."""

"""ConvLSTM, a network that predicts the next frame of a video, and the loading of Keras's weights."""

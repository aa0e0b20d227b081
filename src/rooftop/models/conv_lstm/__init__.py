"""The ConvLSTM layer, a network that predicts the next frame of a video, and a loader for weights from Keras."""

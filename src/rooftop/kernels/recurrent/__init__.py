"""ConvLSTM: the gates of a step, and all steps as one operator."""

"""Language models on a device: the engine Protocol, its messages, and the engines behind it."""

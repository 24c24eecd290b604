"""The batch schedule: how the sequences of a batch share passes over the weights, one record and one file a feature."""

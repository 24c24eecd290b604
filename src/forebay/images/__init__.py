"""Images as input: the vision tower of a multimodal model, streamed within the budget."""

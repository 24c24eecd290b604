"""An OpenAI-compatible server over the slots of one plan."""

"""An OpenAI-compatible server over the places of one plan."""

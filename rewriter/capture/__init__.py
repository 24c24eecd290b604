"""From a model to fx graphs of concrete sizes."""

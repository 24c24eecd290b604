"""From graphs with addresses to a Program."""

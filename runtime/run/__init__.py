"""Programs bound and executed, sessions, generation."""

"""Block passes that fold patterns of operators into one of ours."""

"""The data that flows: graphs and their operations, the Plan, the Program."""

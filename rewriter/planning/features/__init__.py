"""Features of batch schedules as the planner sees them, one file each; `table.py` lists them."""

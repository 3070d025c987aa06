"""Pictures of runs, from run folders and result files alone. matplotlib is imported only when something is drawn."""

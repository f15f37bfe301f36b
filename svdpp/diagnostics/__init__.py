"""Doctor, environment, memory estimates, cost profiling, draft sweeps and traces."""

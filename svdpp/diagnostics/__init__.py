"""Doctor, environment, memory estimates, cost profiling and traces."""

"""Start and rendezvous of ranks, their connection to the parent, and the end of processes."""

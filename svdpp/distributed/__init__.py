"""Ranks and wires: knows torch and processes; knows no diffusion."""

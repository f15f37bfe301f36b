"""Verification of new runs and of finished clips against a reference run of diffusers."""

"""One rank: its main loop, its stages, and what runs in threads beside the denoising."""

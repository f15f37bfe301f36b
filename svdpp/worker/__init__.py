"""One rank: its main loop, its stages, and the threads that run beside the denoising."""

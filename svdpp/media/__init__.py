"""Files: images in, videos out. Knows no torch and no ranks."""

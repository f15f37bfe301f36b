"""Wan 2.1 and 2.2: text to video and image to video."""

"""Files: reads that are bounded and checked, atomic writes, image files, checks of output paths."""

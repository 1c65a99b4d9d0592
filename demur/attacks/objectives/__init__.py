"""Attack objectives: what an attack maximises, one value per image."""

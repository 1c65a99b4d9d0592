"""RejectBench: a leaderboard of models that may reject; entries, their site, and verification."""
